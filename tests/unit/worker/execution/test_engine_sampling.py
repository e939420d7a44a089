"""Sampling parameters through scheduler and runner, against transformers and plain loops."""

from array import array
from pathlib import Path

import pytest
import torch
from sluice_core.port import Scores
from sluice_core.steptime import StepRecord
from sluice_core.wire import Submit
from sluice_core.work import Sampling
from sluice_worker.engine.loop import Engine
from torch import Tensor
from transformers import LlamaForCausalLM
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)
from unit.worker.engine.factories import (
    VOCAB,
    create_engine,
    create_request,
    create_scheduler,
    run_all,
    save_llama,
)

LENGTHS = (3, 17, 40, 65)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    save_llama(path, num_hidden_layers=2)
    return path


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


def logits_of(model: LlamaForCausalLM, token_ids: list[int]) -> Tensor:
    """[1, len(token_ids), VOCAB]."""
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([token_ids])).logits
    return logits.clone()


def reference(model: LlamaForCausalLM, request: Submit) -> list[int]:
    """Greedy output by a plain loop: vLLM's order, transformers' processors."""
    sampling, prompt = request.sampling, request.prompt_token_ids
    output: list[int] = []
    while len(output) < request.max_tokens:
        seen = torch.tensor([[*prompt, *output]])
        scores = logits_of(model, [*prompt, *output])[:, -1]
        if sampling.allowed_token_ids is not None:
            mask = torch.ones(VOCAB, dtype=torch.bool)
            mask[list(sampling.allowed_token_ids)] = False
            scores[:, mask] = float("-inf")
        if sampling.bad_words and output:
            words = [list(word) for word in sampling.bad_words]
            scores = NoBadWordsLogitsProcessor(words)(torch.tensor([output]), scores)
        stops = request.stop_token_ids
        if request.min_tokens and stops:
            least = MinNewTokensLengthLogitsProcessor(len(prompt), request.min_tokens, stops)
            scores = least(seen, scores)
        for token, bias in sampling.logit_bias.items():
            scores[:, token] += bias
        scores = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(seen, scores)
        counts = torch.bincount(torch.tensor(output, dtype=torch.long), minlength=VOCAB)
        scores = scores - sampling.frequency_penalty * counts
        scores = scores - sampling.presence_penalty * (counts > 0)
        token = int(scores.argmax())
        output.append(token)
        if token in stops and len(output) >= request.min_tokens:
            break
    return output


