"""All that one pass knows of an object, and what its pods report. Pure."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

from sluice_core.contract import RuntimeConfig

from ..children import manifests
from ..children.runtime import DecidedRuntime
from ..cluster.observed import Object, Pod, Trouble
from ..model.fit import Fit
from ..pods.scrape import Scrape
from ..reasons import Reason
from ..tuner import (
    PodView,
)


@dataclass(frozen=True, slots=True)
class Observed:
    """All that one pass knows. `live`: children by kind. `scrapes`: by pod uid, also of pods that
    are gone.

    `runtime`: from the ConfigMap, or the newer memory of this process; None at the start.
    `accepted`: by kind, `drift.acceptance` of our last write. `deleted`: kinds whose last child
    somebody deleted. `unsaved_s`: seconds since the runtime was last persisted. `failed`: why the
    newest failed pod failed. `keys_problem`: why the Secret of the API's keys is unusable, "" if it
    is usable. `former`: the pods of the last pass, by uid. `rival`: who keeps setting the
    workload's replicas, "" for nobody.
    """

    live: Mapping[str, Object]
    pods: tuple[Pod, ...]
    scrapes: Mapping[str, Scrape]
    fit: Fit
    token: str
    previous: Object
    runtime: DecidedRuntime | None
    accepted: Mapping[str, str]
    deleted: Collection[str]
    unsaved_s: float
    failed: Trouble | None = None
    keys_problem: str = ""
    former: Mapping[str, Pod] = field(default_factory=dict)
    rival: str = ""

    @property
    def workload(self) -> Object | None:
        """What makes the pods, as it is live."""
        return next((self.live[kind] for kind in manifests.WORKLOADS if kind in self.live), None)


def scrape_of(observed: Observed, pod: Pod) -> Scrape:
    return observed.scrapes.get(pod.uid, Scrape())


def with_reports(observed: Observed) -> Iterator[Pod]:
    """The pods; those that run but are not ready include what they report about that."""
    for pod in observed.pods:
        scrape = scrape_of(observed, pod)
        hung = scrape.config.hung if scrape.config and not scrape.problem else None
        if hung and (pod.trouble is None or pod.trouble.reason == Reason.NOT_READY):
            yield replace(pod, trouble=Trouble(Reason.HUNG, hung.reason, passes=True))
        elif pod.trouble and pod.trouble.reason == Reason.NOT_READY and scrape.problem:
            said = f"{pod.trouble.message}; its admin port: {scrape.problem}"
            yield replace(pod, trouble=replace(pod.trouble, message=said))
        else:
            yield pod


def serving(observed: Observed) -> list[Scrape]:
    return [scrape_of(observed, pod) for pod in observed.pods if pod.serving]


def configs(observed: Observed) -> list[RuntimeConfig]:
    return [scrape.config for scrape in serving(observed) if scrape.config is not None]


def problems(observed: Observed) -> Iterator[str]:
    for pod in sorted(observed.pods, key=lambda pod: pod.name):
        problem = scrape_of(observed, pod).problem
        if pod.serving and problem:
            yield f"pod {pod.name}: {problem}"


def pod_view(observed: Observed, pod: Pod) -> PodView:
    scrape = scrape_of(observed, pod)
    return PodView(
        name=pod.name,
        ready=pod.ready,
        terminating=pod.terminating,
        evidence=scrape.evidence,
        config=scrape.config,
        started_s=pod.started_s or None,
        seen_s=scrape.seen_s,
    )


def gone_views(observed: Observed) -> Iterator[PodView]:
    """Pods that are gone: what they served belongs to the promise."""
    there = {pod.uid for pod in observed.pods}
    for uid, scrape in observed.scrapes.items():
        if uid not in there:
            yield PodView(uid, False, True, scrape.evidence, None, None, scrape.seen_s)


def commit_of(observed: Observed) -> str:
    """The commit that pods are pinned to, or will be before there are any. Pods made while the hub
    was away have none, and fetch the revision as it is when they start."""
    if live := observed.workload:
        return manifests.pinned_commit(live)
    return observed.fit.checkpoint.commit if observed.fit.checkpoint else ""
