"""Time that a client takes to read is its own: no gap of the server's."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sluice_core.contract import Slo
from sluice_core.model.sizing import BODIES_BYTES
from sluice_core.port import FinishReason, FirstParts
from sluice_core.wire import TokenOut, packed
from sluice_frontend.api.generate import parse_completion
from sluice_frontend.evidence.ledger import Ledger
from sluice_frontend.evidence.metrics import Statistics
from sluice_frontend.evidence.recorder import Recorder
from sluice_frontend.http.bodies import SMALL_ANSWER, Answers
from sluice_worker.api import stream
from sluice_worker.api.generation import Arrived, Generation, OpenChoice
from sluice_worker.api.stream import EventStream, WholeReply
from sluice_worker.text.output import OutputText, StopStrings
from sluice_worker.text.tokenizer import Tokenizer
from starlette.responses import Response
from unit.worker.api.tiny import write_tokenizer

GAP_S = 0.1
TOKENS = 6
LARGE = SMALL_ANSWER + 1


@pytest.mark.parametrize(
    "kind",
    [
        lambda form: WholeReply(form, Answers(BODIES_BYTES)),
        lambda form: EventStream(form, Answers(BODIES_BYTES), 0.0),
    ],
    ids=["whole", "stream"],
)
async def test_a_large_reply_is_written_down_in_a_thread(kind: Callable[[Any], Response]) -> None:
    threads: list[int] = []

    def write(what: Any) -> bytes:
        threads.append(threading.get_ident())
        return b""

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        pass

    nothing: Any = None
    for size in (SMALL_ANSWER + 1, SMALL_ANSWER):
        generation = Generation("cmpl-1", parse_completion(b'{"prompt": "a"}'), nothing, nothing)
        choice: Any = SimpleNamespace(
            index=0,
            finish_reason=None,
            output_text=SimpleNamespace(token_ids=[]),
            feed=lambda token: "",
            is_booked=True,
        )
        first: Any = SimpleNamespace(first=True)
        generation.choices.append(choice)
        generation.arrive(Arrived(choice, first, False, False, 0.0))
        form: Any = SimpleNamespace(
            generation=generation,
            event=write,
            body=write,
            tail=lambda: b"",
            num_bytes=lambda prompts, num_tokens, size=size: size,
        )
        await kind(form)({"type": "http"}, receive, send)
    assert [thread == threading.get_ident() for thread in threads] == [False, True]


@pytest.mark.parametrize("slow", ["client", "large", "writing"])
async def test_what_comes_while_a_client_reads_slowly_is_handed_over_when_it_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: str
) -> None:
    """Its last token, or a large first one. What comes while that one is being written down is
    handed over after it."""
    write_tokenizer(tmp_path / "tokenizer.json")
    clock = SimpleNamespace(now_s=1000.0)
    monkeypatch.setattr(stream, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    recorder = Recorder("boot", clock.now_s, 1000.0)
    recorder.ticks.start(1, 4, Slo(itl_ms=1.5e3 * GAP_S))
    ledger = Ledger(recorder, Statistics(Slo(), 0.0))
    generation = Generation("cmpl-1", parse_completion(b'{"prompt": "a"}'), ledger, lambda _: None)
    text = OutputText(
        Tokenizer(tmp_path).detokenizer(),
        stops=StopStrings(()),
        stop_token_ids=frozenset(),
        min_tokens=0,
    )
    timer = recorder.arrive("0", clock.now_s, clock.now_s, 1)
    sink = generation.add(OpenChoice(0, timer, text, packed([1]), counts_prompt=True))
    loop, came_s, sent = asyncio.get_running_loop(), list[float](), list[Any]()

    def come() -> None:
        """The next token, a while after the one before it."""
        clock.now_s += GAP_S
        first = None if came_s else FirstParts(0.0, 0.0, 0.0, 0)
        came_s.append(clock.now_s)
        end: FinishReason | None = "length" if len(came_s) == TOKENS else None
        token = TokenOut("0", 2, first=first, finish_reason=end)
        sink.token(token, at_cap=False, is_long=False, now_s=clock.now_s)

    async def all_come() -> None:
        while len(came_s) < TOKENS:
            come()
        clock.now_s += GAP_S

    def event(item: Any) -> bytes:
        if slow == "writing" and item.token.first:
            asyncio.run_coroutine_threadsafe(all_come(), loop).result(10)
        item.choice.feed(item.token)
        return b"data\n\n"

    async def send(message: Any) -> None:
        sent.append(message)
        if slow == "client" and len(sent) == len(["start", "first"]):
            come()
        elif slow != "writing" and len(sent) == len(["start", "first", "next"]):
            await all_come()  # the second token, or the whole first, fills its buffers

    async def receive() -> Any:
        await asyncio.Event().wait()

    form: Any = SimpleNamespace(
        generation=generation,
        event=event,
        tail=lambda: b"",
        num_bytes=lambda firsts, num: LARGE if firsts and slow != "client" else 0,
    )
    come()
    await EventStream(form, Answers(BODIES_BYTES), 0.0)({"type": "http"}, receive, send)
    assert sent[-1]["more_body"] is False
    assert (timer.num_tokens, timer.num_gaps_over) == (TOKENS, 0)
    told_s = (clock.now_s, clock.now_s) if slow == "writing" else (came_s[0], came_s[-1])
    assert (timer.first_s, timer.last_s) == told_s
