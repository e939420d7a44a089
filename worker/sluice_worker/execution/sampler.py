"""One token per row: greedy, or drawn from what temperature, top-k, top-p and min-p leave.

Each operation works on all rows that need it at once. A drawn token depends only on its row's
logits and (seed, index), never on other rows. So a preempted sequence draws the same tokens again.

Order and meaning are vLLM's: allowed tokens, forbidden tokens, bias, penalties (repetition, then
frequency and presence), temperature, min-p, top-k, top-p. Ties at a cut-off are all kept.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from sluice_core.port import Scores
from sluice_core.work import GREEDY_BELOW
from torch import Tensor

from ..scheduling.edits import Edits

FIRST_CANDIDATES = 256
"""Tokens sorted first: most top-p sets are smaller, and a full sort takes 16 times as long."""
PIECE_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 23}
"""Logits drawn from at once: drawing needs several copies of them, which the plan leaves out."""
SPAN = 128
"""Tokens of a span: probabilities are summed by span, and only one span token by token."""


@dataclass(frozen=True, slots=True)
class Draw:
    """How one row is sampled. `index`: position of the token in its sequence. `top_k` 0: all."""

    temperature: float
    seed: int
    index: int
    forbidden: tuple[int, ...] = ()
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    edits: Edits | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def is_edited(self) -> bool:
        """True if logits change before temperature."""
        return bool(self.forbidden) or self.edits is not None

    @property
    def is_cut(self) -> bool:
        """True if unlikely tokens are left out."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


def sample(logits: Tensor, draws: Sequence[Draw]) -> list[int | None]:
    """A token per row of logits [num_rows, vocab_size] float32, which stay as they are.

    None where the logits are not finite, or where every token is excluded.
    """
    chosen: list[int | None] = [None] * len(draws)
    simple = [row for row, draw in enumerate(draws) if draw.is_greedy and not draw.is_edited]
    if simple:
        _book(chosen, simple, *_argmax(_rows(logits, simple)))
    rest = [row for row, draw in enumerate(draws) if not draw.is_greedy or draw.is_edited]
    for rows in pieces(rest, logits):
        part = _rows(logits, rows)
        edited = [at for at, row in enumerate(rows) if draws[row].is_edited]
        if edited:
            changed = _edit(part[edited], [draws[rows[at]] for at in edited])
            part = _replaced(part, edited, changed)
        greedy = [at for at, row in enumerate(rows) if draws[row].is_greedy]
        if greedy:
            _book(chosen, [rows[at] for at in greedy], *_argmax(_rows(part, greedy)))
        drawn = [at for at, row in enumerate(rows) if not draws[row].is_greedy]
        if drawn:
            picked = [rows[at] for at in drawn]
            _book(chosen, picked, *_draw(_rows(part, drawn), [draws[row] for row in picked]))
    return chosen


