"""What can never run is refused before it waits; a full queue is full by what really waits."""

import asyncio
import contextlib
import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sluice_core.errors import ContextLengthExceeded, KvCapacityExceeded, RequestError
from sluice_core.port import EngineLoad
from sluice_frontend.api import fit
from sluice_frontend.api.chat import parse_chat
from sluice_frontend.api.fit import token_budget
from sluice_frontend.api.generate import Completion, parse_completion
from sluice_frontend.config import ServerConfig
from sluice_frontend.serving.bounds import is_full, num_waiting
from unit.worker.api.test_waiting_memory import READY, create_service


def create_request(**fields: object) -> Completion:
    return parse_completion(json.dumps({"prompt": "x", **fields}).encode())


def create_snapshot(cap: int = 0, kv: int = 0) -> EngineLoad:
    return EngineLoad(0, cap, kv, 0, 0, 0, 0, 0, 0, 0)


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "error", "param"),
    [
        (0, 1, RequestError, "prompt"),
        (100, 1, ContextLengthExceeded, "prompt"),
        (101, 1, ContextLengthExceeded, "prompt"),
        (90, 101, ContextLengthExceeded, "max_tokens"),
        (80, 1, KvCapacityExceeded, "prompt"),
    ],
)
def test_what_can_never_fit_is_refused_by_its_field(
    num_prompt: int, max_tokens: int, error: type[RequestError], param: str
) -> None:
    with pytest.raises(error) as refused:
        token_budget(num_prompt, create_request(max_tokens=max_tokens), window=100, pool=80)
    assert (refused.value.http_status, refused.value.param) == (400, param)


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "budget"),
    [(90, 11, 10), (90, 100, 10), (50, 31, 30), (50, 30, 30), (50, 7, 7)],
)
def test_a_length_is_cut_to_the_room_behind_the_prompt(
    num_prompt: int, max_tokens: int, budget: int
) -> None:
    """To the window, and to the KV pool."""
    request, pool = create_request(max_tokens=max_tokens), 80 if num_prompt < 80 else 200
    assert token_budget(num_prompt, request, window=100, pool=pool) == budget


def test_a_default_length_over_the_window_is_cut_as_well() -> None:
    assert token_budget(3, create_request(), window=10, pool=80) == 7


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_a_chats_length_is_refused_by_the_field_that_was_sent(field: str) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], field: 101}
    chat = parse_chat(json.dumps(body).encode())
    with pytest.raises(ContextLengthExceeded) as refused:
        token_budget(1, chat.completion, window=100, pool=100)
    assert refused.value.param == field


def test_clients_know_by_the_words_that_a_longer_window_would_help() -> None:
    with pytest.raises(ContextLengthExceeded) as refused:
        token_budget(100, create_request(), window=100, pool=80)
    sentence = str(refused.value)
    assert "prompt is too long" in sentence  # LangChain
    assert "this model's maximum context length is 100 tokens" in sentence  # litellm
    with pytest.raises(ContextLengthExceeded) as refused:
        token_budget(90, create_request(max_tokens=101), window=100, pool=80)
    assert str(refused.value).startswith(  # vLLM
        "This model's maximum context length is 100 tokens. However, you requested 101 output "
        "tokens and your prompt contains at least 90 input tokens, for a total of at least 191 "
    )


@given(st.integers(1, 200), st.integers(1, 200), st.integers(1, 200))
def test_a_default_length_always_fits_a_prompt_that_does(
    num_prompt: int, window: int, pool: int
) -> None:
    if num_prompt >= min(window, pool):
        return
    for request in (create_request(), create_request(max_tokens=None)):
        budget = token_budget(num_prompt, request, window=window, pool=pool + 16)
        assert 1 <= budget <= window - num_prompt
        assert num_prompt + budget <= pool + 16


def test_more_tokens_at_least_than_the_prompt_leaves_are_refused_by_their_field(
    tmp_path: Path,
) -> None:
    """As vLLM refuses a min_tokens over the max_tokens that it has cut."""
    service, room = create_service(tmp_path, ServerConfig()), 10
    fields = {"prompt": [5] * (READY.max_model_len - room), "max_tokens": 100}
    for least in (room, room + 1):
        asked = parse_completion(json.dumps(fields | {"min_tokens": least}).encode())
        if least == room:
            assert asyncio.run(service.open(asked, 0.0)).choices
            continue
        with pytest.raises(RequestError, match="over the 10 tokens") as refused:
            asyncio.run(service.open(asked, 0.0))
        assert refused.value.param == "min_tokens"


@pytest.mark.parametrize(
    ("field", "limit", "of_one"),
    [("return_token_ids", "MAX_REPEATED_IDS", 4), ("echo", "MAX_REPEATED_CHARS", 12)],
)
def test_a_reply_that_repeats_too_much_of_its_prompts_is_refused_by_the_field_that_asks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str, limit: str, of_one: int
) -> None:
    service = create_service(tmp_path, ServerConfig())

    def ask(**fields: object) -> None:
        prompts = ["def def def ", "for for for "]
        asyncio.run(service.open(create_request(prompt=prompts, max_tokens=1, **fields), 0.0))

    (ids,) = {len(service.tokenizer.encode(text)) for text in ("def def def ", "for for for ")}
    of_all = 2 * 3 * (ids if field == "return_token_ids" else of_one)
    monkeypatch.setattr(fit, limit, of_all)
    ask(n=3, **{field: True})
    with pytest.raises(RequestError, match=f"over the limit of {of_all}; send fewer") as refused:
        ask(n=4, **{field: True})
    assert refused.value.param == field
    ask(n=4)


@pytest.mark.parametrize(("stream", "is_refused"), [(False, False), (True, True)])
def test_a_chat_in_one_piece_tells_its_prompt_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool, is_refused: bool
) -> None:
    service = create_service(tmp_path, ServerConfig())
    monkeypatch.setattr(fit, "MAX_REPEATED_IDS", 5)
    asked = create_request(
        prompt=[1, 2, 3], n=4, max_tokens=1, return_token_ids=True, stream=stream
    )
    asked = dataclasses.replace(asked, prompt_field="messages")
    with pytest.raises(RequestError) if is_refused else contextlib.nullcontext():
        asyncio.run(service.open(asked, 0.0))


def test_a_free_place_is_no_queue() -> None:
    assert not is_full(4, 0, 4, create_snapshot(), 0)
    assert is_full(5, 0, 4, create_snapshot(), 0)


@pytest.mark.parametrize(("queued", "full"), [(0, False), (2, False), (3, True)])
def test_newcomers_wait_behind_those_that_wait_for_memory(queued: int, full: bool) -> None:
    assert is_full(1, 4, 16, create_snapshot(kv=queued), 3) == full


def test_requests_that_the_engine_has_not_reported_yet_wait_too() -> None:
    assert num_waiting(10, 4, create_snapshot(cap=2)) == 6
    assert num_waiting(3, 4, create_snapshot(kv=2)) == 2
