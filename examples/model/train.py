"""Train the demo's model: a small Llama on the Python standard library's own sources.

Everything it needs is on the machine: the text is the running Python's standard library. Progress
is checkpointed under `--work`, and the same command continues after an interruption.

    nice -n 19 python examples/model/train.py --steps 2000
"""

import argparse
import hashlib
import json
import math
import platform
import random
import sys
import sysconfig
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).resolve().parent
END_OF_TEXT = "<|endoftext|>"
VOCAB_SIZE = 2048
MAX_POSITION = 1024
ROPE_THETA = 10000.0

# Tests repeat themselves, the rest is tables, applications of their own or not the library's text.
EXCLUDED_DIRS = frozenset(
    {
        "site-packages",
        "test",
        "tests",
        "idlelib",
        "lib2to3",
        "turtledemo",
        "encodings",
        "pydoc_data",
    }
)
MAX_FILE_BYTES = 200_000  # larger ones are tables
# Never trained on. Chosen for being old, stable across Python versions and unlike one another.
HELD_OUT = frozenset(
    {
        "asyncio/queues.py",
        "bisect.py",
        "csv.py",
        "email/message.py",
        "graphlib.py",
        "http/cookies.py",
        "json/encoder.py",
        "queue.py",
        "shelve.py",
        "textwrap.py",
        "urllib/robotparser.py",
    }
)


@dataclass(frozen=True, slots=True)
class Recipe:
    """What decides the weights: with the same text, torch and thread count they come out equal."""

    seed: int = 1234
    steps: int = 2000
    tokens_per_step: int = 4096
    seq_len: int = 1024
    chars_between_cuts: int = 40
    warmup_steps: int = 40
    peak_lr: float = 6e-3
    final_lr_share: float = 0.02
    weight_decay: float = 0.1
    threads: int = 2

    def lr_at(self, step: int) -> float:
        """Linear warm-up, then a cosine down to `final_lr_share` of the peak."""
        if step < self.warmup_steps:
            return self.peak_lr * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / (self.steps - self.warmup_steps)
        cosine = (1 + math.cos(math.pi * progress)) / 2
        return self.peak_lr * (self.final_lr_share + (1 - self.final_lr_share) * cosine)


@dataclass(frozen=True, slots=True)
class Corpus:
    """The text of the files trained on and of those held out, in the order of their paths."""

    train: tuple[str, ...]
    held_out: tuple[str, ...]

    def digest(self) -> str:
        """SHA-256 of all text, so that a card can say which text its numbers belong to."""
        joined = "\0".join((*self.train, "", *self.held_out))
        return hashlib.sha256(joined.encode()).hexdigest()


@dataclass(slots=True)
class History:
    """What a run has measured so far; grows with each log line and survives a resume."""

    train: list[tuple[int, float]] = field(default_factory=list)
    val: list[tuple[int, float]] = field(default_factory=list)
    wall_s: float = 0.0
    cpu_s: float = 0.0


def source_paths(root: Path) -> Iterator[Path]:
    """The library's sources below `root` that are prose-like code, sorted by their path."""
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if EXCLUDED_DIRS.intersection(parts) or parts[0].startswith("config-"):
            continue
        if 0 < path.stat().st_size <= MAX_FILE_BYTES:
            yield path


def read_corpus(root: Path) -> Corpus:
    """Read, deduplicate by content and split the sources below `root` by file."""
    train: dict[str, str] = {}
    held_out: dict[str, str] = {}
    for path in source_paths(root):
        text = path.read_text(encoding="utf-8", errors="replace")
        key = hashlib.sha256(text.encode()).hexdigest()
        name = path.relative_to(root).as_posix()
        (held_out if name in HELD_OUT else train).setdefault(key, text)
    return Corpus(
        train=tuple(text for key, text in train.items() if key not in held_out),
        held_out=tuple(held_out.values()),
    )


