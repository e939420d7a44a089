"""How a checkpoint makes one vector of a text: the files of sentence-transformers. Pure.

Both formats are read: of version 5.4 on, and the older one. A module that is not built refuses
the checkpoint by its name: a wrong vector is worse than none. Without these files it is the mean of
all tokens, not normalised, as in sentence-transformers 6.2 (`sentence_transformer/modules`,
`base/modules`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from ..bounded import count
from ..errors import CheckpointError
from .files import Source, json_object, read_bytes

MODULES = "modules.json"
PROMPTS = "config_sentence_transformers.json"
TOKENIZER = "tokenizer_config.json"
MAX_BYTES = 1 << 20
MAX_MODULES = 16
MAX_WIDTH = 1 << 20
Pooling = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
_OLD_MODES: Mapping[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""In the order in which several are concatenated."""
DenseActivation = Literal["Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid"]
TRANSFORMER_FILES = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)


@dataclass(frozen=True, slots=True)
class Dense:
    """A linear layer behind the pooling: weights [num_out, num_in] in `folder`."""

    folder: str
    num_in: int
    num_out: int
    has_bias: bool
    activation: DenseActivation


@dataclass(frozen=True, slots=True)
class Sentence:
    """From tokens to a vector. `modes`: poolings, concatenated. `behind`: what follows, in order;
    None is a normalisation. `include_prompt`: False if the prompt's tokens are not pooled.
    `prompts`: texts in front of a text, by name. `is_padded`: texts have `max_seq_length` tokens,
    behind them the one for padding. `lacks_punctuation`: it is left out of texts."""

    modes: tuple[Pooling, ...] = ("mean",)
    include_prompt: bool = True
    behind: tuple[Dense | None, ...] = ()
    max_seq_length: int | None = None
    lower_case: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    is_padded: bool = False
    lacks_punctuation: bool = False

    @staticmethod
    def read(source: Source, hidden_size: int) -> "Sentence":
        """Read it. `hidden_size`: of the encoder; raises CheckpointError."""
        names = set(source.names())
        prompts, default_prompt = _prompts(source) if PROMPTS in names else ({}, None)
        longest = tokenizer_length(source)
        if MODULES not in names:
            return Sentence(max_seq_length=longest, prompts=prompts, default_prompt=default_prompt)
        (kind, folder), *rest = _modules(source)
        if kind != "Transformer":
            raise CheckpointError(f"{MODULES}: the first module is {kind}, not Transformer.")
        max_seq_length, lower_case = _transformer(source, folder, names)
        if not rest or rest[0][0] != "Pooling":
            raise CheckpointError(f"{MODULES}: the second module must be Pooling.")
        modes, include_prompt = _pooling(source, rest[0][1], hidden_size)
        return Sentence(
            modes,
            include_prompt,
            _behind(source, rest[1:], hidden_size * len(modes)),
            max_seq_length or longest,
            lower_case,
            prompts,
            default_prompt,
        )

    def width(self, hidden_size: int) -> int:
        """Numbers of a vector."""
        layers = [layer for layer in self.behind if layer is not None]
        return layers[-1].num_out if layers else hidden_size * len(self.modes)

    @property
    def normalizes(self) -> bool:
        """True if vectors have the length 1."""
        return None in self.behind


@dataclass(frozen=True, slots=True)
class TokenScore:
    """A reranker that writes: a pair's score is the logit of one token, less that of another.
    `prompt`: a system message in front of each pair. `variables`: of its chat template."""

    true_id: int
    false_id: int | None
    prompt: str | None
    variables: Mapping[str, object]

    @staticmethod
    def read(source: Source, vocab_size: int) -> "TokenScore | None":
        """That of a checkpoint with a module LogitScore; None for another. CheckpointError."""
        modules = _modules(source) if MODULES in source.names() else []
        folders = [folder for kind, folder in modules if kind == "LogitScore"]
        if not folders:
            return None
        if [kind for kind, _ in modules] != ["Transformer", "LogitScore"]:
            raise CheckpointError(f"{MODULES}: LogitScore is built behind Transformer alone.")
        config = _read(source, folders[0])
        if config.get("module_input_name", "causal_logits") != "causal_logits":
            raise CheckpointError(f"{folders[0]}: module_input_name is built for logits only.")
        asked = [config.get(f"{name}_token_id") for name in ("true", "false")]
        true_id, false_id = (count(value, vocab_size - 1) for value in asked)
        if true_id is None or (false_id is None and asked[1] is not None):
            raise CheckpointError(f"{folders[0]}: the token ids are outside the vocabulary.")
        prompts, default = _prompts(source) if PROMPTS in source.names() else ({}, None)
        prompt = prompts[default] if default is not None else None
        return TokenScore(true_id, false_id, prompt, _template_variables(source))


