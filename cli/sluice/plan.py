"""`sluice plan MODEL`: the memory arithmetic of a checkpoint, before any pod exists."""

import argparse
import json
import os
import sys
from pathlib import Path

from sluice_core.errors import StartupError
from sluice_core.model import sizing
from sluice_core.model.files import Directory, checkpoint_dir
from sluice_core.model.gguf import SUFFIX, GgufShape
from sluice_core.model.parallel import Layout
from sluice_operator.children.resources import bytes_quantity
from sluice_operator.model import checkpoint
from sluice_operator.spec import kinds

from sluice.numbers import count


def memory(text: str) -> int:
    """Bytes of a quantity such as 24Gi, 1500M or 2000000000, as the CRD reads it."""
    try:
        return int(kinds.MEMORY.read(text))
    except ValueError as e:
        raise argparse.ArgumentTypeError(f"{text!r}: {e}") from e


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a folder with a checkpoint or its index, or a .gguf file")
    parser.add_argument("--memory", type=memory, required=True, help="of a GPU, or the pod: 24Gi")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="of the pod")
    parser.add_argument("--gpus", type=count, default=1, help="of a pod: they share each layer")
    parser.add_argument("--nodes", type=count, default=1, help="pods of a copy, a stage each")
    parser.add_argument(
        "--dtype", default="auto", choices=("auto", *sizing.DTYPE_BYTES),
        help="of weights and KV cache; auto: the checkpoint's",
    )  # fmt: skip
    parser.add_argument("--quantization", choices=("w8a8",), help="as the worker is told")
    parser.add_argument("--max-model-len", type=count, help="default: the checkpoint's own")
    parser.add_argument("--max-num-seqs", type=count, help="the user's maximum")
    parser.add_argument(
        "--max-num-batched-tokens", type=count, default=sizing.DEFAULT_BATCHED_TOKENS,
        help="token budget of one step",
    )  # fmt: skip
    parser.add_argument(
        "--gpu-memory-utilization", type=float, default=0.9, help="share of the memory to use"
    )
    parser.add_argument("--block-size", type=count, help="default: 16 on a GPU, 64 on a CPU")
    parser.add_argument("--json", action="store_true", help="print JSON")


def main(args: argparse.Namespace) -> int:
    """Entry of `sluice plan`: 0 if the model fits, 1 if not, 2 if it cannot be read."""
    try:
        found = _read(args)
        asked = _request(args, found)
        plan = found.plan(asked)
    except (StartupError, sizing.SizingError) as e:
        print(f"sluice plan: {e}", file=sys.stderr)
        return 2
    host = {"host_memory_bytes": found.host_bytes(args.gpus)} if args.device == "cuda" else {}
    if args.json:
        numbers = {"fits": plan.fits, "ceiling": plan.ceiling, "kv_tokens": plan.kv_tokens}
        numbers |= {"kv_bytes_per_token": plan.kv_bytes_per_token, "stage": plan.stage}
        numbers |= {"tensor": plan.layout.tensor, "pipeline": plan.layout.pipeline}
        print(json.dumps({**numbers, **plan.as_dict(), **host}))
    else:
        print(plan.explain())
        for num_bytes in host.values():
            print(f"host memory: {bytes_quantity(num_bytes)} requested (spec.hardware.hostMemory)")
        print(_ceiling(plan) if plan.fits else found.advice(plan, asked))
        if found.is_quantised:
            print("quantised: for VLLM, SGLang or TGI; Sluice's own engine does not read it")
    return 0 if plan.fits else 1


def _request(args: argparse.Namespace, found: checkpoint.ModelFacts) -> sizing.MemoryRequest:
    """What is asked of the checkpoint; raises SizingError."""
    if args.device == "cpu" and max(args.gpus, args.nodes) > 1:
        raise sizing.SizingError("--gpus and --nodes are for --device cuda.")
    layout = Layout(tensor=args.gpus, pipeline=args.nodes)
    if isinstance(found.shape, GgufShape):  # llama.cpp divides the layers
        layout = Layout(pipeline=args.gpus * args.nodes)
    return sizing.MemoryRequest(
        total_bytes=args.memory,
        utilization=args.gpu_memory_utilization,
        weights_bytes=found.weights_bytes - found.bytes_saved(args.quantization),
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_model_len=args.max_model_len or found.shape.default_len,
        block_size=args.block_size or sizing.DEFAULT_BLOCK_SIZE[args.device],
        dtype_bytes=sizing.DTYPE_BYTES[found.dtype],
        max_num_seqs=args.max_num_seqs,
        device=args.device,
        layout=layout,
    )


def _read(args: argparse.Namespace) -> checkpoint.ModelFacts:
    """The checkpoint's own figures; raises StartupError or SizingError."""
    if args.quantization and args.device != "cpu":
        raise sizing.SizingError(f"{args.quantization} is for CPUs: --device cpu is needed.")
    if args.model.endswith(SUFFIX) and os.path.isfile(args.model):
        return checkpoint.examine_gguf_file(Path(args.model))
    source = Directory(checkpoint_dir(args.model))
    return checkpoint.examine(source, args.dtype, on_cpu=args.device == "cpu")


def _ceiling(plan: sizing.MemoryPlan) -> str:
    """`explain` counts the longest sequences; more of the usual ones may fit."""
    if not plan.kv_bytes_per_token:
        return f"max_num_seqs: {plan.ceiling} texts or images a step"
    longest = min(plan.guaranteed_seqs, plan.ceiling)
    lengths = f" (of usual length; {longest} of the longest)" if longest < plan.ceiling else ""
    return f"max_num_seqs: {plan.ceiling}{lengths}"
