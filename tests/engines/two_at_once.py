"""vLLM's scheduler without its engine, as it runs where steps overlap: two are under way at once.

Runs in vLLM's own environment; `python two_at_once.py CHECKPOINT NUM_BLOCKS` prints JSON. The model
is made up: a step takes a time of its own, and each request that has its prompt gets a token. vLLM
does so on GPUs only (`AsyncScheduler`). Bursts come that cannot be in time in short steps, so first
tokens are held; prompts share prefixes, and some requests are aborted while they are held.
"""

import json
import random
import sys
import time
from collections import Counter, deque
from typing import Any

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

BLOCK, CAP, TOKENS = 16, 16, 1024
NUM_BURSTS, BURST, EVERY_S, OUTPUT = 5, 16, 1.5, 20
STEP_MS, DECODE_MS, PROMPT_MS = 12.0, 0.3, 0.2
NUM_ABORTED = 3


def create_scheduler(checkpoint: str, num_blocks: int) -> Any:
    """The scheduler that `--scheduler-cls` makes, with overlapping steps."""
    config = EngineArgs(
        model=checkpoint,
        max_model_len=1024,
        max_num_seqs=CAP,
        max_num_batched_tokens=TOKENS,
        enable_prefix_caching=True,
        scheduler_cls="sluice_vllm.Scheduler",
    ).create_engine_config()
    config.scheduler_config.async_scheduling = True
    config.cache_config.num_gpu_blocks = num_blocks
    spec = FullAttentionSpec(BLOCK, num_kv_heads=4, head_size=64, dtype=torch.bfloat16)
    return config.scheduler_config.get_scheduler_cls()(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        log_stats=True,
    )


def bursts() -> deque[tuple[float, list[int]]]:
    """When each prompt comes, and its tokens. Each fourth begins as the others do."""
    rng = random.Random(1)
    prompts = deque[tuple[float, list[int]]]()
    for burst in range(NUM_BURSTS):
        for place in range(BURST):
            tokens = [rng.randrange(1, 1000) for _ in range(rng.randint(1, 200))]
            prompts.append((burst * EVERY_S, [7] * 64 + tokens if place % 4 == 0 else tokens))
    return prompts


class Run:
    """All requests to their ends, two steps at once; what was seen of them."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler, self._steering = scheduler, scheduler._sluice.steering
        self._under_way: deque[tuple[Any, ModelRunnerOutput, float]] = deque()
        self._free_s = 0.0  # when the device ends its last step
        self._made: Counter[str] = Counter()
        self._aborted: list[str] = []
        self.seen: Counter[str] = Counter()

    def to_the_end(self) -> dict[str, Any]:
        """Every prompt of `bursts`."""
        params = SamplingParams(max_tokens=OUTPUT, ignore_eos=True)
        params.update_from_generation_config({}, None)
        init_none_hash(sha256)
        hasher = get_request_block_hasher(BLOCK, sha256)
        coming, begun_s = bursts(), time.monotonic()
        while coming or self._scheduler.has_requests() or self._under_way:
            while coming and time.monotonic() - begun_s >= coming[0][0]:
                name = str(NUM_BURSTS * BURST - len(coming))
                prompt = coming.popleft()[1]
                request = Request(name, prompt, params, None, block_hasher=hasher)
                self._scheduler.add_request(request)
            if self._scheduler.has_requests() and self._schedule():
                continue
            if self._under_way:
                self._end(*self._under_way.popleft())
            elif coming and not self._scheduler.has_requests():
                time.sleep(max(begun_s + coming[0][0] - time.monotonic(), 0.0))
        return self._told()

    def _schedule(self) -> bool:
        """Begin a step; True if another may begin before it ends."""
        output, requests = self._scheduler.schedule(), self._scheduler.requests
        names = list(output.num_scheduled_tokens)
        sampled = [[] if requests[name].is_prefill_chunk else [9] for name in names]
        ms = STEP_MS + DECODE_MS * len(names) + PROMPT_MS * output.total_num_scheduled_tokens
        self._free_s = max(self._free_s, time.monotonic()) + bool(names) * ms / 1e3
        places = {name: place for place, name in enumerate(names)}
        self._under_way.append((output, ModelRunnerOutput(names, places, sampled), self._free_s))
        held = self._steering.division.held
        self.seen["steps" if names else "empty"] += 1
        self.seen["held"] += bool(held)
        self.seen["long"] += self._steering.division.is_long
        self.seen["preempted"] += len(output.preempted_req_ids or ())
        self.seen["most_running"] = max(self.seen["most_running"], len(self._scheduler.running))
        self._abort([name for name in names if name in held])
        return bool(names) and len(self._under_way) < 2

    def _abort(self, held: list[str]) -> None:
        """One held request for each step that holds some, until there were enough."""
        if held and len(self._aborted) < NUM_ABORTED:
            self._aborted.append(held[0])
            self._scheduler.finish_requests(held[:1], RequestStatus.FINISHED_ABORTED)

    def _end(self, output: Any, made: ModelRunnerOutput, at_s: float) -> None:
        time.sleep(max(at_s - time.monotonic(), 0.0))
        for outputs in self._scheduler.update_from_output(output, made).values():
            for one in outputs.outputs:
                self._made[one.request_id] += len(one.new_token_ids)

    def _told(self) -> dict[str, Any]:
        pool = self._scheduler.kv_cache_manager.block_pool
        answered = [name for name, num in self._made.items() if num == OUTPUT]
        return {
            "overlaps": isinstance(self._scheduler, AsyncScheduler),
            "answered": len(set(answered).difference(self._aborted)),
            "aborted": len(self._aborted),
            "used_blocks": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),  # one is no block
            "learnt": self._steering.num_steps,
            **self.seen,
        }


if __name__ == "__main__":
    print(json.dumps(Run(create_scheduler(sys.argv[1], int(sys.argv[2]))).to_the_end()))