def scores_tokens(source: Source) -> bool:
    """True if one of the modules is LogitScore; raises CheckpointError."""
    return any(kind == "LogitScore" for kind, _ in _modules(source))


def _reads_messages(config: Mapping[str, object]) -> bool:
    """True if version 5.4 and later write a text, or a pair, by the chat template."""
    modalities = config.get("modality_config")
    return isinstance(modalities, Mapping) and "message" in modalities


def _template_variables(source: Source) -> Mapping[str, object]:
    """processing_kwargs of the Transformer; CheckpointError for what is no template's."""
    config = _read(source, "", TRANSFORMER_FILES[0])
    if not _reads_messages(config):
        raise CheckpointError(
            f"{TRANSFORMER_FILES[0]}: pairs without a chat template are not built."
        )
    kwargs = config.get("processing_kwargs") or {}
    if not isinstance(kwargs, Mapping) or kwargs.keys() - {"chat_template"}:
        raise CheckpointError(
            f"{TRANSFORMER_FILES[0]}: processing_kwargs are built for a chat template only."
        )
    variables = kwargs.get("chat_template") or {}
    return variables if isinstance(variables, Mapping) else {}


def _modules(source: Source) -> list[tuple[str, str]]:
    """Kind and folder of each module. Types were renamed: the last part of the name tells."""
    wrapped = b'{"modules":' + read_bytes(source, MODULES, MAX_BYTES) + b"}"
    entries = json_object(wrapped, MODULES)["modules"]
    if not isinstance(entries, list) or not 0 < len(entries) <= MAX_MODULES:
        raise CheckpointError(f"{MODULES}: not a list of 1 to {MAX_MODULES} modules.")
    found = []
    for entry in entries:
        kind, folder = (
            entry.get(name) if isinstance(entry, Mapping) else None for name in ("type", "path")
        )
        if not isinstance(kind, str) or not isinstance(folder, str):
            raise CheckpointError(f"{MODULES}: a module has no type and path.")
        if folder.startswith("/") or ".." in folder.split("/"):
            raise CheckpointError(f"{MODULES}: path {folder[:64]} leads outside the checkpoint.")
        kind = kind.rpartition(".")[2]
        if kind not in ("Transformer", "Pooling", "Dense", "Normalize", "LogitScore"):
            raise CheckpointError(
                f"{MODULES}: module {kind[:64]} is not built; a vector without it would be wrong."
            )
        found.append((kind, folder.strip("/")))
    return found


def _read(source: Source, folder: str, name: str = "config.json") -> Mapping[str, object]:
    path = f"{folder}/{name}" if folder else name
    return json_object(read_bytes(source, path, MAX_BYTES), path)


def _prompts(source: Source) -> tuple[Mapping[str, str], str | None]:
    config = _read(source, "", PROMPTS)
    prompts, default = config.get("prompts") or {}, config.get("default_prompt_name")
    if not isinstance(prompts, Mapping) or not all(isinstance(t, str) for t in prompts.values()):
        raise CheckpointError(f"{PROMPTS}: prompts is not an object of texts.")
    if default is None:
        return prompts, None
    if not isinstance(default, str) or default not in prompts:
        raise CheckpointError(f"{PROMPTS}: default_prompt_name names none of the prompts.")
    return prompts, default


