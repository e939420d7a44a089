"""The engines of the conformance suite: SLUICE_ENGINES names them by commas; else our own."""

import os
from collections.abc import Iterator

import pytest
from bench.peers.install import CannotInstall
from bench.peers.launch import CannotStart
from engines.launchers import KINDS, Engine, running_engine
from engines.rig import Rig


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "rig" in metafunc.fixturenames:
        names = os.environ.get("SLUICE_ENGINES", "sluice").split(",")
        metafunc.parametrize("engine", names, indirect=True, scope="module")


@pytest.fixture(scope="module")
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """An engine for all lines of the suite; restarted by those that end it."""
    try:
        with running_engine(KINDS[request.param], tmp_path_factory.mktemp("engine")) as engine:
            yield engine
    except (CannotInstall, CannotStart) as error:
        pytest.fail(f"cannot be tried: {error}", pytrace=False)


@pytest.fixture(scope="module")
def rig(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with Rig(engine, tmp_path_factory.mktemp("gates")) as rig:
        yield rig
