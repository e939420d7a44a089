"""The text work of one worker under its live limits: prompts become sequences of the engine."""

import asyncio
import time
import uuid
from array import array
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import TypeVar

from msgspec import structs
from sluice_core.errors import RequestError
from sluice_core.model.files import GENERATION_CONFIG, Directory, is_there, read_json
from sluice_core.model.sizing import READING_BYTES
from sluice_core.model.stored import read_config
from sluice_core.model.tasks import task_of
from sluice_core.wire import Submit, packed
from sluice_core.work import Sampling
from sluice_frontend.api.fit import check_length, fit
from sluice_frontend.api.generate import Completion
from sluice_frontend.api.sampling_params import (
    LOGPROB_BYTES,
    MAX_OUTPUT_LOGPROBS,
    OPENAI,
    Defaults,
    check_something_left,
    check_vocabulary,
    defaults_of,
    for_engine,
)
from sluice_frontend.batches.routes import Batches
from sluice_frontend.evidence.measured import Measured
from sluice_frontend.http.beside import Beside
from sluice_frontend.http.bodies import Answers, Bodies
from sluice_frontend.http.offload import LARGE, FairQueue
from sluice_frontend.serving.admission import Admission
from sluice_frontend.serving.limits import RuntimeLimits
from sluice_frontend.serving.runtime import Runtime

from ..base.config import EngineConfig, WorkerConfig
from ..base.resources import Resources
from ..engine.client import EngineClient
from ..text.output import OutputText
from ..text.pieces import Check, any_number
from ..text.renderer import Templates
from ..text.template import Pieces
from ..text.tokenizer import Tokenizer
from ..text.tokenizer_config import eos_token_ids
from .generation import Generation, OpenChoice
from .prompts import Echo, Prompts
from .reading import num_chars, read_chat
from .vector_facts import read_vector_facts

T = TypeVar("T")