def tokenizer_config(source: Source) -> Mapping[str, object]:
    """tokenizer_config.json; empty if there is none. Raises CheckpointError."""
    return _read(source, "", TOKENIZER) if TOKENIZER in source.names() else {}


def tokenizer_length(source: Source) -> int | None:
    """model_max_length, where version 5.4 and later keep the length; a huge number means none."""
    most = tokenizer_config(source).get("model_max_length")
    if isinstance(most, int) and not isinstance(most, bool) and 0 < most <= MAX_WIDTH:
        return most
    return None


def _transformer(source: Source, folder: str, names: set[str]) -> tuple[int | None, bool]:
    """max_seq_length and do_lower_case."""
    if folder:
        raise CheckpointError(f"{MODULES}: a Transformer in folder {folder[:64]} is not built.")
    present = [name for name in TRANSFORMER_FILES if name in names]
    if not present:
        return None, False
    config = _read(source, "", present[0])
    if _reads_messages(config) or config.get("processing_kwargs"):
        raise CheckpointError(f"{present[0]}: texts for a chat template are not built.")
    most = config.get("max_seq_length")
    if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
        raise CheckpointError(f"{present[0]}: max_seq_length must be a positive integer.")
    return most, config.get("do_lower_case") is True


def _pooling(source: Source, folder: str, hidden_size: int) -> tuple[tuple[Pooling, ...], bool]:
    config = _read(source, folder)
    width = config.get("embedding_dimension", config.get("word_embedding_dimension", hidden_size))
    if width != hidden_size:
        raise CheckpointError(
            f"{folder}/config.json: pools {str(width)[:64]} numbers a token, and the encoder "
            f"gives {hidden_size}."
        )
    asked = config.get("pooling_mode")
    if asked is None:
        asked = [mode for name, mode in _OLD_MODES.items() if config.get(name) is True] or "mean"
    listed = [asked] if isinstance(asked, str) else asked
    known = get_args(Pooling)
    if not isinstance(listed, list) or not listed or any(mode not in known for mode in listed):
        raise CheckpointError(
            f"{folder}/config.json: pooling_mode {str(asked)[:64]} is not of {', '.join(known)}."
        )
    return tuple(listed), config.get("include_prompt", True) is not False


def _behind(source: Source, modules: list[tuple[str, str]], width: int) -> tuple[Dense | None, ...]:
    found: list[Dense | None] = []
    for kind, folder in modules:
        if kind == "Normalize":
            found.append(None)
        elif kind == "Dense":
            found.append(_dense(_read(source, folder), folder, width))
            width = found[-1].num_out if found[-1] else width
        else:
            raise CheckpointError(f"{MODULES}: module {kind} stands behind Pooling.")
    return tuple(found)


def _dense(config: Mapping[str, object], folder: str, width: int) -> Dense:
    name = f"{folder}/config.json"
    num_in, num_out = config.get("in_features"), config.get("out_features")
    if num_in != width or not isinstance(num_out, int) or not 0 < num_out <= MAX_WIDTH:
        raise CheckpointError(
            f"{name}: in_features {str(num_in)[:64]} and out_features {str(num_out)[:64]} do "
            f"not follow a vector of {width} numbers."
        )
    for key in ("module_input_name", "module_output_name"):
        if config.get(key, "sentence_embedding") not in (None, "sentence_embedding"):
            raise CheckpointError(f"{name}: {key} is built for sentence_embedding only.")
    if config.get("use_residual"):
        raise CheckpointError(f"{name}: use_residual is not built.")
    path = str(config.get("activation_function", "torch.nn.modules.activation.Tanh"))
    known: tuple[DenseActivation, ...] = get_args(DenseActivation)
    for activation in known:
        if path.startswith("torch.nn.") and path.rpartition(".")[2] == activation:
            has_bias = config.get("bias", True) is not False
            return Dense(folder, width, num_out, has_bias, activation)
    raise CheckpointError(
        f"{name}: activation_function {path[:64]} is not of torch.nn's {', '.join(known)}."
    )
