"""The CEL rules that depend on the engine: what each takes, and what the gate must own."""

from typing import Final

from sluice_core.engines import FOREIGN

from .kinds import matches

ENGINE_FLAGS: Final = {
    "block-size": "[1-9][0-9]{0,3}",
    "liveness-timeout": "[1-9][0-9]{0,4}",
    "load-format": "(auto|safetensors|dummy)",
    "max-num-queued-reqs": "[0-9]{1,6}",
    "num-gpu-blocks-override": "[1-9][0-9]{0,8}",
    "parse-special": "(true|false)",
    "quantization": "w8a8",
    "seed": "[0-9]{1,9}",
}
"""Flags of the worker that `engine.args` may give, and their values. All others have a field here
or belong to the operator, so the object gives no more rights than its fields do."""
OWNED_FLAGS: Final = {
    kind: engine.owned_flags for kind, engine in FOREIGN.items() if engine.owned_flags
}
"""Flags that the gate must own: nothing may pass beside it, and its cap must be the bound."""
OWNED_VARIABLES: Final = (
    *("HF_HOME", "HF_TOKEN", "HF_ENDPOINT", "HOME"),
    *(name for engine in FOREIGN.values() for name in engine.owned_variables),
    "SLUICE_.*",
)


def _is(*names: str) -> str:
    """CEL, at `spec`: the engine is one of `names`."""
    return f"self.engine.name in [{', '.join(repr(name) for name in names)}]"


def _owned() -> dict[str, str]:
    """Each engine's own rule: a list of all flags would refuse one engine's for another's."""
    rules = {}
    for name, flags in OWNED_FLAGS.items():
        form = matches(f"({'|'.join(flags)})(=.*)?", "a.replace('_', '-')")
        rule = f"self.name != '{name}' || !has(self.args) || !self.args.exists(a, {form})"
        rules[rule] = (
            f"args: the operator sets {', '.join(flags)}; "
            "see maxNumSeqs, maxModelLen, apiKeySecretRef, hardware"
        )
    return rules


def _once() -> str:
    """CEL, at `engine`: our worker's flags are there once at most. Other engines have flags that
    may be repeated, and their own word on the others."""
    twice = (f"self.args.filter(a, a.startsWith('--{flag}=')).size() > 1" for flag in ENGINE_FLAGS)
    return f"self.name != 'Sluice' || !has(self.args) || !({' || '.join(twice)})"


_MOST = 65_536
"""Characters in all. The Deployment holds them a second time, in an annotation with the pod's
template; the API server takes 256 KiB of annotations."""
_SIZES = {
    "args": "self.args.map(a, a.size()).sum()",
    "command": "self.command.map(a, a.size()).sum()",
    "env": "self.env.map(e, has(e.value) ? e.value.size() : 0).sum()",
}
_KNOWN = " || ".join(f"a.startsWith('--{flag}=')" for flag in ENGINE_FLAGS)


def _ours() -> dict[str, str]:
    """A rule for each flag of our worker: one over all would cost more than the API server
    allows."""
    rules = {}
    for flag, value in ENGINE_FLAGS.items():
        fits = f"!a.startsWith('--{flag}=') || {matches(f'--{flag}={value}', 'a')}"
        rule = f"self.name != 'Sluice' || !has(self.args) || self.args.all(a, {fits})"
        rules[rule] = f"args: --{flag} must have a value that fits {value}"
    return rules


