"""Claims on which namespaces are watched, by what the API server says of each."""

from __future__ import annotations

import pytest
from sluice_operator.cluster.client import Cluster, ClusterError, Ref
from sluice_operator.loop import namespaces
from sluice_operator.loop.namespaces import Namespaces, await_change, look

WANTED = ("one", "two")


class Api(Cluster):
    """Says what was laid down of each namespace, then that it may be listed."""

    def __init__(self, **said: list[str | ClusterError]) -> None:
        self.said = said

    async def refusal(self, ref: Ref) -> str:
        said = self.said.get(ref.namespace)
        answer = said.pop(0) if said else ""
        if isinstance(answer, ClusterError):
            raise answer
        return answer


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces, "_BETWEEN_TRIES_S", 0.0)


async def test_one_that_stays_forbidden_is_left_out_and_said_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen = await look(Api(two=["forbidden"] * 3), WANTED, Namespaces(WANTED))
    assert seen == Namespaces(("one",), {"two": "forbidden"})
    assert caplog.messages == ["namespace two is left out, and looked at again: forbidden"]


async def test_one_refusal_alone_is_none() -> None:
    assert await look(Api(two=["forbidden"]), WANTED, Namespaces(WANTED)) == Namespaces(WANTED)


async def test_without_any_kopf_watches_nowhere(caplog: pytest.LogCaptureFixture) -> None:
    seen = await look(Api(one=["no"] * 3, two=["no"] * 3), WANTED, Namespaces(WANTED))
    assert seen.served == ()
    assert seen.patterns == ("!*",)
    assert caplog.messages[-1] == "no namespace can be watched: waiting for one"


@pytest.mark.parametrize("before", [Namespaces(WANTED), Namespaces(("one",), {"two": "gone"})])
async def test_an_api_server_that_is_away_changes_nothing(before: Namespaces) -> None:
    away = ClusterError(0, "Unreachable", "away")
    assert await look(Api(one=[away], two=[away]), WANTED, before) == before


async def test_a_change_is_waited_for() -> None:
    before = Namespaces(("one",), {"two": "gone"})
    api = Api(two=["gone", "gone"])
    assert await await_change(api, WANTED, before, 0.0) == Namespaces(WANTED)
    assert api.said["two"] == []