def train_tokenizer(texts: tuple[str, ...]) -> Tokenizer:
    """A byte-level BPE: every UTF-8 text has tokens and comes back unchanged."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def cut(text: str, chars_between: int, generator: random.Random) -> list[str]:
    """`text` in pieces of random lengths, 1 to twice `chars_between` - 1.

    A prompt ends anywhere: the one space after `import` is then a token of its own, which text
    encoded whole never shows. Pieces encoded one by one do.
    """
    pieces, start = [], 0
    while start < len(text):
        end = start + generator.randrange(1, 2 * chars_between)
        pieces.append(text[start:end])
        start = end
    return pieces


def encode(tokenizer: Tokenizer, texts: Iterable[Sequence[str]]) -> torch.Tensor:
    """The pieces of all texts, each text closed by the end token, as one row of token ids."""
    end: int = tokenizer.token_to_id(END_OF_TEXT)  # type: ignore[assignment] # it was added
    ids: list[int] = []
    for pieces in texts:
        for encoding in tokenizer.encode_batch(list(pieces)):
            ids.extend(encoding.ids)
        ids.append(end)
    return torch.tensor(ids, dtype=torch.long)  # [num_tokens]


def encode_for_training(tokenizer: Tokenizer, texts: Sequence[str], recipe: Recipe) -> torch.Tensor:
    """The texts in a seeded order, cut at seeded places."""
    generator = random.Random(recipe.seed)  # noqa: S311 - an order, not a secret
    order = generator.sample(texts, len(texts))
    return encode(tokenizer, (cut(text, recipe.chars_between_cuts, generator) for text in order))


def batch_at(tokens: torch.Tensor, recipe: Recipe, step: int) -> torch.Tensor:
    """The rows of `step`, a function of the recipe alone so that a resumed run sees the same.

    Each pass over the text shifts the windows and shuffles their order.
    """
    length = recipe.seq_len
    rows = recipe.tokens_per_step // length
    num_windows = (len(tokens) - length) // length
    picked = []
    for index in range(step * rows, (step + 1) * rows):
        epoch, place = divmod(index, num_windows)
        generator = torch.Generator().manual_seed(recipe.seed + epoch)
        shift = int(torch.randint(length, (1,), generator=generator))
        window = int(torch.randperm(num_windows, generator=generator)[place])
        picked.append(tokens[shift + window * length : shift + (window + 1) * length])
    return torch.stack(picked)  # [rows, length]


def model_config(tokenizer: Tokenizer) -> LlamaConfig:
    """The shape: 2.75 M parameters, so that half a CPU core serves it."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_POSITION,
        rope_theta=ROPE_THETA,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=end,
        eos_token_id=end,
        attn_implementation="sdpa",
    )


