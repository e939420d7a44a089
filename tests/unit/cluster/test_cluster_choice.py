"""Which cluster is used, and what is said where none is possible."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sluice_cluster.choose import Found, choose

BARE = Found(
    kubeconfig=None,
    docker_answers=False,
    wants_kind=False,
    is_root=True,
    is_linux=True,
    has_apt=True,
)


def test_the_users_own_cluster_comes_before_everything() -> None:
    choice = choose(replace(BARE, kubeconfig="/home/me/config", docker_answers=True))
    assert choice.kind == "existing"
    assert "/home/me/config" in choice.reason


def test_a_docker_engine_means_kind() -> None:
    assert choose(replace(BARE, docker_answers=True)).kind == "kind"


def test_kind_that_was_asked_for_is_not_replaced_by_a_local_cluster() -> None:
    choice = choose(replace(BARE, wants_kind=True))
    assert choice.kind == "none"
    assert "no Docker engine answers" in choice.reason


def test_a_bare_machine_with_root_gets_a_local_cluster() -> None:
    assert choose(BARE).kind == "local"


@pytest.mark.parametrize(
    ("found", "lacks"),
    [
        (replace(BARE, is_root=False), "needs root"),
        (replace(BARE, is_linux=False, is_root=False), "needs Linux, root"),
        (replace(BARE, has_apt=False), "needs Debian's or Ubuntu's apt-get"),
    ],
)
def test_where_nothing_is_possible_one_sentence_names_what_is_missing(
    found: Found, lacks: str
) -> None:
    choice = choose(found)
    assert choice.kind == "none"
    assert choice.reason.endswith(lacks)
    assert "SLUICE_KUBECONFIG" in choice.reason
