"""The runtime configurations that pods must be sent. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sluice_core.contract import RuntimePatch
from sluice_core.contract import Slo as WireSlo

from ..children.runtime import DecidedRuntime
from ..cluster.observed import Pod
from ..spec.service import Spec
from .observed import Observed, scrape_of


@dataclass(frozen=True, slots=True)
class PodPatch:
    """A PATCH of one pod's runtime configuration."""

    pod: Pod
    patch: RuntimePatch


def patches_of(spec: Spec, observed: Observed, runtime: DecidedRuntime) -> Iterator[PodPatch]:
    """Patches for every pod that is not as it should be: late, new, or with older targets."""
    if runtime.cap is None:
        return
    slo = slo_of(spec)
    for pod in observed.pods:
        config = scrape_of(observed, pod).config
        if config is None or pod.terminating:
            continue
        wanted: dict[str, Any] = {
            "epoch": runtime.epoch,
            "cap": min(runtime.cap, config.ceiling),
            "slo": slo,
            "overload": spec.slo.told_overload,
            "scheduling_policy": spec.scheduling_policy,
        }
        if config.hold_share is not None:
            wanted["hold_share"] = spec.slo.hold_share
        if any(getattr(config, name) != value for name, value in wanted.items()):
            yield PodPatch(pod, RuntimePatch(**wanted))


def slo_of(spec: Spec) -> WireSlo:
    return WireSlo(spec.slo.ttft_ms, spec.slo.itl_ms, spec.slo.e2e_ms)
