"""Sampling parameters through a real worker, streamed and not, as clients send and read them."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from integration.worker_process import Worker, running_worker, stream_events

FLAGS = ("--max-num-seqs", "8", "--num-gpu-blocks-override", "256", "--max-model-len", "512")
PROMPT = "def add(a, b):"


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    with running_worker(tmp_path_factory.mktemp("sampling"), *FLAGS) as worker:
        yield worker


def answer(worker: Worker, **fields: Any) -> httpx.Response:
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **fields}
    return httpx.post(worker.url + "/v1/completions", json=body, timeout=60)


def whole(worker: Worker, **fields: Any) -> dict[str, Any]:
    reply = answer(worker, return_token_ids=True, **fields)
    assert reply.status_code == 200, reply.text
    choice: dict[str, Any] = reply.json()["choices"][0]
    return choice


def streamed(worker: Worker, **fields: Any) -> dict[str, Any]:
    """The events of a stream put together as one choice."""
    *events, done = stream_events(answer(worker, stream=True, return_token_ids=True, **fields).text)
    assert done == "[DONE]"
    parts = [json.loads(event)["choices"][0] for event in events]
    joined: dict[str, Any] = {
        **parts[-1],
        "text": "".join(part["text"] for part in parts),
        "token_ids": [token_id for part in parts for token_id in part["token_ids"]],
        "prompt_token_ids": parts[0]["prompt_token_ids"],
    }
    if parts[0]["logprobs"] is not None:
        joined["logprobs"] = {
            name: [value for part in parts for value in part["logprobs"][name]]
            for name in parts[0]["logprobs"]
        }
    return joined


def test_choices_follow_allowed_bias_bad_words_and_penalties(worker: Worker) -> None:
    plain = whole(worker)["token_ids"]
    allowed = [token for token in range(40, 60) if token not in plain]
    assert set(whole(worker, allowed_token_ids=allowed)["token_ids"]) <= set(allowed)
    assert whole(worker, logit_bias={"300": 100})["token_ids"] == [300] * 8
    assert plain[0] not in whole(worker, logit_bias={str(plain[0]): -100})["token_ids"]
    spread = whole(worker, logit_bias={"300": 100}, frequency_penalty=2, max_tokens=60)
    assert len(set(spread["token_ids"])) > 1
    never = whole(worker, logit_bias={"300": 100}, presence_penalty=2, repetition_penalty=100)
    assert never["token_ids"].count(300) < 8


def test_a_bad_word_never_appears(worker: Worker) -> None:
    (letter,) = whole(worker, prompt="q", max_tokens=1)["prompt_token_ids"]
    fields = {"logit_bias": {str(letter): 100}, "max_tokens": 20}
    assert whole(worker, **fields)["text"] == "q" * 20
    assert letter not in whole(worker, **fields, bad_words=["q"])["token_ids"]
    ids = whole(worker, **fields, bad_words=["qqq"])["token_ids"]
    runs = [len(run) for run in "".join("q" if i == letter else " " for i in ids).split()]
    assert max(runs) == 2


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1.0, "seed": 5, "top_k": 5, "top_p": 0.9, "min_p": 0.01},
        {"temperature": 1.3, "seed": 6, "repetition_penalty": 1.2, "logprobs": 3},
        {"logprobs": 0},
        {"logprobs": 2, "echo": True},
        {"logprobs": 2, "echo": True, "max_tokens": 0},
        {"echo": True, "prompt": [5, 6, 7]},
        {"logprobs": 1, "return_tokens_as_token_ids": True},
        {"logit_bias": {"300": 100}, "stop_token_ids": [300], "min_tokens": 4},
        {"logit_bias": {"0": 100}, "ignore_eos": False, "skip_special_tokens": False},
    ],
    ids=str,
)
def test_a_stream_tells_what_the_whole_reply_tells(worker: Worker, fields: dict[str, Any]) -> None:
    assert streamed(worker, **fields) == whole(worker, **fields)


def test_every_choice_has_a_seed_of_its_own(worker: Worker) -> None:
    fields = {"temperature": 1.0, "seed": 9, "n": 3, "top_p": 0.95}
    first, again = (answer(worker, **fields).json()["choices"] for _ in range(2))
    assert first == again
    assert len({choice["text"] for choice in first}) == 3


def test_min_tokens_holds_back_stop_tokens_and_the_end(worker: Worker) -> None:
    fields = {"logit_bias": {"300": 100, "0": 99}, "stop_token_ids": [300], "ignore_eos": False}
    early = whole(worker, **fields)
    assert (early["token_ids"], early["stop_reason"]) == ([300], 300)
    late = whole(worker, **fields, min_tokens=4)
    assert len(late["token_ids"]) == 5
    assert late["token_ids"][-1] == 300
    assert not {300, 0} & set(late["token_ids"][:-1])
    end = whole(worker, logit_bias={"0": 100}, ignore_eos=False)
    assert (end["token_ids"], end["finish_reason"], end["stop_reason"]) == ([0], "stop", None)


def test_stop_strings_are_left_out_or_included(worker: Worker) -> None:
    text = whole(worker, max_tokens=60)["text"]
    stop = text[10:13]
    end = text.index(stop)
    for fields, expected in (
        ({}, text[:end]),
        ({"include_stop_str_in_output": True}, text[:end] + stop),
    ):
        for choice in (
            whole(worker, max_tokens=60, stop=[stop], **fields),
            streamed(worker, max_tokens=60, stop=[stop], **fields),
        ):
            assert (choice["text"], choice["stop_reason"]) == (expected, stop)


def test_a_stop_string_ends_the_text_once_it_ends_after_min_tokens(worker: Worker) -> None:
    (letter,) = whole(worker, prompt="q", max_tokens=1)["prompt_token_ids"]
    fields = {"logit_bias": {str(letter): 100}, "stop": ["qq"]}
    for min_tokens, text, reason in (
        (0, "", "stop"),
        (1, "", "stop"),
        (2, "q", "stop"),
        (7, "qqqqqq", "stop"),
        (8, "qqqqqqqq", "length"),
    ):
        for ask in (whole, streamed):
            choice = ask(worker, **fields, min_tokens=min_tokens)
            assert (choice["text"], choice["finish_reason"]) == (text, reason), min_tokens


def test_special_tokens_are_shown_on_request(worker: Worker) -> None:
    fields = {"logit_bias": {"0": 100}, "max_tokens": 3}
    assert whole(worker, **fields)["text"] == ""
    assert whole(worker, **fields, skip_special_tokens=False)["text"] == "<|end|>" * 3
    ended = {**fields, "ignore_eos": False, "skip_special_tokens": False}
    assert whole(worker, **ended)["text"] == ""  # the end is no text, unless it is asked for
    assert whole(worker, **ended, include_stop_str_in_output=True)["text"] == "<|end|>"


def test_logprobs_describe_the_text(worker: Worker) -> None:
    choice = whole(worker, logprobs=4, max_tokens=20)
    told = choice["logprobs"]
    assert {len(values) for values in told.values()} == {20}
    # Bytes of an unfinished character are held back: they come in front of the next token's text.
    pairs = zip(["", *told["tokens"]], told["tokens"], told["text_offset"], strict=False)
    whole_tokens = [(token, at) for last, token, at in pairs if "\ufffd" not in last + token]
    assert whole_tokens
    assert all(choice["text"][at:].startswith(token) for token, at in whole_tokens)
    for logprob, likeliest in zip(told["token_logprobs"], told["top_logprobs"], strict=True):
        assert logprob == max(likeliest.values())  # greedy
    # Raw: neither temperature nor bias changes what the model said.
    bent = whole(worker, logprobs=4, max_tokens=1, temperature=2.0, seed=1, logit_bias={"300": 5})
    raw = {**bent["logprobs"]["top_logprobs"][0]}
    assert all(raw[key] == value for key, value in told["top_logprobs"][0].items())


def test_scoring_a_prompt_adds_up_to_generating_it(worker: Worker) -> None:
    """What generation said of its tokens, scoring says of the same tokens as a prompt."""
    made = whole(worker, logprobs=0, max_tokens=12)
    full = [*made["prompt_token_ids"], *made["token_ids"]]
    reply = answer(worker, prompt=full, echo=True, max_tokens=0, logprobs=2).json()
    scored = reply["choices"][0]["logprobs"]
    assert reply["usage"]["completion_tokens"] == 0
    assert reply["choices"][0]["text"] == PROMPT + made["text"]
    assert len(scored["tokens"]) == len(full)
    assert scored["token_logprobs"][0] is None
    assert scored["top_logprobs"][0] is None
    assert scored["token_logprobs"][-12:] == pytest.approx(
        made["logprobs"]["token_logprobs"], abs=1e-4
    )


def test_prompt_logprobs_are_told_by_id(worker: Worker) -> None:
    choice = whole(worker, prompt_logprobs=2)
    told, ids = choice["prompt_logprobs"], choice["prompt_token_ids"]
    assert told[0] is None
    assert len(told) == len(ids)
    for token_id, entries in zip(ids[1:], told[1:], strict=True):
        own = entries[str(token_id)]
        assert set(own) == {"logprob", "rank", "decoded_token"}
        assert 2 <= len(entries) <= 3
        assert own["rank"] <= 2 or len(entries) == 3
    assert choice["logprobs"] is None


def test_a_prompt_is_cut_to_its_end(worker: Worker) -> None:
    full = whole(worker)["prompt_token_ids"]
    assert whole(worker, truncate_prompt_tokens=3)["prompt_token_ids"] == full[-3:]
    assert whole(worker, truncate_prompt_tokens=99)["prompt_token_ids"] == full
    cut = whole(worker, prompt=[5] * 600, truncate_prompt_tokens=-1)
    assert len(cut["prompt_token_ids"]) == 512 - 8
    echoed = whole(worker, truncate_prompt_tokens=3, echo=True, max_tokens=0)
    assert PROMPT.endswith(echoed["text"])
    assert echoed["text"] != PROMPT


@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_token_ids": [384]},
        {"stop_token_ids": [384]},
        {"logit_bias": {"384": 1}},
        {"allowed_token_ids": [0], "min_tokens": 1},
        {"truncate_prompt_tokens": 513},
        {"best_of": 2},
        {"priority": 1},
        {"suffix": "x"},
    ],
    ids=str,
)
def test_what_cannot_be_honoured_is_refused_by_name(worker: Worker, fields: dict[str, Any]) -> None:
    reply = answer(worker, **fields)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, next(iter(fields)))


def test_a_request_that_runs_out_of_tokens_fails_alone_and_says_why(worker: Worker) -> None:
    prompt = whole(worker, prompt="a", max_tokens=1)["prompt_token_ids"]
    reply = answer(worker, allowed_token_ids=prompt, bad_words=["aa"])
    assert reply.status_code == 500
    assert "exclude every token" in reply.json()["error"]["message"]
    assert answer(worker).status_code == 200


def test_no_request_of_this_module_left_a_traceback(worker: Worker) -> None:
    assert "Traceback" not in worker.log.read_text()
    integrity = httpx.get(worker.admin_url + "/v1/integrity").json()
    assert integrity == {"problem": None}
