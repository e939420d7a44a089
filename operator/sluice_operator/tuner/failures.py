"""Reads how many requests the engines failed. They are no evidence of speed."""

from collections import Counter
from collections.abc import Iterable, Sequence

from sluice_core.contract import Tick

from . import constants as k
from .evidence import Accepts, HeardPod
from .tick_sums import TickSlice, TickWindow
from .types import Failures, Targets


def read_failures(
    window: TickWindow, pods: Sequence[HeardPod], since_s: float, targets: Targets
) -> Failures:
    """Failures in `window`, the ticks of `pods` since `since_s`."""
    finished, _ = window.total(_ended)
    by = window.joined(_sum, _kinds)
    return Failures(
        ended=finished + sum(by.values()),
        by=by,
        allowed_share=min(k.FAILED_SHARE, targets.allowed_share),
        pod=_only_pod(pods, since_s) if by and len(pods) > 1 else "",
        is_all=_are_all(window),
    )


def _ended(tick: Tick) -> tuple[int, int]:
    return tick.finished, sum(tick.failed.values())


def _kinds(parts: Sequence[TickSlice]) -> dict[str, int]:
    return _sum(tick.failed for part in parts for tick in part)


def _sum(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    total = Counter[str]()
    for counted in counts:
        total.update(counted)
    return dict(+total)


def _only_pod(pods: Sequence[HeardPod], since_s: float) -> str:
    """The only one of `pods` that has failed any, or ""."""
    accepts = Accepts(since_s)
    failing = [pod.view.name for pod in pods if any(tick.failed for tick in accepts.of(pod))]
    return failing[0] if len(failing) == 1 else ""


def _are_all(window: TickWindow) -> bool:
    """True if enough failed since one finished, which is a minute ago or not in the window."""
    num_failed = 0
    for age, part in enumerate(reversed(window.parts)):
        if any(tick.finished for tick in part):
            return age >= k.ALL_FAILED_TICKS and num_failed >= k.ALL_FAILED
        num_failed += sum(_ended(tick)[1] for tick in part)
    return num_failed >= k.ALL_FAILED
