"""The short form of `make rolls`."""

import pytest
from e2e.kit import Cluster
from e2e.rolls import run

pytestmark = [pytest.mark.timeout(420)]


def test_no_request_is_lost_to_a_rollout_or_a_scale_in(cluster: Cluster) -> None:
    report = run(cluster, 1)
    assert [step.kind for step in report.steps] == ["roll", "scale-in"]
    assert report.num_sent > 100
    assert report.num_lost == 0, str(report)