CASES: dict[str, Sampling] = {
    "repetition": Sampling(repetition_penalty=1.4),
    "frequency": Sampling(frequency_penalty=0.9),
    "presence": Sampling(presence_penalty=-1.2),
    "all-penalties": Sampling(repetition_penalty=1.2, frequency_penalty=0.5, presence_penalty=0.8),
    "bias": Sampling(logit_bias={3: 4.0, 7: -50.0, 11: 2.5}),
    "allowed": Sampling(allowed_token_ids=tuple(range(0, VOCAB, 3))),
    "bad-words": Sampling(bad_words=tuple((a, b) for a in range(20) for b in range(VOCAB // 2))),
    "everything": Sampling(
        repetition_penalty=1.3,
        presence_penalty=0.3,
        logit_bias={5: 3.0},
        allowed_token_ids=tuple(range(100)),
        bad_words=((4, 5), (5, 5)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_greedy_output_equals_the_reference_in_a_preempted_batch(
    checkpoint: Path, model: LlamaForCausalLM, name: str
) -> None:
    requests = [
        create_request(
            f"r{n}",
            n,
            max_tokens=24,
            sampling=CASES[name],
            min_tokens=6 if n == 17 else 0,
            stop_token_ids=range(0, VOCAB, 2) if n == 17 else (),
        )
        for n in LENGTHS
    ]
    plain = create_request("plain", 20, max_tokens=24)
    scheduler = create_scheduler(num_blocks=13, max_model_len=200)
    outputs = run_all(create_engine(checkpoint, scheduler), [*requests, plain])
    assert scheduler.counters.num_preemptions > 0
    assert outputs == {r.request_id: reference(model, r) for r in [*requests, plain]}


def test_every_seeded_parameter_is_independent_of_batch_and_preemption(checkpoint: Path) -> None:
    kinds = [
        Sampling(top_k=9, repetition_penalty=1.2),
        Sampling(top_p=0.8, logit_bias={1: 2.0}),
        Sampling(min_p=0.05, frequency_penalty=0.5),
        Sampling(),
    ]
    requests = [
        create_request(f"r{n}", n, max_tokens=30, temperature=1.1, seed=n, sampling=kind)
        for n, kind in zip(LENGTHS, kinds, strict=True)
    ]
    alone: dict[str, list[int]] = {}
    for request in requests:
        alone |= run_all(create_engine(checkpoint, create_scheduler()), [request])
    scheduler = create_scheduler(num_blocks=12, max_model_len=200)
    assert run_all(create_engine(checkpoint, scheduler), requests) == alone
    assert scheduler.counters.num_preemptions > 0


# Log-probabilities


def rows(scores: Scores) -> list[tuple[list[int], list[float], int]]:
    """Per token: its id and the likeliest, their log-probabilities, its rank."""
    ids, logprobs, ranks = array("i"), array("f"), array("i")
    ids.frombytes(scores.token_ids)
    logprobs.frombytes(scores.logprobs)
    ranks.frombytes(scores.ranks)
    width = scores.width
    return [
        (ids[at : at + width].tolist(), logprobs[at : at + width].tolist(), ranks[n])
        for n, at in enumerate(range(0, len(ids), width))
    ]


def check_row(row: tuple[list[int], list[float], int], wanted: Tensor, token: int) -> None:
    """`wanted`: log-probabilities [VOCAB] of the reference."""
    (own, *ids), (logprob, *others), rank = row
    assert own == token
    assert logprob == pytest.approx(float(wanted[token]), abs=1e-4)
    assert rank == int((wanted > wanted[token]).sum()) + 1
    best = wanted.topk(len(ids))
    assert others == pytest.approx(best.values.tolist(), abs=1e-4)
    assert ids == best.indices.tolist()


def run_scored(
    engine: Engine, requests: list[Submit]
) -> tuple[dict[str, list[int]], dict[str, list[Scores]], dict[str, list[Scores]]]:
    """Tokens, scores of the tokens and scores of the prompts of each request."""
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    scores: dict[str, list[Scores]] = {request.request_id: [] for request in requests}
    prompts: dict[str, list[Scores]] = {request.request_id: [] for request in requests}
    for request in requests:
        assert engine.submit(request, 0.0) is None
    while engine.has_work:
        report, _ = engine.step()
        assert report is not None
        for part in report.prompts:
            assert not tokens[part.request_id]
            prompts[part.request_id].append(part.scores)
        for token in report.tokens:
            tokens[token.request_id].append(token.token_id)
            if token.scores is not None:
                scores[token.request_id].append(token.scores)
    return tokens, scores, prompts


def test_logprobs_are_the_raw_ones_whatever_changes_the_choice(
    checkpoint: Path, model: LlamaForCausalLM
) -> None:
    requests = [
        create_request("none", 5, max_tokens=8),
        create_request("zero", 6, max_tokens=8, sampling=Sampling(logprobs=0)),
        create_request(
            "hot",
            9,
            max_tokens=8,
            temperature=1.5,
            seed=3,
            sampling=Sampling(logprobs=20, top_p=0.9, presence_penalty=2.0),
        ),
        create_request("five", 17, max_tokens=8, sampling=Sampling(logprobs=5)),
    ]
    tokens, scores, prompts = run_scored(create_engine(checkpoint, create_scheduler()), requests)
    assert scores["none"] == []
    assert not any(prompts.values())
    for request, num in zip(requests[1:], (0, 20, 5), strict=True):
        output = tokens[request.request_id]
        logits = logits_of(model, [*request.prompt_token_ids, *output])[0]
        wanted = torch.log_softmax(logits, dim=-1)[len(request.prompt_token_ids) - 1 :]
        assert len(scores[request.request_id]) == 8
        for at, (part, token) in enumerate(zip(scores[request.request_id], output, strict=True)):
            assert part.width == num + 1
            (row,) = rows(part)
            check_row(row, wanted[at], token)


@pytest.mark.parametrize(("num_blocks", "budget"), [(64, 24), (8, 4), (8, 11)])
def test_prompt_logprobs_equal_the_reference_chunked_cached_and_preempted(
    checkpoint: Path, model: LlamaForCausalLM, num_blocks: int, budget: int
) -> None:
    scheduler = create_scheduler(num_blocks=num_blocks, budget=budget, max_model_len=128)
    engine = create_engine(checkpoint, scheduler)
    shared = create_request("first", 70, max_tokens=20).prompt_token_ids
    run_all(engine, [create_request("warm", shared)])  # its blocks are cached, its logits are not
    asked = Sampling(prompt_logprobs=3)
    requests = [
        create_request("plain", shared[:30], max_tokens=60),
        create_request("again", shared, max_tokens=20, sampling=asked),
        create_request("other", 90, max_tokens=20, sampling=asked),
        create_request("one", 1, max_tokens=20, sampling=asked),
    ]
    tokens, _, prompts = run_scored(engine, requests)
    assert (scheduler.counters.num_preemptions > 0) == (num_blocks == 8)
    assert tokens["again"] == reference(model, requests[1])
    for request in requests[1:3]:
        prompt = request.prompt_token_ids
        told = [row for part in prompts[request.request_id] for row in rows(part)]
        wanted = torch.log_softmax(logits_of(model, prompt)[0], dim=-1)
        assert len(told) == len(prompt) - 1
        for at, row in enumerate(told):
            check_row(row, wanted[at], prompt[at + 1])
    assert prompts["one"] == prompts["plain"] == []


def test_a_step_that_scores_a_prompt_teaches_the_step_model_nothing(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = create_engine(checkpoint, create_scheduler())
    learnt: list[StepRecord] = []
    monkeypatch.setattr(engine.times, "add", learnt.append)
    scored = Sampling(prompt_logprobs=1)
    run_scored(engine, [create_request("scored", 20, max_tokens=3, sampling=scored)])
    assert [(r.num_prefill_tokens, r.num_decodes) for r in learnt] == [(0, 1), (0, 1)]