ENGINE_RULES: Final = {
    f"self.name != 'Sluice' || !has(self.args) || self.args.all(a, {_KNOWN})":
        "args: each must be --FLAG=VALUE and FLAG one of " + ", ".join(ENGINE_FLAGS),
    **_ours(),
    _once(): "args: must not give a flag twice",
    f"{' + '.join(f'(has(self.{name}) ? {size} : 0)' for name, size in _SIZES.items())} <= {_MOST}":
        f"args, command and env must have at most {_MOST} characters in all",
    "self.name != 'Sluice' || !has(self.env) || self.env.size() == 0":
        "env belongs to other engines than Sluice",
    **_owned(),
    "self.name != 'Ollama' || !has(self.args) || self.args.size() == 0":
        "args: Ollama takes no flags; use env",
    "self.name == 'Custom' || (!has(self.port) && !has(self.healthPath))":
        "port and healthPath belong to Custom only",
    "self.name != 'Custom' || (has(self.image) && self.image != '')":
        "image: Custom has no default image",
    "!has(self.port) || !(self.port in [8000, 8001])": "port: the gate has 8000 and 8001",
    "!has(self.env) || self.env.all(e, self.env.exists_one(other, other.name == e.name))":
        "env: must not name a variable twice",
    "!has(self.env) || !self.env.exists(e, "
    + matches("|".join(OWNED_VARIABLES), "e.name") + ")":
        "env: these are set by the operator: " + ", ".join(OWNED_VARIABLES).replace(".*", "..."),
}  # fmt: skip
_THREE_WAITS = " + ".join(["duration(self.batching.static.wait)"] * 3)
"""A worker with work that makes no step is not ready after half of its liveness timeout."""
MODEL_RULES: Final = {
    f"!({_is('Sluice')}) || self.hardware.accelerator == 'cpu' || !has(self.engine.args) || "
    "!self.engine.args.exists(a, a.startsWith('--quantization='))":
        "engine.args: --quantization=w8a8 is for accelerator cpu only",
    f"!({_is('VLLM', 'SGLang', 'TGI')}) || self.hardware.accelerator == 'nvidia' || "
    "(has(self.engine.image) && self.engine.image != '')":
        "engine.image: the default image needs accelerator nvidia; name one for cpu",
    "self.hardware.accelerator != 'other' || (has(self.engine.image) && self.engine.image != '')":
        "engine.image: accelerator other has no default image",
    f"!({_is('Sluice')}) || (self.hardware.accelerator != 'other' && "
    "(!has(self.hardware.gpus) || self.hardware.gpus <= 1))":
        "hardware: Sluice's own engine runs on CPUs or one NVIDIA GPU; name another engine",
    f"self.hardware.nodes == 1 || {_is('VLLM', 'SGLang', 'Custom')}":
        "hardware.nodes: only VLLM, SGLang and Custom serve from more than one node",
    f"!({_is('LlamaCpp', 'Ollama')}) || !has(self.model.revision)":
        "model.revision: LlamaCpp and Ollama fetch the newest only",
    f"!({_is('Ollama')}) || !has(self.model.secretRef)":
        "model.secretRef: Ollama sends no token; use pvc:// for a gated model",
    f"!({_is('LlamaCpp', 'Ollama', 'Custom')}) || self.model.dtype == 'auto'":
        "model.dtype: the file or the command decides it for LlamaCpp, Ollama and Custom",
    f"!({_is('TGI')}) || self.model.dtype != 'float32'": "model.dtype: TGI has no float32",
    f"!({_is('LlamaCpp', 'Ollama')}) || self.model.uri.startsWith('hf://') || "
    "self.model.uri.endsWith('.gguf')":
        "model.uri: LlamaCpp and Ollama need the path of a .gguf file",
    "!self.model.uri.matches('^(s3|gs)://') || " + _is("VLLM", "SGLang", "Custom"):
        "model.uri: only VLLM, SGLang and Custom read s3:// and gs://; else copy the checkpoint "
        "into a volume and use pvc://CLAIM/PATH",
    f"!({_is('Custom')}) || !has(self.model.maxModelLen)":
        "model.maxModelLen: give it in the args of Custom",
}  # fmt: skip
"""Of model, engine and hardware, wherever they stand together."""
SPEC_RULES: Final = {
    **MODEL_RULES,
    "(self.hardware.nodes > 1) == (oldSelf.hardware.nodes > 1)":
        "hardware.nodes: an object on one node cannot become one on many, or back; make another",
    f"!({_is('Ollama', 'Custom')}) || type(self.batching.maxNumBatchedTokens) != int":
        "batching.maxNumBatchedTokens: Ollama and Custom have no such setting here",
    f"!({_is('LlamaCpp', 'Ollama', 'Custom')}) || double(self.batching.memoryUtilization) == 0.9":
        "batching.memoryUtilization: LlamaCpp, Ollama and Custom have no such setting",
    f"!({_is('Ollama', 'Custom')}) || self.batching.prefixCaching":
        "batching.prefixCaching: it cannot be switched off in Ollama, and is in the args of Custom",
    f"{_is('Sluice')} || self.batching.speculation == 'Auto'":
        "batching.speculation: other engines draft only where their args say",
    f"self.batching.mode != 'Static' || ({_is('Sluice')} && self.model.task == 'Generate')":
        "batching.mode: Static is for Sluice's own engine and task Generate only",
    "!has(self.batching.static) || !has(self.batching.static.wait) || !has(self.engine.args) || "
    "self.engine.args.all(a, !a.startsWith('--liveness-timeout=') || "
    f"{_THREE_WAITS} <= duration(a.substring(19) + 's'))":
        "batching.static.wait must be at most a third of --liveness-timeout",
    "!has(self.slo) || self.model.task == 'Generate' || "
    "(!has(self.slo.timeToFirstToken) && !has(self.slo.interTokenLatency))":
        "slo: first tokens and gaps are of task Generate; other tasks have endToEnd",
}  # fmt: skip
