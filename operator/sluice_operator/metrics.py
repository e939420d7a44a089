"""The operator's own metrics, in their own registry. No label grows with traffic or epochs."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


class Metrics:
    """Every series that the operator exposes on its metrics port; two operators share nothing."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.passes = Counter(
            "sluice_operator_passes", "Passes over objects.", ["result"], registry=registry
        )
        self.pass_seconds = Histogram(
            "sluice_operator_pass_seconds", "Duration of one pass.", registry=registry
        )
        self.api_requests = Counter(
            "sluice_operator_api_requests",
            "Requests to the API server, watches aside.",
            ["verb", "kind", "code"],
            registry=registry,
        )
        self.decisions = Counter(
            "sluice_operator_decisions",
            "Changes of a cap, its epoch or replicas, by reason.",
            ["reason"],
            registry=registry,
        )
        self.scrape_failures = Counter(
            "sluice_operator_scrape_failures",
            "Pods whose admin port did not answer as the contract says.",
            ["reason"],
            registry=registry,
        )
        self.objects = Gauge(
            "sluice_operator_objects", "Objects that are looked after.", registry=registry
        )
