"""What is in force and what is open: the API process's one object with state.

It decides who is let in, sends requests to the engine, and is told what the engine says.
"""

import asyncio
import logging
import math
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

from msgspec import structs
from sluice_core.contract import Evidence, RuntimeConfig, RuntimePatch, Waiting
from sluice_core.errors import (
    DeadlineUnreachable,
    Draining,
    EngineDied,
    ModelNotFound,
    NotReady,
    QueueFull,
    RequestError,
    Shed,
    SluiceError,
    TooManyOpen,
)
from sluice_core.model.files import GENERATION_CONFIG, Directory, is_there, read_json
from sluice_core.model.stored import read_config
from sluice_core.ordering import Terms
from sluice_core.wire import (
    TOKEN_BYTES,
    Finished,
    Heartbeat,
    Ready,
    Sampling,
    StepReport,
    Submit,
    packed,
)
from sluice_frontend.evidence.health import Pulse, Verdict
from sluice_frontend.evidence.ledger import Ledger
from sluice_frontend.evidence.metrics import MINUTE_TICKS, Statistics, View, create_registry
from sluice_frontend.evidence.open_tick import Cause
from sluice_frontend.evidence.recorder import Recorder
from sluice_frontend.http.bodies import Answers, Bodies, too_many
from sluice_frontend.http.offload import bodies, off_loop, texts
from sluice_frontend.openai.chat import Chat, Conversation
from sluice_frontend.openai.deadlines import Deadlines
from sluice_frontend.openai.protocol import Completion
from sluice_frontend.openai.sampling_params import (
    LOGPROB_BYTES,
    MAX_OUTPUT_LOGPROBS,
    OPENAI,
    SamplingParams,
    check_logprobs,
    check_min_tokens,
    check_prompt_logprobs,
    check_something_left,
    check_vocabulary,
    defaults_of,
    for_engine,
    longest_scored,
)
from sluice_frontend.serving.admission import (
    check_length,
    check_repeated,
    is_full,
    num_waiting,
    prompt_limit,
    token_budget,
    unreachable,
)
from sluice_frontend.serving.forecast import Forecast
from sluice_frontend.serving.limits import Live

from ..base.config import WorkerConfig
from ..base.resources import Resources
from ..engine.client import EngineClient
from ..text.output import Transcript
from ..text.renderer import Renderer
from ..text.tokenizer import Tokenizer
from ..text.tokenizer_config import eos_token_ids
from .generation import Choice, Generation
from .prompts import Echo, Prompts

log = logging.getLogger(__name__)

BEAT_S = 0.1
"""How often ticks are closed and hopeless requests are looked for."""
MAX_RETRY_AFTER_S = 60
MAX_ON_THEIR_WAY = 64
"""HTTP requests beyond those that may run and wait: their bodies come, or their last bytes go."""
QUEUE_SHARE = 32
"""Of the memory, for prompts that wait: they are held packed, in both processes."""
CROWDED_LIFETIME = 0.1
"""While requests wait, connections live a tenth as long: a Service picks a pod for each connection,
so a pod that comes gets its share of the clients within seconds. A new one takes 0.1 ms."""


