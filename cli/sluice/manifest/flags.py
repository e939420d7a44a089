"""Arguments of an engine as flags, and the rules of each engine's flags and variables. Pure."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from .draft import Object

_IS_FLAG = re.compile(r"--?[A-Za-z]")
_IS_SWITCH = re.compile(r"--(enable|disable|no|trust|enforce|headless|skip|use|language-model)\b")
"""Flags that take no value: a word behind one is the model of `vllm serve`."""


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag with `-` for `_`. `words`: as it was given. `source`: where the value comes from, if
    not from the file. `origin`: the variable that it stands for."""

    name: str
    values: tuple[str, ...]
    words: tuple[str, ...] = ()
    source: Object | None = None
    origin: str = ""

    @property
    def value(self) -> str:
        """Return the first value, "" for none."""
        return self.values[0] if self.values else ""

    def written(self, apart: bool) -> tuple[str, ...]:
        """Return it as `engine.args` has it. `apart`: the engine takes no `--FLAG=VALUE`."""
        if not apart and len(self.words) == 2 and self.words[0].startswith("--"):
            return ("=".join(self.words),)
        return self.words or (self.name, *self.values)


def parse(words: Sequence[str]) -> tuple[list[Flag], list[str]]:
    """Return the flags, and the words that belong to none."""
    flags: list[list[str]] = []
    free: list[str] = []
    for word in words:
        if _IS_FLAG.match(word):
            flags.append([word])
        elif flags and "=" not in flags[-1][0].partition("{")[0] and not _is_switch(flags[-1]):
            flags[-1].append(word)
        else:
            free.append(word)
    return [_flag(one) for one in flags], free


def _is_switch(words: Sequence[str]) -> bool:
    return _IS_SWITCH.match(words[0].replace("_", "-")) is not None


def _flag(words: Sequence[str]) -> Flag:
    name, joined, value = words[0].partition("=")
    values = (value,) if joined else tuple(words[1:])
    return Flag(name.replace("_", "-"), values, tuple(words))


def _table(**rules: str) -> Mapping[str, str]:
    return {flag: rule for rule, flags in rules.items() for flag in flags.split()}


RULES: Final[Mapping[str, Mapping[str, str]]] = {
    "VLLM": _table(
        model="--model", name="--served-model-name", revision="--revision",
        length="--max-model-len", dtype="--dtype", seqs="--max-num-seqs",
        budget="--max-num-batched-tokens", share="--gpu-memory-utilization",
        tensor="--tensor-parallel-size -tp", pipeline="--pipeline-parallel-size -pp",
        caching="--enable-prefix-caching", uncached="--no-enable-prefix-caching",
        key="--api-key", owned="--host --port --uds",
        wiring="--nnodes -n --node-rank -r --master-addr --master-port --headless",
        executor="--distributed-executor-backend",
    ),
    "SGLang": _table(
        model="--model-path --model", name="--served-model-name", revision="--revision",
        length="--context-length", dtype="--dtype", seqs="--max-running-requests",
        budget="--chunked-prefill-size", share="--mem-fraction-static",
        tensor="--tp-size --tensor-parallel-size --tp", pipeline="--pp-size "
        "--pipeline-parallel-size --pp",
        uncached="--disable-radix-cache", key="--api-key",
        owned="--host --port --enable-metrics --admin-api-key",
        wiring="--nnodes --node-rank --dist-init-addr --nccl-init-addr",
    ),
    "TGI": _table(
        model="--model-id", revision="--revision", length="--max-total-tokens", dtype="--dtype",
        seqs="--max-concurrent-requests", budget="--max-batch-prefill-tokens",
        share="--cuda-memory-fraction", tensor="--num-shard", key="--api-key",
        owned="--hostname --port -p",
    ),
    "LlamaCpp": _table(
        model="--model -m --hf-repo -hf -hfr", name="--alias -a", context="--ctx-size -c",
        seqs="--parallel -np", budget="--batch-size -b", uncached="--no-cache-prompt",
        key="--api-key", owned="--host --port --metrics",
    ),
    "Ollama": _table(seqs="--parallel", length="--context", owned="--host --keep-alive"),
}  # fmt: skip
"""By engine, the rule of each flag that has a field or an owner; all others stay `engine.args`."""
_TGI = "MODEL_ID REVISION NUM_SHARD MAX_TOTAL_TOKENS MAX_CONCURRENT_REQUESTS DTYPE API_KEY \
MAX_BATCH_PREFILL_TOKENS CUDA_MEMORY_FRACTION HOSTNAME PORT"
VARIABLES: Final[Mapping[str, Mapping[str, str]]] = {
    "VLLM": {"VLLM_API_KEY": "--api-key"},
    "TGI": {name: f"--{name.lower().replace('_', '-')}" for name in _TGI.split()},
    "LlamaCpp": {
        "LLAMA_ARG_MODEL": "--model", "LLAMA_ARG_HF_REPO": "--hf-repo",
        "LLAMA_API_KEY": "--api-key",
        "LLAMA_ARG_ALIAS": "--alias", "LLAMA_ARG_CTX_SIZE": "--ctx-size",
        "LLAMA_ARG_N_PARALLEL": "--parallel", "LLAMA_ARG_BATCH": "--batch-size",
        "LLAMA_ARG_HOST": "--host", "LLAMA_ARG_PORT": "--port",
        "LLAMA_ARG_ENDPOINT_METRICS": "--metrics",
    },
    "Ollama": {
        "OLLAMA_NUM_PARALLEL": "--parallel", "OLLAMA_CONTEXT_LENGTH": "--context",
        "OLLAMA_HOST": "--host", "OLLAMA_KEEP_ALIVE": "--keep-alive",
    },
}  # fmt: skip
"""By engine, variables that do what a flag does."""


def from_variables(engine: str, variables: Iterable[Object]) -> tuple[list[Flag], list[Object]]:
    """Return the flags that variables stand for, and the other variables."""
    known, flags, rest = VARIABLES.get(engine, {}), [], []
    for one in variables:
        if name := known.get(one["name"]):
            value, source = one.get("value", ""), one.get("valueFrom")
            flags.append(Flag(name, (value,), source=source, origin=f"env.{one['name']}"))
        else:
            rest.append(one)
    return flags, rest
