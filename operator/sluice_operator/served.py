"""What `helm test` runs, without any right: it reads the operator's metrics, and asks one object.

python -m sluice_operator.served HOST:PORT     the operator's metrics
"""

import sys

import httpx
from prometheus_client.parser import text_string_to_metric_families
from sluice_core.words import in_url

Labels = dict[str, str]
_TIMEOUT_S = 10.0


def labels_of(page: str, name: str) -> list[Labels]:
    """The labels of each sample of a family."""
    families = text_string_to_metric_families(page)
    return [s.labels for family in families if family.name == name for s in family.samples]


def first_served(page: str) -> Labels | None:
    """Labels of the first object whose pods serve; None if none's do."""
    wanted = {"kind": "InferenceService", "type": "Ready", "status": "True", "reason": "Serving"}
    serving = {
        (labels["namespace"], labels["name"])
        for labels in labels_of(page, "sluice_condition")
        if wanted.items() <= labels.items()
    }
    found = [
        labels
        for labels in labels_of(page, "sluice_service_info")
        if (labels["namespace"], labels["name"]) in serving and labels["cluster_ip"]
    ]
    return min(found, key=lambda labels: (labels["namespace"], labels["name"]), default=None)


def check(address: str) -> str:
    """A sentence on what answers; raises httpx.HTTPError if it does not."""
    with httpx.Client(timeout=_TIMEOUT_S, trust_env=False) as client:
        page = client.get(f"http://{address}/metrics").raise_for_status().text
        found = first_served(page)
        if found is None:
            return "the operator answers, and no InferenceService is served"
        client.get(f"http://{in_url(found['cluster_ip'])}/health").raise_for_status()
        return f"the InferenceService {found['name']} in {found['namespace']} answers"


if __name__ == "__main__":
    try:
        print(check(sys.argv[1]))
    except httpx.HTTPError as e:
        sys.exit(f"helm test: {e.request.url} does not answer well: {e}")