class Service:
    """One worker's API side. All methods belong to the event loop's thread."""

    def __init__(self, config: WorkerConfig) -> None:
        now_s, self.created_s = time.monotonic(), time.time()
        directory = Path(config.engine.model.removeprefix("file://"))
        self.config = config
        self.tokenizer = Tokenizer(directory)
        self._renderer = Renderer(directory, config.server.chat_template, self.tokenizer)
        config_json = read_config(Directory(directory))
        self.prompts = Prompts(
            self.tokenizer, config_json, parse_special=config.server.parse_special
        )
        self.bodies = Bodies(config.server)
        self.answers = Answers()
        self.parsing, self.texts = bodies(), texts()
        self.eos_token_ids = eos_token_ids(directory, config_json, self.tokenizer.config)
        self.defaults = OPENAI
        if config.server.generation_config == "auto" and is_there(directory, GENERATION_CONFIG):
            self.defaults = defaults_of(read_json(directory, GENERATION_CONFIG))
        self.boot_id = uuid.uuid4().hex
        self.live = live_at_start(config)
        self.pulse = Pulse(now_s, self.created_s)
        self.client = EngineClient(self.pulse, self)
        self.recorder = Recorder(self.boot_id, now_s, self.created_s)
        self.engine: Ready | None = None
        self._is_closed = False
        self._ids = count(1)
        self._resources = Resources()
        memory = self._resources.memory_bytes()
        self._max_queued_tokens = memory // (2 * TOKEN_BYTES * QUEUE_SHARE)
        self._max_logprobs = min(MAX_OUTPUT_LOGPROBS, memory // LOGPROB_BYTES)
        self.stats = Statistics(config.server.flag_slo, self.created_s)
        self.registry = create_registry(config.model_name, self.stats, self.view)
        self.ledger = Ledger(self.recorder, self.stats)

    # -- what the engine says (backend.Listener)

    def ready(self, ready: Ready) -> None:
        """The engine serves: its limits are known and in force."""
        self.engine = ready
        self.live = structs.replace(self.live, max_num_seqs=ready.max_num_seqs)
        self.stats.set_window(ready.max_model_len)
        self.recorder.engine.ready(ready)
        self.recorder.ticks.start(self.live.epoch, ready.max_num_seqs, self.live.slo)
        log.info(
            "ready",
            extra={
                "max_num_seqs": ready.max_num_seqs,
                "ceiling": ready.ceiling,
                "predicted": ready.predicted_max_num_seqs,
                "epoch": self.live.epoch,
                "kv_tokens": ready.kv_tokens,
                "max_model_len": ready.max_model_len,
                "kernels": ready.kernels,
                "memory": ready.memory.measured,
            },
        )

    def step(self, report: StepReport, now_s: float) -> None:
        """A step was made."""
        self.recorder.engine.step(report)
        self.recorder.admit(report.admitted, report.started_s)
        self.stats.step(report)
        self._shed(now_s)

    def state(self, message: Finished | Heartbeat) -> None:
        """A newer snapshot."""
        self.recorder.engine.see(message.snapshot)

    # -- requests

    async def open(
        self, request: Completion, arrival_s: float, id_prefix: str = "cmpl"
    ) -> Generation:
        """Let a request in and submit its sequences, or raise why not."""
        window = self._check_open().max_model_len
        self.check_model(request.model)
        self._check_priority(request.priority)
        size = sum(map(len, request.sampling.bad_words))
        sampling = await off_loop(size, lambda: self._sampling(request.sampling))
        keep = prompt_limit(request, window)
        for prompt in request.prompts:
            if keep is None and isinstance(prompt, str):
                check_length(self.tokenizer.fewest(len(prompt)), window, request.prompt_field)
        size = sum(map(len, request.prompts))
        prompts, echoes = await self.texts.result(size, lambda: self.prompts.read(request, keep))
        engine = self._check_open()
        pool = engine.num_blocks * engine.block_size
        budgets = [token_budget(len(ids), request, window=window, pool=pool) for ids in prompts]
        num_choices = request.sampling.n
        check_repeated(request, prompts, (echo.text for echo in echoes))
        check_prompt_logprobs(request.sampling, num_choices * sum(map(len, prompts)))
        if request.has_default_length:  # it is ours to choose
            longest = longest_scored(
                request.sampling, num_choices * len(prompts), self._max_logprobs
            )
            budgets = [min(n, longest) for n in budgets]
        check_logprobs(request.sampling, num_choices * sum(budgets), self._max_logprobs)
        check_min_tokens(request.sampling.min_tokens, min(budgets))
        self._check_queue(len(prompts) * num_choices, num_choices * sum(map(len, prompts)))
        self._check_deadlines(request, prompts, arrival_s)
        reply_id = f"{id_prefix}-{request.request_id or uuid.uuid4().hex}"
        # It may wait for long: as they were parsed, token ids take ten times what a choice keeps.
        kept = replace(request, prompts=())
        generation = Generation(reply_id, kept, self.ledger, self.client.abort)
        self.stats.observe("request_params_n", num_choices)
        for ids, echo, max_tokens in zip(prompts, echoes, budgets, strict=True):
            self.stats.observe("request_params_max_tokens", max_tokens)
            message = _message(request, ids, max_tokens, sampling)
            for i in range(num_choices):
                self._submit(generation, message, echo, i, arrival_s)
        return generation

    def _sampling(self, params: SamplingParams) -> Sampling:
        """The engine's part of `params`, checked against the model's tokens."""
        check_vocabulary(params, self.prompts.vocab_size)
        sampling = for_engine(
            params,
            lambda text: self.tokenizer.encode(text, add_special_tokens=False, parse_special=True),
        )
        check_something_left(params, sampling, self.eos_token_ids)
        return sampling

    def _submit(
        self, generation: Generation, message: Submit, echo: Echo, i: int, arrival_s: float
    ) -> None:
        """Submit the i-th answer to a prompt; each draws with a seed of its own."""
        request, params = generation.request, generation.request.sampling
        request_id, now_s = str(next(self._ids)), time.monotonic()
        flight = self.recorder.arrive(
            request_id,
            arrival_s,
            now_s,
            message.num_prompt_tokens,
            request.deadlines.ttft_ms,
            request.priority,
            is_another=i > 0,
        )
        transcript = Transcript(
            self.tokenizer.detokenizer(
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
            ),
            stops=generation.stops,
            stop_token_ids=params.stop_token_ids,
            min_tokens=params.min_tokens,
            include_stop=params.include_stop,
        )
        index = len(generation.choices)
        choice = Choice(
            index,
            flight,
            transcript,
            message.prompt,
            counts_prompt=i == 0,
            echo=echo,
            is_scoring=request.is_scoring,
        )
        seed = None if params.seed is None else params.seed + i
        changed = structs.replace(
            message,
            request_id=request_id,
            seed=seed,
            arrived_s=arrival_s,
            submitted_s=now_s,
            is_another=i > 0,
        )
        self.client.submit(changed, generation.add(choice))

    def _check_open(self) -> Ready:
        """The engine's limits, or why no request is taken now."""
        problem: SluiceError | None = None
        if self._is_closed:
            problem = Draining("this worker has shut down", retry_after_s=1)
        elif self.client.closed.is_set():
            problem = EngineDied(self.pulse.death or "the engine process ended", retry_after_s=1)
        elif self.engine is None:
            text = f"the model is being loaded: {self.pulse.phase} ({self.pulse.percent} %)"
            problem = NotReady(text, retry_after_s=5)
        if problem is not None:
            self.recorder.refuse("cold")
            self.stats.reject(problem.code)
            raise problem
        assert self.engine is not None  # the third problem above
        return self.engine

    async def open_chat(self, chat: Chat, num_bytes: int, arrival_s: float) -> Generation:
        """As `open`, for a conversation of `num_bytes`."""
        window = self._check_open().max_model_len
        self.check_model(chat.completion.model)
        is_cut = chat.completion.sampling.truncate_prompt_tokens is not None

        def check(num_chars: int) -> None:
            if not is_cut:
                check_length(self.tokenizer.fewest(num_chars), window, "messages")

        ids = await self.render(chat.conversation, num_bytes, check)
        prompt = tuple(ids)
        return await self.open(replace(chat.completion, prompts=(prompt,)), arrival_s, "chatcmpl")

    async def render(
        self, conversation: Conversation, num_bytes: int, check: Callable[[int], None]
    ) -> list[int]:
        """The token ids of a conversation, as its template writes it. Raises RequestError; `check`
        may as well, of the number of its characters."""
        return await self.texts.result(
            num_bytes, lambda: self._renderer.token_ids(conversation, check)
        )

    def check_model(self, asked: str | None) -> None:
        """Raise ModelNotFound if `asked` is given and not what is served."""
        name = self.config.model_name
        if asked and asked != name:
            raise ModelNotFound(
                f"the model {asked!r} does not exist; this worker serves {name!r}", param="model"
            )

    def _check_priority(self, priority: int) -> None:
        """Raise for one that would be ignored, as vLLM does."""
        if priority and self.live.policy == "fcfs":
            raise RequestError(
                f"priority {priority} would have no effect: the scheduling policy is fcfs",
                param="priority",
            )

    def limits(self) -> Ready:
        """What the engine said of itself; raises NotReady before it serves."""
        if self.engine is None:
            raise NotReady("the model is being loaded", retry_after_s=1)
        return self.engine

    def _check_queue(self, num_new: int, num_new_tokens: int) -> None:
        flags, num_open, state = (
            self.config.server,
            self.client.num_open,
            self.recorder.engine.snapshot,
        )
        num_tokens, cap = self.recorder.num_pending_tokens, self.live.max_num_seqs
        ceiling, most_tokens = self.limits().ceiling, self._max_queued_tokens
        most = flags.max_num_queued_reqs
        if num_new > ceiling + most:
            raise RequestError(
                f"{num_new} sequences are more than may ever run ({ceiling}) and wait "
                f"({most}) together; send fewer prompts or a smaller n",
                param="n",
            )
        if num_new_tokens > most_tokens:
            raise RequestError(
                f"{num_new_tokens} prompt tokens, all choices together, are more than may ever "
                f"wait in this worker's memory ({most_tokens}); send fewer prompts or a smaller n",
                param="n",
            )
        if num_open and is_full(num_new, num_open, cap, state, most):
            sentence = f"{num_waiting(num_open, cap, state)} requests wait already"
            sentence += f", and max_num_queued_reqs is {most}"
            raise self._full(QueueFull, sentence, "max_num_queued_reqs", num_new)
        if 0 < flags.max_num_queued_tokens <= num_tokens:
            bound = f"max_num_queued_tokens is {flags.max_num_queued_tokens}"
        elif num_tokens + num_new_tokens > most_tokens:
            bound = f"this worker's memory is for {most_tokens}, these {num_new_tokens} included"
        else:
            return
        sentence = f"{num_tokens} prompt tokens wait or are computed already, and {bound}"
        cause: Cause | None = None if state.waiting else "prefill"  # of all that are computed
        raise self._full(QueueFull, sentence, "max_num_queued_tokens", num_new, cause)

    def check_room(self, num_open: int) -> None:
        """Refuse an HTTP request before its body is read, if `num_open` others are more than may
        ever run and wait. How many sequences it asks for is not known: it counts as one."""
        most = self.config.server.max_num_queued_reqs
        num_more = num_open - most - MAX_ON_THEIR_WAY
        if num_more >= 0 and num_more >= self._check_open().ceiling:
            sentence = f"{num_open} requests are open already, and max_num_queued_reqs is {most}"
            raise self._full(TooManyOpen, sentence, "max_num_queued_reqs", 1)

    def refuse_body(self, sentence: str) -> TooManyOpen:
        """Why a request to generate is refused while its body comes, which is booked as one."""
        self.recorder.refuse("cold")  # it waits for no engine
        self.stats.reject("large_bodies")
        return too_many(sentence)

    def _full(
        self,
        kind: type[QueueFull],
        sentence: str,
        limit: str,
        num_new: int,
        cause: Cause | None = None,
    ) -> QueueFull:
        """Why `num_new` sequences are refused, which is booked."""
        for _ in range(num_new):
            self.recorder.refuse(cause)
        self.stats.reject(limit)
        return kind(sentence, retry_after_s=_retry_after_s(self._forecast().wait_s(num_new)))

    def _check_deadlines(
        self, request: Completion, prompts: Sequence[Sequence[int]], arrival_s: float
    ) -> None:
        """Refuse now what would miss its deadline later, and say when to come again."""
        num_new, now_s = len(prompts) * request.sampling.n, time.monotonic()
        age_ms, asked = 1e3 * (now_s - arrival_s), request.deadlines
        if asked == Deadlines() and self.live.shed_ms is None:
            return
        nums = [len(ids) for ids in prompts]
        forecast = self._forecast_for(request.priority, asked.ttft_ms, nums, arrival_s, now_s)
        prefill_ms = max(self.recorder.engine.prefill_ms(len(ids), now_s) for ids in prompts)
        problem = unreachable(
            asked, self.live.shed_ms, forecast, num_new, age_ms=age_ms, prefill_ms=prefill_ms
        )
        if problem is not None:
            sentence, retry_s = problem
            wait_ms = 1e3 * forecast.place_s(num_new)
            rest_ms = 1e3 * forecast.wait_s(num_new) - wait_ms + age_ms + prefill_ms
            for _ in range(num_new):
                self.recorder.refuse_for_deadline(wait_ms, rest_ms)
            self.stats.reject("deadline")
            raise DeadlineUnreachable(sentence, retry_after_s=_retry_after_s(retry_s))

    def _forecast(self) -> Forecast:
        state, recorder = self.recorder.engine.snapshot, self.recorder
        return Forecast(
            num_open=self.client.num_open,
            num_running=state.running,
            num_waiting=state.waiting,
            cap=self.live.max_num_seqs,
            service_s=recorder.recent.service_s(),
            step_model=recorder.engine.step_model,
            kv_per_seq=recorder.recent.lengths().mean,
        )

    def _forecast_for(
        self,
        priority: int,
        ttft_ms: float | None,
        prompts: Iterable[int],
        arrival_s: float,
        now_s: float,
    ) -> Forecast:
        """The forecast for the longest of `prompts` (tokens), which come together."""
        forecast, recorder, limits = self._forecast(), self.recorder, self.live.for_engine()
        if limits.policy == "fcfs" or self.live.overload == "Shed":
            return forecast  # nobody late stays: all that are open go before

        def terms(priority: int, ttft_ms: float | None, arrived_s: float, tokens: int) -> Terms:
            due_s = limits.due_s(arrived_s, ttft_ms)
            return Terms(priority, due_s, arrived_s, recorder.engine.uncached(tokens))

        pending = [
            terms(f.priority, f.ttft_ms, f.arrival_s, 0 if f.is_another else f.num_prompt_tokens)
            for f in recorder.pending
        ]
        *others, longest = (terms(priority, ttft_ms, arrival_s, num) for num in sorted(prompts))
        return forecast.behind(longest, [*pending, *others], now_s, recorder.engine.price_s)

    # -- live configuration

    def runtime_config(self) -> RuntimeConfig:
        """What is in force; raises NotReady before the engine serves."""
        state = self.recorder.engine.snapshot
        return RuntimeConfig(
            **structs.asdict(self.live) | {"scheduling_policy": self.live.policy},
            ceiling=self.limits().ceiling,
            running=state.running,
            waiting=Waiting(cap=state.waiting_cap, kv=state.waiting_kv),
            boot_id=self.boot_id,
            hung=self.pulse.hung(time.monotonic(), self.config.server.liveness_timeout),
        )

    def patch(self, change: RuntimePatch) -> RuntimeConfig:
        """Put `change` in force. The same again changes nothing; see `contract.RuntimePatch`."""
        new = self.live.changed(
            change,
            ceiling=self.limits().ceiling,
            largest_budget=self.config.engine.max_num_batched_tokens,
        )
        if new != self.live:
            self.client.configure(new.for_engine())
            self.live = new
            self.recorder.ticks.configure(new.epoch, new.max_num_seqs, new.slo)
            log.info("configured", extra={"epoch": new.epoch, "max_num_seqs": new.max_num_seqs})
        return self.runtime_config()

    def evidence(self, after: int) -> Evidence:
        """Closed ticks after `after`; raises NotReady before the engine serves."""
        self.limits()
        return self.recorder.evidence(after)

    # -- health, metrics, time

    def liveness(self) -> Verdict:
        """Whether the engine makes progress."""
        return self.pulse.liveness(time.monotonic(), self.config.server.liveness_timeout)

    def health(self) -> Verdict:
        """Whether the engine is up."""
        return self.pulse.health(time.monotonic(), self.config.server.liveness_timeout)

    def readiness(self) -> Verdict:
        """Whether new requests are taken."""
        return self.pulse.readiness(time.monotonic(), self.config.server.liveness_timeout)

    def load(self) -> dict[str, float]:
        """What a gateway balances by, under the names that it reads."""
        state = self.recorder.engine.snapshot
        return {"kv_cache_usage_perc": state.kv_usage, "num_requests_waiting": state.waiting}

    def lifetime(self) -> float:
        """The part of its age limit that a connection may reach: another pod may have room."""
        if self.pulse.is_draining:
            return 0.0
        return CROWDED_LIFETIME if self.recorder.engine.snapshot.waiting else 1.0

    def drain(self) -> None:
        """Be not ready from now on; each answer closes its connection."""
        self.pulse.is_draining = True

    def close(self) -> None:
        """Take no request from now on, and end those that are open."""
        self._is_closed = True
        sentence = "the worker shut down before this was finished"
        self.client.fail_all(Draining(sentence, retry_after_s=1))

    def view(self) -> View:
        """What a scrape shows."""
        engine, config = self.engine, self.config.engine
        return View(
            is_ready=self.readiness().ok,
            snapshot=self.recorder.engine.snapshot,
            open_requests=self.client.num_open,
            epoch=self.live.epoch,
            max_num_seqs=self.live.max_num_seqs,
            ceiling=engine.ceiling if engine else 0,
            cache_config={
                "block_size": str(engine.block_size if engine else config.block_size),
                "num_gpu_blocks": str(engine.num_blocks if engine else None),
                "cache_dtype": config.dtype,
                "enable_prefix_caching": str(config.enable_prefix_caching),
                "gpu_memory_utilization": str(config.memory_utilization),
            },
            memory=self.recorder.engine.memory,
            step_model=self.recorder.engine.step_model,
            last_minute=self.recorder.ticks.newest(MINUTE_TICKS),
        )

    async def beat(self) -> None:
        """Close ticks as time passes, and shed what is hopeless; runs until cancelled."""
        while True:
            now_s = time.monotonic()
            if self.recorder.ticks.is_due(now_s):
                self.recorder.advance(now_s, time.time(), self._resources.throttled_s())
            self._shed(now_s)
            await asyncio.sleep(BEAT_S)

    def _shed(self, now_s: float) -> None:
        # The engine knows which have begun; one that hangs will not say.
        is_moving = self.pulse.progress(now_s, self.config.server.liveness_timeout).ok
        end = self.client.drop if is_moving else self.client.fail
        hopeless = self.recorder.hopeless(now_s, self.live.shed_ms)
        if not hopeless:
            return
        first = hopeless[0]
        again = first.priority, first.ttft_ms, [first.num_prompt_tokens], now_s, now_s
        retry_after_s = _retry_after_s(self._forecast_for(*again).wait_s(1))
        for flight in hopeless:
            kind = Shed if flight.ttft_ms is None else DeadlineUnreachable
            error = kind(
                "the first token can no longer come within the target of "
                f"{flight.ttft_ms or self.live.slo.ttft_ms:g} ms, so the request was dropped",
                retry_after_s=retry_after_s,
            )
            end(flight.request_id, error)


def live_at_start(config: WorkerConfig) -> Live:
    """As the flags say; the cap is 1 until the engine has found its own."""
    engine, server = config.engine, config.server
    return Live(
        epoch=engine.epoch,
        max_num_seqs=1,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        slo=server.slo,
        overload=server.overload,
        scheduling_policy=engine.scheduling_policy,
    )


def _retry_after_s(wait_s: float) -> int:
    """The predicted wait as a Retry-After."""
    return min(max(1, math.ceil(wait_s)), MAX_RETRY_AFTER_S)


def _message(
    request: Completion,
    prompt: Sequence[int],
    max_tokens: int,
    sampling: Sampling,
) -> Submit:
    """What the engine is told of a prompt; id, seed and time are those of each answer."""
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
        sampling=sampling,
    )