def make_optimizers(model: LlamaForCausalLM, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for embeddings and norms.

    One short trial each at a rate of 3e-3 and 8 rows of 256, one seed: held-out loss 5.08 after
    67 CPU seconds of Muon, 5.59 after 69 of AdamW alone, whose own best rate was not sought.
    """
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    muon_ids = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in muon_ids]
    decay = recipe.weight_decay
    return [
        torch.optim.Muon(
            matrices, lr=recipe.peak_lr, weight_decay=decay, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(rest, lr=recipe.peak_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def loss_of(model: LlamaForCausalLM, rows: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats per token of `rows` [batch, length]; matmuls in bfloat16."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(rows[:, :-1], use_cache=False).logits  # [batch, length - 1, vocab]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, tokens: torch.Tensor, length: int) -> float:
    """Mean loss over all whole windows of the held-out text, in nats per token."""
    windows = tokens[: len(tokens) // length * length].view(-1, length)
    losses = [float(loss_of(model, rows)) * len(rows) for rows in torch.split(windows, 8)]
    return sum(losses) / len(windows)


def train_step(
    model: LlamaForCausalLM,
    optimizers: list[torch.optim.Optimizer],
    rows: torch.Tensor,
    lr: float,
) -> float:
    """One update; returns the batch's loss in nats per token."""
    loss = loss_of(model, rows)
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    model.zero_grad(set_to_none=True)
    return loss.item()


@dataclass(slots=True)
class Run:
    """A training run: what it is made of, how far it is, and its checkpoint file."""

    recipe: Recipe
    model: LlamaForCausalLM
    optimizers: list[torch.optim.Optimizer]
    train: torch.Tensor  # [num_train_tokens]
    held_out: torch.Tensor  # [num_held_out_tokens]
    corpus_digest: str
    checkpoint: Path
    step: int = 0
    history: History = field(default_factory=History)

    def save(self) -> None:
        """Write the checkpoint so that a kill at any time leaves the old or the new one."""
        state = {
            "made_from": self._made_from(),
            "step": self.step,
            "history": asdict(self.history),
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
        half = self.checkpoint.with_suffix(".half")
        torch.save(state, half)
        half.replace(self.checkpoint)

    def resume(self) -> None:
        """Continue from the checkpoint if there is one; SystemExit if it is of another run."""
        if not self.checkpoint.exists():
            return
        state = torch.load(self.checkpoint, weights_only=True)
        if state["made_from"] != self._made_from():
            sys.exit(f"{self.checkpoint} is of another recipe or text: remove it to start over.")
        self.step = state["step"]
        self.history = History(**state["history"])
        self.model.load_state_dict(state["model"])
        for optimizer, its_state in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(its_state)
        print(f"resumed at step {self.step}", flush=True)

    def _made_from(self) -> dict[str, object]:
        return {**asdict(self.recipe), "corpus": self.corpus_digest}

    def advance(self) -> float:
        """One step; returns its training loss in nats per token."""
        wall, cpu = time.monotonic(), time.process_time()
        rows = batch_at(self.train, self.recipe, self.step)
        loss = train_step(self.model, self.optimizers, rows, self.recipe.lr_at(self.step))
        self.step += 1
        self.history.wall_s += time.monotonic() - wall
        self.history.cpu_s += time.process_time() - cpu
        return loss

    def to_the_end(self, log_every: int = 20, save_every: int = 200) -> None:
        """Train the remaining steps, with a log line and a checkpoint now and then."""
        losses: list[float] = []
        while self.step < self.recipe.steps:
            losses.append(self.advance())
            last = self.step == self.recipe.steps
            if self.step % log_every == 0 or last:
                self._log(sum(losses) / len(losses))
                losses.clear()
            if self.step % save_every == 0 or last:
                val = held_out_loss(self.model, self.held_out, self.recipe.seq_len)
                self.history.val.append((self.step, round(val, 4)))
                print(f"step {self.step} held-out loss {val:.4f}", flush=True)
                self.save()

    def _log(self, loss: float) -> None:
        history = self.history
        history.train.append((self.step, round(loss, 4)))
        speed = self.step * self.recipe.tokens_per_step / history.wall_s
        left_s = (self.recipe.steps - self.step) * history.wall_s / self.step
        print(
            f"step {self.step}/{self.recipe.steps} loss {loss:.4f} {speed:.0f} tokens/s, "
            f"about {left_s / 60:.0f} min left",
            flush=True,
        )


def export(run: Run, tokenizer: Tokenizer, out: Path) -> None:
    """Write the checkpoint as transformers would read it, weights in bfloat16."""
    weights = LlamaForCausalLM(run.model.config).to(torch.bfloat16)
    weights.load_state_dict(run.model.state_dict())
    weights.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)  # written 0600, and a container's user reads it
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    # transformers 5 writes rope_parameters only; servers also know the older spelling.
    write_json(out / "config.json", {**config, "rope_theta": ROPE_THETA})
    tokenizer.save(str(out / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_POSITION,
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
    }
    write_json(out / "tokenizer_config.json", tokenizer_config)


def write_report(run: Run, out: Path) -> None:
    """`loss.json`: the recipe, what it was made from, the curve and what it cost."""
    report = {
        "recipe": asdict(run.recipe),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "corpus_sha256": run.corpus_digest,
        "num_parameters": sum(p.numel() for p in run.model.parameters()),
        "num_train_tokens": len(run.train),
        "num_held_out_tokens": len(run.held_out),
        "steps_done": run.step,
        "tokens_seen": run.step * run.recipe.tokens_per_step,
        **asdict(run.history),
    }
    write_json(out / "loss.json", report)


def write_json(path: Path, value: object) -> None:
    """JSON that a diff can show: sorted by insertion, one curve point per line."""
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def plot(history: History, path: Path) -> None:
    """Draw both curves over the steps, in nats per token."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(*zip(*history.train, strict=True), label="training", linewidth=1)
    axes.plot(*zip(*history.val, strict=True), label="held out", marker="o", markersize=4)
    axes.set(xlabel="step", ylabel="cross-entropy, nats per token", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=110)


def prepare(recipe: Recipe, corpus: Corpus, tokenizer: Tokenizer, work: Path) -> Run:
    """A run at step 0, its weights drawn from the recipe's seed."""
    torch.manual_seed(recipe.seed)
    model = LlamaForCausalLM(model_config(tokenizer))
    return Run(
        recipe=recipe,
        model=model,
        optimizers=make_optimizers(model, recipe),
        train=encode_for_training(tokenizer, corpus.train, recipe),
        held_out=encode(tokenizer, ([text] for text in corpus.held_out)),
        corpus_digest=corpus.digest(),
        checkpoint=work / "run.pt",
    )


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=Recipe().steps, help="updates to make")
    parser.add_argument("--threads", type=int, default=Recipe().threads, help="CPU threads")
    parser.add_argument("--out", type=Path, default=HERE, help="where the result goes")
    parser.add_argument("--work", type=Path, default=HERE.parents[1] / "build" / "demo-model")
    return parser.parse_args()


def main() -> None:
    """Read the text, train the tokenizer and the model, write both out with the curve."""
    arguments = parse_arguments()
    arguments.work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(arguments.threads)
    corpus = read_corpus(Path(sysconfig.get_path("stdlib")))
    tokenizer = train_tokenizer(corpus.train)
    recipe = Recipe(steps=arguments.steps, threads=arguments.threads)
    run = prepare(recipe, corpus, tokenizer, arguments.work)
    num_parameters = sum(p.numel() for p in run.model.parameters())
    print(f"{num_parameters} parameters, {len(run.train)} tokens of text", flush=True)
    run.resume()
    run.to_the_end()
    arguments.out.mkdir(parents=True, exist_ok=True)
    export(run, tokenizer, arguments.out)
    write_report(run, arguments.out)
    plot(run.history, arguments.out / "loss.png")


if __name__ == "__main__":
    main()
