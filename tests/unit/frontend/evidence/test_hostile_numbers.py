"""Numbers within the bounds, at their edges, close every tick: nothing that an engine may say ends
the process that adds it up."""

from hypothesis import given
from hypothesis import strategies as st
from sluice_core.bounded import MAX_COUNT, MAX_NUMBER, MAX_STEP_S, MAX_TOKENS
from sluice_core.contract import Evidence, StepModel, decode, encode
from sluice_core.port import EngineLoad, FirstParts
from sluice_core.wire import StepReport, encode_frame, from_engine_decoder
from sluice_frontend.evidence.recorder import Recorder

TOKENS, COUNTS = st.sampled_from([0, 1, MAX_TOKENS]), st.sampled_from([0, 1, MAX_COUNT])
COEFFICIENTS = st.sampled_from([0.0, 1e-300, 1.0, MAX_NUMBER])
MODELS = st.builds(StepModel, COEFFICIENTS, COEFFICIENTS, COEFFICIENTS, COEFFICIENTS, COUNTS,
                   COEFFICIENTS)  # fmt: skip
STATES = st.builds(EngineLoad, TOKENS, TOKENS, TOKENS, COUNTS, COUNTS, COUNTS, COUNTS, COUNTS,
                   COUNTS, COUNTS)  # fmt: skip
REPORTS = st.builds(
    StepReport,
    tokens=st.just([]),
    epoch=COUNTS,
    started_s=st.sampled_from([-MAX_NUMBER, 0.0, MAX_NUMBER]),
    step_s=st.sampled_from([0.0, MAX_STEP_S]),
    num_decodes=TOKENS,
    num_kv_tokens=COUNTS,
    num_prefill_tokens=TOKENS,
    num_running=TOKENS,
    at_cap=st.booleans(),
    snapshot=STATES,
    step_model=MODELS,
    price_s=COEFFICIENTS,
)


@given(st.lists(REPORTS, min_size=1, max_size=20), TOKENS, TOKENS)
def test_reports_at_the_edges_of_their_bounds_close_ticks(
    reports: list[StepReport], prompt: int, output: int
) -> None:
    recorder = Recorder("boot", 0.0, 1e9)
    for report in reports:
        body = encode_frame(report)[4:]
        told = from_engine_decoder.decode(body)
        assert isinstance(told, StepReport)
        recorder.engine.see(told.snapshot)
        recorder.engine.step(told.as_step(len(told.tokens)))
    timer = recorder.arrive("1", 0.0, 0.1, max(prompt, 1))
    recorder.admit(["1"], reports[0].started_s)
    recorder.first_token(timer, 0.5, FirstParts(0.0, 0.0, 0.4, 0))
    timer.num_tokens = output
    assert recorder.engine.prefill_ms(MAX_TOKENS, 0.6) < 1e30
    recorder.finish(timer, 0.9)
    recorder.advance(6.0, 1e9 + 6, 0.0)
    evidence = decode(encode(recorder.evidence(0)), Evidence)
    assert len(evidence.ticks) == 3
