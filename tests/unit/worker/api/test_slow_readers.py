"""Time that a client takes to read is its own: no gap of the server's."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sluice_worker.contract import Slo
from sluice_worker.evidence import Recorder
from sluice_worker.metrics import Statistics
from sluice_worker.protocol import parse_completion
from sluice_worker.server.generation import Arrived, Choice, Generation
from sluice_worker.server.ledger import Ledger
from sluice_worker.server.stream import MANY_IDS, EventStream, WholeReply
from sluice_worker.server.text import Transcript
from sluice_worker.tokenizer import Tokenizer
from sluice_worker.wire import FinishReason, FirstToken, Scores, TokenOut, packed
from starlette.responses import Response

from .tiny import write_tokenizer

PAUSE_S = 0.6
TOKENS = 6


@pytest.mark.parametrize("kind", [WholeReply, lambda form: EventStream(form, 0.0)])
async def test_a_reply_that_repeats_many_ids_is_written_down_in_a_thread(
    kind: Callable[[Any], Response],
) -> None:
    threads: list[int] = []

    def write(what: Any) -> bytes:
        threads.append(threading.get_ident())
        return b""

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        pass

    nothing: Any = None
    for asked, num_ids in ((True, MANY_IDS + 1), (True, MANY_IDS), (False, MANY_IDS + 1)):
        body = json.dumps({"prompt": "a", "return_token_ids": asked}).encode()
        generation = Generation("cmpl-1", parse_completion(body), nothing, nothing)
        choice: Any = SimpleNamespace(
            index=0,
            finish_reason=None,
            prompt_scores=[],
            flight=SimpleNamespace(num_prompt_tokens=num_ids),
            feed=lambda token: "",
            is_booked=True,
        )
        first: Any = SimpleNamespace(first=True)
        generation.choices.append(choice)
        generation.arrive(Arrived(choice, first, False, 0.0))
        form: Any = SimpleNamespace(
            generation=generation, event=write, body=write, tail=lambda: b""
        )
        await kind(form)({"type": "http"}, receive, send)
    assert [thread == threading.get_ident() for thread in threads] == [False, True, True]


@pytest.mark.parametrize("slow", ["client", "writing"])
def test_what_comes_while_a_client_reads_slowly_is_handed_over_when_it_came(
    tmp_path: Path, slow: str
) -> None:
    """And what comes while the first token's scores are written down, after that token."""
    write_tokenizer(tmp_path / "tokenizer.json")
    tokenizer, now_s = Tokenizer(tmp_path), time.monotonic()
    recorder = Recorder("boot", now_s, 1000.0)
    recorder.start(1, 4, Slo(itl_ms=1e3 * PAUSE_S / 2))
    ledger = Ledger(recorder, Statistics(Slo(), 0.0))
    generation = Generation("cmpl-1", parse_completion(b'{"prompt": "a"}'), ledger, lambda _: None)
    text = Transcript(tokenizer.detokenizer(), stops=(), stop_token_ids=frozenset(), min_tokens=0)
    flight = recorder.arrive("0", now_s, now_s, 1)
    sink = generation.add(Choice(0, flight, text, packed([1]), counts_prompt=True))
    if slow == "writing":
        sink.prompt(Scores(1, b"", b"", b""))

    async def engine(stalls: asyncio.Event) -> None:
        for i in range(TOKENS):
            first = FirstToken(0.0, 0.0, 0.0, 0) if i == 0 else None
            end: FinishReason | None = "length" if i == TOKENS - 1 else None
            token = TokenOut("0", 2, first=first, finish_reason=end)
            sink.token(token, at_cap=False, now_s=time.monotonic())
            await (
                stalls.wait() if i == 1 and slow == "client" else asyncio.sleep(PAUSE_S / TOKENS)
            )

    async def answer() -> None:
        stalls, gone, sent = asyncio.Event(), asyncio.Event(), list[Any]()

        async def send(message: Any) -> None:
            sent.append(message)
            if slow == "client" and len(sent) == len(["start", "first", "second"]):
                stalls.set()  # the second token fills its buffers, and it reads on after a while
                await asyncio.sleep(PAUSE_S)

        async def receive() -> Any:
            await gone.wait()

        form: Any = SimpleNamespace(generation=generation, event=event, tail=lambda: b"")
        tokens = asyncio.create_task(engine(stalls))
        await EventStream(form, 0.0)({"type": "http"}, receive, send)
        await tokens
        assert sent[-1]["more_body"] is False

    def event(item: Any) -> bytes:
        if slow == "writing" and item.token.first:
            time.sleep(PAUSE_S)
        item.choice.feed(item.token)
        return b"data\n\n"

    asyncio.run(answer())
    assert flight.num_tokens == TOKENS
    assert flight.num_gaps_over == 0
    assert flight.first_s is not None
    assert flight.last_s >= flight.first_s
