"""The operator's own metrics, in a registry of their own. No label grows with traffic or epochs."""

from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


@dataclass(frozen=True, slots=True)
class Metrics:
    """Every series that the operator exposes on its metrics port."""

    registry: CollectorRegistry
    passes: Counter
    pass_seconds: Histogram
    api_requests: Counter
    decisions: Counter
    scrape_failures: Counter
    objects: Gauge


def create_metrics() -> Metrics:
    """A fresh set, so that two operators of one test process share nothing."""
    registry = CollectorRegistry()
    return Metrics(
        registry=registry,
        passes=Counter(
            "sluice_operator_passes", "Passes over objects.", ["result"], registry=registry
        ),
        pass_seconds=Histogram(
            "sluice_operator_pass_seconds", "Duration of one pass.", registry=registry
        ),
        api_requests=Counter(
            "sluice_operator_api_requests",
            "Requests to the API server, watches aside.",
            ["verb", "kind", "code"],
            registry=registry,
        ),
        decisions=Counter(
            "sluice_operator_decisions",
            "Changes of a cap, its epoch or replicas, by reason.",
            ["reason"],
            registry=registry,
        ),
        scrape_failures=Counter(
            "sluice_operator_scrape_failures",
            "Pods whose admin port did not answer as the contract says.",
            ["reason"],
            registry=registry,
        ),
        objects=Gauge(
            "sluice_operator_objects", "Objects that are looked after.", registry=registry
        ),
    )
