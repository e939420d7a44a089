"""One request's sequences: what fails one of them has failed the request."""

import time
from pathlib import Path

from sluice_core.contract import Slo, Tick
from sluice_core.errors import DeadlineUnreachable, Shed, SluiceError
from sluice_core.port import FirstParts
from sluice_core.wire import TokenOut, packed
from sluice_frontend.api.generate import parse_completion
from sluice_frontend.evidence.ledger import Ledger
from sluice_frontend.evidence.metrics import Statistics
from sluice_frontend.evidence.recorder import Recorder
from sluice_worker.api.generation import Generation, OpenChoice
from sluice_worker.api.prompts import Echo
from sluice_worker.text.output import OutputText, StopStrings
from sluice_worker.text.tokenizer import Tokenizer
from unit.worker.api.tiny import write_tokenizer

HOUR_MS = 3.6e6


def left(directory: Path, dropped: SluiceError | None = None) -> Tick:
    """The tick of a request of three sequences that nobody reads any more.

    `dropped`: why its first one was, if it was.
    """
    write_tokenizer(directory / "tokenizer.json")
    tokenizer, now_s = Tokenizer(directory), time.monotonic()
    recorder = Recorder("boot", now_s, 1000.0)
    recorder.ticks.start(1, 4, Slo(ttft_ms=HOUR_MS, e2e_ms=HOUR_MS))
    aborted: list[str] = []
    generation = Generation(
        "cmpl-1",
        parse_completion(b'{"prompt": "a", "n": 3}'),
        Ledger(recorder, Statistics(Slo(), 0.0)),
        aborted.append,
    )
    text = OutputText(
        tokenizer.detokenizer(), stops=StopStrings(()), stop_token_ids=frozenset(), min_tokens=0
    )
    timers = [recorder.arrive(str(i), now_s, now_s, 1) for i in range(3)]
    choices = [
        OpenChoice(i, f, text, packed([1]), counts_prompt=i == 0) for i, f in enumerate(timers)
    ]
    sinks = [generation.add(choice) for choice in choices]
    if dropped is not None:
        sinks[0].ended(dropped)
    generation.leave()
    generation.leave()
    assert aborted == ["0", "1", "2"]
    recorder.advance(now_s + 2, 1002.0, 0.0)
    (tick,) = recorder.evidence(0).ticks
    return tick


def test_a_scored_prompt_ends_by_its_length_whatever_token_would_have_come(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer.json")
    text = OutputText(
        Tokenizer(tmp_path).detokenizer(),
        stops=StopStrings(()),
        stop_token_ids=frozenset(),
        min_tokens=0,
    )
    timer = Recorder("boot", 0.0, 0.0).arrive("0", 0.0, 0.0, 1)
    choice = OpenChoice(
        0, timer, text, packed([1]), counts_prompt=True, echo=Echo("a"), is_scoring=True
    )
    parts = FirstParts(0.0, 0.0, 0.0, 0)
    assert choice.feed(TokenOut("0", 2, first=parts, finish_reason="stop")) == "a"
    assert choice.finish_reason == "length"


def test_a_client_that_leaves_in_time_has_missed_nothing(tmp_path: Path) -> None:
    tick = left(tmp_path)
    assert (tick.refused, tick.ttft.n, tick.ttft.over, tick.e2e.over) == (0, 3, 0, 0)


def test_all_sequences_of_a_request_that_was_shed_have_missed(tmp_path: Path) -> None:
    tick = left(tmp_path, Shed("too late"))
    assert (tick.refused, tick.ttft.n, tick.ttft.over, tick.e2e.over) == (3, 3, 3, 3)


def test_no_sequence_of_a_request_has_missed_that_asked_for_more_than_the_targets(
    tmp_path: Path,
) -> None:
    tick = left(tmp_path, DeadlineUnreachable("too late"))
    assert (tick.arrivals, tick.refused, tick.ttft.n, tick.e2e.n) == (3, 3, 0, 0)