class Service:
    """One worker's API side. All methods belong to the event loop's thread."""

    def __init__(self, config: WorkerConfig) -> None:
        directory, resources = Path(config.engine.model.removeprefix("file://")), Resources()
        self.config = config
        source = Directory(directory)
        config_json = read_config(source)
        self.task = task_of(source, config_json)
        self.vectors = None
        if self.task != "generate":
            self.vectors = read_vector_facts(self.task, source, config_json, config.engine)
        reads_texts = self.vectors is None or self.vectors.sentence is not None
        self.tokenizer = Tokenizer(directory, is_needed=reads_texts)
        self.templates = Templates.of(directory, config.text.chat_template, self.tokenizer)
        self._dimensions = trained_dimensions(config_json)
        self.prompts = Prompts(self.tokenizer, config_json, parse_special=config.text.parse_special)
        self.bodies = Bodies(config.server)
        self.answers = Answers(config.server.memory_bytes)
        self.texts, self._beside = FairQueue(), Beside(memory_bytes=READING_BYTES)
        self._turn = asyncio.Lock()
        self.eos_token_ids = eos_token_ids(directory, config_json, self.tokenizer.config)
        self.defaults = OPENAI
        if config.text.generation_config == "auto" and is_there(directory, GENERATION_CONFIG):
            self.defaults = defaults_of(read_json(directory, GENERATION_CONFIG))
        measured = Measured(config.server.flag_slo)
        self.client = EngineClient(measured.liveness)
        self.runtime = Runtime(
            config.server,
            live_at_start(config),
            measured,
            self.client,
            model_name=config.model_name,
            cache_config=_cache_config(config.engine),
            throttled_s=resources.throttled_s,
            task=self.task if reads_texts else f"{self.task} images",
        )
        self.batches = Batches(self.runtime)
        memory_bytes = resources.memory_bytes()
        self.admission = Admission(self.runtime, memory_bytes)
        self._max_logprobs = min(MAX_OUTPUT_LOGPROBS, memory_bytes // LOGPROB_BYTES)
        self._ids = count(1)

    async def open(
        self, request: Completion, arrival_s: float, id_prefix: str = "cmpl"
    ) -> Generation:
        """Let a request in and submit its sequences, or raise why not."""
        reading, stats = _Reading(self, request), self.runtime.stats
        facts = self.admission.check_open(is_background=request.is_background)
        self.admission.check_model(request.model)
        work, budgets = await fit(request, reading, facts, self._max_logprobs)
        self.admission.admit(work, arrival_s)
        num_choices = request.sampling.n
        reply_id = f"{id_prefix}-{request.request_id or uuid.uuid4().hex}"
        # It may wait for long, and parsed token ids take ten times the memory of a choice's.
        kept = replace(request, prompts=())
        generation = Generation(reply_id, kept, self.runtime.ledger, self.client.abort)
        stats.observe("request_params_n", num_choices)
        for ids, echo, max_tokens in zip(reading.ids, reading.echo, budgets, strict=True):
            stats.observe("request_params_max_tokens", max_tokens)
            message = _message(request, ids, max_tokens, reading.sampling)
            for i in range(num_choices):
                self._submit(generation, message, echo, i, arrival_s)
        return generation

    def _submit(
        self, generation: Generation, message: Submit, echo: Echo, i: int, arrival_s: float
    ) -> None:
        """Submit the i-th answer to a prompt; each draws with a seed of its own."""
        request, seed = generation.request, generation.request.sampling.seed
        request_id, now_s = self.next_id(), time.monotonic()
        timer = self.runtime.recorder.arrive(
            request_id,
            arrival_s,
            now_s,
            message.num_prompt_tokens,
            request.deadlines.ttft_ms,
            request.priority,
            is_another=i > 0,
            client=request.client,
            is_background=request.is_background,
        )
        choice = OpenChoice(
            len(generation.choices),
            timer,
            self._output_text(generation),
            message.prompt,
            counts_prompt=i == 0,
            echo=echo,
            is_scoring=request.is_scoring,
        )
        changed = structs.replace(
            message,
            request_id=request_id,
            seed=None if seed is None else seed + i,
            arrived_s=arrival_s,
            submitted_s=now_s,
            is_another=i > 0,
        )
        self.client.submit(changed, generation.add(choice))

    def _output_text(self, generation: Generation) -> OutputText:
        params = generation.request.sampling
        return OutputText(
            self.tokenizer.detokenizer(
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
            ),
            stops=generation.stops,
            stop_token_ids=params.stop_token_ids,
            min_tokens=params.min_tokens,
            include_stop=params.include_stop,
        )

    @asynccontextmanager
    async def turn(self, num_bytes: int) -> AsyncIterator[None]:
        """A body's turn to be parsed and tokenised. Large ones take turns, as each may take as much
        memory as WORK_BYTES says; small ones pass beside them."""
        if num_bytes <= LARGE:
            yield
            return
        async with self._turn:
            yield

    async def parsed(
        self, body: bytes, parse: Callable[[bytes, Defaults], Completion]
    ) -> Completion:
        """What `parse` makes of `body`. Raises RequestError."""
        return await self._beside.result(len(body), parse, body, self.defaults)

    async def read_chat(self, body: bytes) -> Completion:
        """The chat in `body`, with its prompt as token ids. Raises RequestError."""
        asked, pieces = await self.read(body, read_chat, self.defaults, self.templates)
        window = self.runtime.limits().max_model_len
        self.admission.check_model(asked.model)
        check = any_number
        if asked.sampling.truncate_prompt_tokens is None:
            check = partial(check_length, window=window, field="messages")
        check(self.tokenizer.fewest(num_chars(pieces)))
        ids = await self.encode_rendered(pieces, len(body), check)
        return replace(asked, prompts=(array("i", ids),))

    async def read(self, body: bytes, function: Callable[..., T], *args: object) -> T:
        """`function(body, *args)`, which takes time but knows no tokenizer."""
        if len(body) > LARGE:
            return await self._beside.result(len(body), function, body, *args)
        return await self.texts.result(len(body), partial(function, body, *args))

    async def encode_rendered(self, pieces: Pieces, num_bytes: int, check: Check) -> list[int]:
        """Token ids of what a chat template has written of a body. Raises what `check` raises."""
        work = partial(self.tokenizer.encode_rendered, pieces, check)
        return await self.texts.result(num_bytes, work)

    def next_id(self) -> str:
        """A name for a sequence, new in this process."""
        return str(next(self._ids))

    def check_dimensions(self, asked: int | None) -> None:
        """Raise RequestError for a length that the model's vectors were not trained for."""
        if asked is not None and asked not in self._dimensions:
            known = ", ".join(map(str, sorted(self._dimensions))) or "none"
            raise RequestError(
                f"dimensions {asked}: config.json names no such trained length "
                f"(matryoshka_dimensions: {known})",
                param="dimensions",
            )

    def close(self) -> None:
        """End what runs beside this process."""
        self._beside.close()


class _Reading:
    """The text work on one request (`fit.Reading`); its results come as it is asked."""

    def __init__(self, service: Service, request: Completion) -> None:
        self._service, self._request = service, request
        self.sampling = Sampling()
        self.ids: list[Sequence[int]] = []
        self.echo: list[Echo] = []

    async def check_sampling(self) -> None:
        """Make the engine's part of the parameters."""
        size = sum(map(len, self._request.sampling.bad_words))
        self.sampling = await self._service.texts.result(size, self._sampling)

    def _sampling(self) -> Sampling:
        service, params = self._service, self._request.sampling
        check_vocabulary(params, service.prompts.vocab_size)
        sampling = for_engine(
            params,
            lambda text: service.tokenizer.encode(
                text, add_special_tokens=False, parse_special=True
            ),
        )
        check_something_left(params, sampling, service.eos_token_ids)
        return sampling

    def fewest(self, num_chars: int) -> int:
        """As the tokenizer's."""
        return self._service.tokenizer.fewest(num_chars)

    async def prompts(self, keep: int | None) -> Sequence[Sequence[int]]:
        """Tokenise them."""
        service, request = self._service, self._request
        size, window = sum(map(len, request.prompts)), service.runtime.limits().max_model_len
        read = partial(service.prompts.read, request, keep, window)
        self.ids, self.echo = await service.texts.result(size, read)
        return self.ids

    def echoes(self) -> Iterable[str]:
        """Texts that the replies repeat."""
        return (echo.text for echo in self.echo)


def trained_dimensions(config: Mapping[str, object]) -> frozenset[int]:
    """The lengths to which the model's vectors may be cut, by its config.json."""
    named = config.get("matryoshka_dimensions")
    return (
        frozenset(n for n in named if isinstance(n, int))
        if isinstance(named, list)
        else frozenset()
    )


def live_at_start(config: WorkerConfig) -> RuntimeLimits:
    """As the flags say; the cap is 1 until the engine has found its own."""
    engine, server = config.engine, config.server
    return RuntimeLimits(
        epoch=engine.epoch,
        cap=1,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        slo=server.slo,
        overload=server.overload,
        scheduling_policy=engine.scheduling_policy,
        hold_share=engine.hold_share,
    )


def _cache_config(config: EngineConfig) -> dict[str, str]:
    """The labels of a scrape, under vLLM's names."""
    return {
        "block_size": str(config.block_size),
        "num_gpu_blocks": str(None),
        "cache_dtype": config.dtype,
        "enable_prefix_caching": str(config.enable_prefix_caching),
        "gpu_memory_utilization": str(config.memory_utilization),
    }


def _message(
    request: Completion,
    prompt: Sequence[int],
    max_tokens: int,
    sampling: Sampling,
) -> Submit:
    """A prompt's message to the engine; id, seed and time are those of each answer."""
    params = request.sampling
    return Submit(
        request_id="",
        prompt=packed(prompt),
        max_tokens=max_tokens,
        temperature=params.temperature,
        seed=None,
        ignore_eos=params.ignore_eos,
        stop_token_ids=sorted(params.stop_token_ids),
        min_tokens=params.min_tokens,
        submitted_s=0.0,
        cache_salt=request.cache_salt,
        ttft_ms=request.deadlines.ttft_ms,
        priority=request.priority,
        client=request.client,
        is_background=request.is_background,
        sampling=sampling,
    )