def pieces(rows: Sequence[int], logits: Tensor) -> Iterator[list[int]]:
    """`rows` in groups small enough to copy."""
    size = max(PIECE_ELEMENTS.get(logits.device.type, 1 << 20) // logits.shape[1], 1)
    for begin in range(0, len(rows), size):
        yield list(rows[begin : begin + size])


def _argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [num_rows], and for each True if its logit is finite."""
    best, tokens = logits.max(dim=-1)  # the largest of a row with a NaN is NaN
    return tokens, torch.isfinite(best)


def _book(chosen: list[int | None], rows: Sequence[int], tokens: Tensor, sound: Tensor) -> None:
    for row, token, ok in zip(rows, tokens.tolist(), sound.tolist(), strict=True):
        chosen[row] = token if ok else None


def _rows(tensor: Tensor, rows: Sequence[int]) -> Tensor:
    """The given rows; no copy if these are all rows."""
    return tensor if len(rows) == len(tensor) else tensor[list(rows)]


# Edits before temperature


def _edit(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """`logits` (a copy, changed in place) as the draws want them."""
    broken = ~torch.isfinite(logits.amax(dim=-1))
    width = logits.shape[1]
    flat = logits.view(-1)
    picked = [(row * width, draw) for row, draw in enumerate(draws)]
    changes = [(base, draw.edits) for base, draw in picked if draw.edits is not None]
    _keep_allowed(logits, [(base, e.allowed) for base, e in changes if e.allowed is not None])
    forbidden = [
        base + token for base, draw in picked for token in draw.forbidden if 0 <= token < width
    ]
    flat[torch.tensor(forbidden, dtype=torch.int64, device=flat.device)] = float("-inf")
    _add_bias(flat, [(base, e) for base, e in changes if len(e.bias_ids)])
    _penalise(flat, [(base, e) for base, e in changes if len(e.seen)])
    logits[broken] = float("nan")  # even if edits excluded the NaN: no token can be trusted
    return logits


def _keep_allowed(logits: Tensor, allowed: Sequence[tuple[int, NDArray[np.int64]]]) -> None:
    if not allowed:
        return
    flat, width = logits.view(-1), logits.shape[1]
    where = _indices(((base, ids) for base, ids in allowed), flat)
    kept = flat[where]
    logits[[base // width for base, _ in allowed]] = float("-inf")
    flat[where] = kept


def _add_bias(flat: Tensor, changes: Sequence[tuple[int, Edits]]) -> None:
    if changes:
        where = _indices(((base, edits.bias_ids) for base, edits in changes), flat)
        flat[where] += _values((edits.bias for _, edits in changes), flat)


def _penalise(flat: Tensor, changes: Sequence[tuple[int, Edits]]) -> None:
    if not changes:
        return
    where = _indices(((base, edits.seen) for base, edits in changes), flat)
    repetition = _values(
        (np.full(len(edits.seen), edits.repetition, dtype=np.float32) for _, edits in changes), flat
    )
    found = flat[where]
    found = torch.where(found > 0, found / repetition, found * repetition)
    flat[where] = found - _values((edits.charge for _, edits in changes), flat)


def _indices(parts: Iterable[tuple[int, NDArray[np.int64]]], like: Tensor) -> Tensor:
    """Positions in the flat logits of each row's token ids."""
    joined = np.concatenate([base + ids for base, ids in parts])
    return torch.from_numpy(joined).to(like.device)


def _values(parts: Iterable[NDArray[np.float32]], like: Tensor) -> Tensor:
    return torch.from_numpy(np.concatenate(list(parts))).to(like.device)


# Drawing


def _draw(logits: Tensor, draws: Sequence[Draw]) -> tuple[Tensor, Tensor]:
    """Tokens [num_rows], and whether each row's weights are numbers."""
    weights = logits / _column([draw.temperature for draw in draws], logits)
    # Softmax without the division by the sum, which what follows does not need.
    weights.sub_(weights.amax(dim=-1, keepdim=True)).exp_()
    cut = [row for row, draw in enumerate(draws) if draw.is_cut]
    if cut:
        part = _cut_(_rows(weights, cut), [draws[row] for row in cut])
        if part is not weights:
            weights[cut] = part
    uniforms = [_uniform(draw.seed, draw.index) for draw in draws]
    return _invert(weights, _column(uniforms, logits, torch.float64))


def _invert(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """The token at which each row's cumulative weight passes the share `uniforms` [num_rows, 1].

    Sums are float64: float32 sums over a large vocabulary would favour its beginning.
    """
    missing = -weights.shape[1] % SPAN
    if missing:
        weights = torch.nn.functional.pad(weights, (0, missing))
    spans = weights.view(len(weights), -1, SPAN)
    passed = spans.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)  # [num_rows, num_spans]
    total = passed[:, -1:]
    target = uniforms * total
    span = (passed <= target).sum(dim=-1, keepdim=True).clamp_max_(passed.shape[1] - 1)
    before = torch.where(span > 0, passed.gather(1, (span - 1).clamp_min_(0)), 0.0)
    inside = spans[torch.arange(len(spans), device=spans.device), span[:, 0]]
    inside = inside.cumsum(dim=-1, dtype=torch.float64)
    # The two sums may differ in their last bit; the target stays below the span's sum.
    rest = torch.minimum(target - before, inside[:, -1:] * (1 - 1e-12))
    token = span[:, 0] * SPAN + (inside <= rest).sum(dim=-1)
    return token, torch.isfinite(total[:, 0])


def _cut_(weights: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Set unlikely `weights` to zero in place; each row's largest weight is 1."""
    vocab_size = weights.shape[1]
    top_k = [min(draw.top_k or vocab_size, vocab_size) for draw in draws]
    looked_at = [k for k in top_k if k < vocab_size]
    nucleus = [row for row, draw in enumerate(draws) if draw.top_p < 1]
    if nucleus:
        looked_at.append(min(FIRST_CANDIDATES, vocab_size))
    num = max(looked_at, default=1)
    likeliest = weights.topk(num, dim=-1).values
    kth = likeliest.gather(1, _column([min(k, num) - 1 for k in top_k], weights, torch.int64))
    is_limited = _column([k < vocab_size for k in top_k], weights, torch.bool)
    floor = _column([draw.min_p for draw in draws], weights)
    floor = torch.maximum(floor, torch.where(is_limited, kth, 0.0))
    weights.mul_(weights >= floor)
    if not nucleus:
        return weights
    likeliest.mul_(likeliest >= floor)
    top_p = [draws[row].top_p for row in nucleus]
    part = _rows(weights, nucleus)
    part.mul_(part >= _nucleus_edge(part, _rows(likeliest, nucleus), top_p))
    if part is not weights:
        weights[nucleus] = part
    return weights


def _nucleus_edge(left: Tensor, likeliest: Tensor, top_p: Sequence[float]) -> Tensor:
    """The least probability [num_rows, 1] of the smallest set that has `top_p` of each row's sum.

    `likeliest`: the first of each row, in order; rows with a larger set are searched in full.
    """
    total = left.sum(dim=-1, keepdim=True, dtype=torch.float64)
    shares = total * _column(top_p, left, torch.float64)
    edges, is_found = _passed(likeliest, shares)
    for row in (~is_found).nonzero()[:, 0].tolist():
        edges[row] = _far_edge(left[row].cpu(), float(shares[row]))
    return edges


def _passed(likeliest: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
    """The value at which the sum of `likeliest` reaches `shares` [num_rows, 1]; True if it does."""
    summed = likeliest.cumsum(dim=-1, dtype=torch.float64)
    count = (summed - likeliest < shares).sum(dim=-1, keepdim=True)
    return likeliest.gather(1, (count - 1).clamp_min_(0)), ~(summed[:, -1] < shares[:, 0])


def _far_edge(left: Tensor, share: float) -> Tensor:
    """The edge of one row [vocab_size], found in one pass: sorting takes twenty times as long.

    Weights are from 0 to 1, so the first half of their bits orders them. Weights with equal first
    halves are summed together. Only the group in which the sum passes `share` is sorted.
    """
    halves = left.view(torch.int32) >> 16
    passed = torch.bincount(halves, weights=left.double()).flip(0).cumsum(dim=0)
    share = min(share, float(passed[-1]))  # another order of summing
    at = int((passed < share).sum())
    before = float(passed[at - 1]) if at else 0.0
    here = left[halves == len(passed) - 1 - at].sort(descending=True).values
    return _passed(here[None], torch.tensor([[share - before]], dtype=torch.float64))[0]


def _replaced(tensor: Tensor, rows: Sequence[int], part: Tensor) -> Tensor:
    """`tensor` with `part` as those rows."""
    if len(rows) == len(tensor):
        return part
    return tensor.index_copy(0, torch.tensor(rows, device=tensor.device), part)


def _column(values: Sequence[float], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """[num_rows, 1] on the device of `like`, and of its type unless told otherwise."""
    return torch.tensor(values, dtype=dtype or like.dtype, device=like.device).unsqueeze(1)


def _uniform(seed: int, index: int) -> float:
    """A number from [0, 1) in steps of 2**-48 that looks random in both arguments."""
    return (row_seed(seed, index) >> 15) / (1 << 48)


def row_seed(seed: int, index: int) -> int:
    """63 bits that look random in both arguments: the seed of one draw's noise."""
    return _mixed(_mixed(seed) + 0x9E3779B97F4A7C15 * (index + 1)) >> 1


def _mixed(value: int) -> int:
    """The finaliser of splitmix64: each bit of the result depends on all of `value`'s 64."""
    value &= (1 << 64) - 1
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
    value = (value ^ value >> 27) * 0x94D049BB133111EB & (1 << 64) - 1
    return value ^ value >> 31


# Scores of a choice


def score(
    logits: Tensor, rows: Sequence[int], tokens: Sequence[int], widths: Sequence[int]
) -> list[Scores]:
    """For each of `rows`: log-probabilities of its token and of the `width - 1` likeliest.

    logits: [num_rows, vocab_size] float32, raw.
    """
    scores: list[Scores] = []
    for part in pieces(rows, logits):
        end = len(scores) + len(part)
        chosen, asked = tokens[len(scores) : end], widths[len(scores) : end]
        scores += _score(_rows(logits, part), chosen, asked)
    return scores


def _score(logits: Tensor, tokens: Sequence[int], widths: Sequence[int]) -> list[Scores]:
    most = min(max(widths) - 1, logits.shape[1])
    own_id = torch.tensor(tokens, device=logits.device).unsqueeze(1)
    own = logits.gather(1, own_id)
    ranks = (logits > own).sum(dim=-1, dtype=torch.int32) + 1
    likeliest, ids = logits.topk(most, dim=-1)
    logprobs = torch.cat([own, likeliest], dim=1) - logits.logsumexp(dim=-1, keepdim=True)
    all_ids = torch.cat([own_id, ids], dim=1).to(torch.int32).cpu().numpy()
    all_logprobs, all_ranks = logprobs.cpu().numpy(), ranks.cpu().numpy()
    return [
        Scores(
            width=min(width, most + 1),
            token_ids=all_ids[row, :width].tobytes(),
            logprobs=all_logprobs[row, :width].tobytes(),
            ranks=all_ranks[row : row + 1].tobytes(),
        )
        for row, width in enumerate(widths)
    ]


def score_labels(logits: Tensor, token_ids: Sequence[int]) -> Scores:
    """Log-probabilities of `token_ids`, all of them in the vocabulary; ranks are left out.

    logits: [vocab_size] float32, raw.
    """
    ids = torch.tensor(token_ids, device=logits.device)
    logprobs = (logits[ids] - logits.logsumexp(dim=-1)).cpu().numpy()
    ids_32 = np.array(token_ids, dtype=np.int32)
    return Scores(len(token_ids), ids_32.tobytes(), logprobs.tobytes(), b"")


def joined(parts: Sequence[Scores]) -> Scores:
    """Scores of successive tokens as one; all have the same width."""
    return Scores(
        width=parts[0].width,
        token_ids=b"".join(part.token_ids for part in parts),
        logprobs=b"".join(part.logprobs for part in parts),
        ranks=b"".join(part.ranks for part in parts),
    )
