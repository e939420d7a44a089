"""What a reply repeats of its prompts is there once for all answers to one."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

from sluice_core.port import FirstParts
from sluice_core.wire import TokenOut
from sluice_frontend.api import response_types
from sluice_frontend.api.generate import parse_completion
from sluice_frontend.config import ServerConfig
from sluice_worker.api.formats import CompletionFormat
from sluice_worker.api.generation import Generation
from sluice_worker.api.service import Service
from unit.worker.api.test_waiting_memory import create_service


def finished(service: Service, **fields: Any) -> Generation:
    """A request of which each answer is one token."""
    body = json.dumps({"max_tokens": 1, **fields}).encode()
    generation = asyncio.run(service.open(parse_completion(body), time.monotonic()))
    for choice in generation.choices:
        choice.feed(TokenOut("0", 2, first=FirstParts(0.0, 0.0, 0.0, 0), finish_reason="length"))
    return generation


def test_answers_to_one_prompt_share_its_token_ids(tmp_path: Path, monkeypatch: Any) -> None:
    service = create_service(tmp_path, ServerConfig())
    prompts, made = [[5, 6, 7], [8, 9]], list[list[int]]()

    class Choice(response_types.Choice, frozen=True, kw_only=True):
        def __post_init__(self) -> None:
            assert isinstance(self.prompt_token_ids, list)
            made.append(self.prompt_token_ids)

    monkeypatch.setattr(response_types, "Choice", Choice)
    generation = finished(service, prompt=prompts, n=4, return_token_ids=True)
    form = CompletionFormat(generation, "tiny", service.tokenizer)
    told = json.loads(form.body(["x"] * 8))
    assert [choice["prompt_token_ids"] for choice in told["choices"]] == [
        ids for ids in prompts for _ in range(4)
    ]
    assert len({id(ids) for ids in made}) == 2


def test_the_size_of_a_reply_is_known_before_it_is_written(tmp_path: Path) -> None:
    service = create_service(tmp_path, ServerConfig())
    for fields, least in (
        ({"return_token_ids": True}, 4 * 1000 * 6),
        ({"echo": True}, 4 * 1000),
        ({"echo": True, "logprobs": 20}, 4 * 1000 * 21 * 60),
        ({"prompt_logprobs": 0}, 4 * 1000 * 60),
    ):
        generation = finished(service, prompt=[90] * 1000, n=4, **fields)
        size = CompletionFormat(generation, "tiny", service.tokenizer).num_bytes(
            generation.choices, 4
        )
        assert least < size < 3 * least, fields
