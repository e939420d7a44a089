"""Runs in a peer's own environment, for those that are libraries: one JSON line in, one out.

    python batch_worker.py KIND MODEL CAP

KIND: transformers-continuous, transformers-static, vllm-offline or sluice-offline. It loads the
model, writes `{"ready": true}` and waits for `{"requests": [[prompt, output_tokens], ...], "cap":
n}`; while it waits it takes no CPU. A peer's environment has nothing of this repository, so it
imports nothing.
"""

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Requests = list[tuple[list[int], int]]
Batch = Callable[[Requests, int], tuple[float, list[int]]]

WINDOW = 2048
BLOCK_TOKENS = 256
KV_TOKENS = 65536
SLUICE_BLOCK = 64


def _llama(model: str) -> tuple[Any, Any]:
    torch = importlib.import_module("torch")
    transformers = importlib.import_module("transformers")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    return torch, loaded.eval()


def static(model: str, cap: int) -> Batch:
    """`generate` on `cap` prompts in their order, padded on the left, to the longest output."""
    torch, llama = _llama(model)

    def group(requests: Requests) -> list[int]:
        width = max(len(prompt) for prompt, _ in requests)
        rows = [[0] * (width - len(prompt)) + prompt for prompt, _ in requests]
        mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt, _ in requests]
        longest = max(count for _, count in requests)
        with torch.inference_mode():
            tokens = llama.generate(
                input_ids=torch.tensor(rows),
                attention_mask=torch.tensor(mask),
                do_sample=False,
                min_new_tokens=longest,
                max_new_tokens=longest,
                pad_token_id=0,
            )
        made = tokens.shape[1] - width
        return [min(count, made) for _, count in requests]

    def run(requests: Requests, cap: int) -> tuple[float, list[int]]:
        started = time.monotonic()
        groups = [requests[at : at + cap] for at in range(0, len(requests), cap)]
        made = [count for members in groups for count in group(members)]
        return time.monotonic() - started, made

    return run


def continuous(model: str, cap: int) -> Batch:
    """transformers' own continuous batching (paged, sdpa); making its manager is not timed."""
    _, llama = _llama(model)
    transformers = importlib.import_module("transformers")
    configuration = importlib.import_module("transformers.generation.configuration_utils")
    generation = transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)

    def run(requests: Requests, cap: int) -> tuple[float, list[int]]:
        settings = configuration.ContinuousBatchingConfig(
            page_size=BLOCK_TOKENS,
            num_blocks=KV_TOKENS // BLOCK_TOKENS,
            max_batch_tokens=2048,
            max_requests_per_batch=cap,
        )
        made: dict[str, int] = {}
        with llama.continuous_batching_context_manager(
            generation_config=generation, continuous_batching_config=settings, timeout=5
        ) as manager:
            started = time.monotonic()
            names = [
                manager.add_request(prompt, max_new_tokens=count) for prompt, count in requests
            ]
            while len(made) < len(requests):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    made[result.request_id] = 0 if result.error else len(result.generated_tokens)
                elif result is None and not manager.is_running():
                    raise RuntimeError("the generation thread ended")
            seconds = time.monotonic() - started
        return seconds, [made[name] for name in names]

    return run


def vllm_offline(model: str, cap: int) -> Batch:
    """vLLM's LLM class, its engine in this process."""
    vllm = importlib.import_module("vllm")
    engine = vllm.LLM(model=model, dtype="bfloat16", max_num_seqs=cap, max_model_len=WINDOW)

    def run(requests: Requests, cap: int) -> tuple[float, list[int]]:
        prompts = [{"prompt_token_ids": prompt} for prompt, _ in requests]
        sampling = [
            vllm.SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
            for _, count in requests
        ]
        started = time.monotonic()
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        seconds = time.monotonic() - started
        return seconds, [len(output.outputs[0].token_ids) for output in outputs]

    return run


def sluice_offline(model: str, cap: int) -> Batch:
    """Sluice's engine in this process, as its engine process has it."""
    process = importlib.import_module("sluice_worker.engine.process")
    resources = importlib.import_module("sluice_worker.base.resources").Resources()
    process.set_threads(resources.num_threads())
    wire = importlib.import_module("sluice_core.wire")
    config = importlib.import_module("sluice_worker.base.config").EngineConfig(
        model=model,
        device="cpu",
        dtype="bfloat16",
        max_num_seqs=cap,
        initial_num_seqs=cap,
        max_model_len=WINDOW,
        block_size=SLUICE_BLOCK,
        num_gpu_blocks_override=KV_TOKENS // SLUICE_BLOCK,
    )
    start = importlib.import_module("sluice_worker.engine.startup").start
    engine, _ = start(config, lambda phase, percent: None)

    def run(requests: Requests, cap: int) -> tuple[float, list[int]]:
        while engine.use_idle_time() < float("inf"):  # as the engine process does while it waits
            pass
        started = time.monotonic()
        for number, (prompt, count) in enumerate(requests):
            packed = wire.packed(prompt)
            submit = wire.Submit(str(number), packed, count, 0.0, 0, True, [], 0, started)
            if refused := engine.submit(submit, started):
                raise RuntimeError(refused.error)
        made = [0] * len(requests)
        while engine.has_work:
            report, failures = engine.step()
            if failures:
                raise RuntimeError(failures[0].error)
            for out in report.tokens if report else ():
                made[int(out.request_id)] += 1
        return time.monotonic() - started, made

    return run


KINDS = {
    "sluice-offline": sluice_offline,
    "transformers-static": static,
    "transformers-continuous": continuous,
    "vllm-offline": vllm_offline,
}


def main() -> None:
    """Serve until the input ends."""
    kind, model, cap = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print what they like

    def answer(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    run = KINDS[kind](model, int(cap))
    answer({"ready": True})
    for line in sys.stdin:
        asked = json.loads(line)
        requests = [(list(prompt), count) for prompt, count in asked["requests"]]
        try:
            seconds, tokens = run(requests, asked["cap"])
        except Exception as error:  # whatever it is, the bench names it and goes on
            answer({"error": f"{type(error).__name__}: {error}"})
        else:
            answer({"wall_s": seconds, "tokens": tokens})


if __name__ == "__main__":
    main()
