"""vLLM's scheduler without its engine, as it runs where steps overlap: two are under way at once.

Runs in vLLM's own environment; `python two_at_once.py CHECKPOINT` prints JSON. The model is made
up: each request that has its prompt gets a token. vLLM does so on GPUs only (`AsyncScheduler`).
"""

import json
import sys
from collections import deque
from typing import Any

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK, NUM_BLOCKS, CAP, TOKENS = 16, 1000, 16, 256
NUM_REQUESTS, PROMPT, OUTPUT = 24, 100, 20


def create_scheduler(checkpoint: str) -> Any:
    """The scheduler that `--scheduler-cls` makes, with overlapping steps."""
    config = EngineArgs(
        model=checkpoint,
        max_model_len=1024,
        max_num_seqs=CAP,
        max_num_batched_tokens=TOKENS,
        enable_prefix_caching=False,
        scheduler_cls="sluice_vllm.Scheduler",
    ).create_engine_config()
    config.scheduler_config.async_scheduling = True
    config.cache_config.num_gpu_blocks = NUM_BLOCKS
    spec = FullAttentionSpec(BLOCK, num_kv_heads=4, head_size=64, dtype=torch.bfloat16)
    return config.scheduler_config.get_scheduler_cls()(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(NUM_BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        log_stats=True,
    )


def run(scheduler: Any) -> dict[str, Any]:
    """All requests to their ends; what the control saw of them."""
    params = SamplingParams(max_tokens=OUTPUT, ignore_eos=True)
    params.update_from_generation_config({}, None)
    for number in range(NUM_REQUESTS):
        scheduler.add_request(Request(str(number), [7] * PROMPT, params, None))
    computed = dict.fromkeys(map(str, range(NUM_REQUESTS)), 0)
    under_way: deque[tuple[Any, ModelRunnerOutput]] = deque()
    steps, tokens, most_running = 0, 0, 0
    while scheduler.has_requests() or under_way:
        if scheduler.has_requests():
            output = scheduler.schedule()
            names = list(output.num_scheduled_tokens)
            for name in names:
                computed[name] += output.num_scheduled_tokens[name]
            sampled = [[9] if computed[name] >= PROMPT else [] for name in names]
            places = {name: place for place, name in enumerate(names)}
            under_way.append((output, ModelRunnerOutput(names, places, sampled)))
            steps, most_running = steps + bool(names), max(most_running, len(scheduler.running))
            if len(under_way) < 2 and names:
                continue
        for outputs in scheduler.update_from_output(*under_way.popleft()).values():
            tokens += sum(len(one.new_token_ids) for one in outputs.outputs)
    return {
        "overlaps": isinstance(scheduler, AsyncScheduler),
        "tokens": tokens,
        "most_running": most_running,
        "steps": steps,
        "learnt": scheduler._sluice.budget.num_steps,
    }


if __name__ == "__main__":
    print(json.dumps(run(create_scheduler(sys.argv[1]))))
