"""`sluice serve --engine`: the engine and its gate in one terminal, and both end together.

The engine is a worker of ours under the name of vLLM, whose flags it takes.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from engines.served import Served, serving
from httpx import ConnectError, get
from sluice.__main__ import main
from sluice.measure.endpoint import LIVE
from sluice.processes import free_ports

MODEL = Path(__file__).parents[2] / "examples/model"
pytestmark = pytest.mark.skipif(find_spec("sluice_gate") is None, reason="there is no gate")
STAND_IN = f"""#!/bin/sh
shift; model=$1; shift
for word; do shift; case $word in --scheduler-cls=*) ;; *) set -- "$@" "$word";; esac; done
exec {sys.executable} -m sluice_worker --model "$model" --admin-port=0 --device=cpu "$@"
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    (folder / "vllm").write_text(STAND_IN)
    (folder / "vllm").chmod(0o755)
    environ = {"PATH": f"{folder}:{os.environ['PATH']}"}
    ports = free_ports(2)
    with serving(folder, "vllm", str(MODEL), ports, ["--max-num-seqs=4"], environ=environ) as one:
        yield one


def test_the_engine_answers_through_the_gate_which_knows_its_capacity(served: Served) -> None:
    answer = served.answers()
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 4
    assert (served.config()["ceiling"], served.config()["chunk_is"]) == (4, "fixed")


def test_bench_changes_the_gates_cap_live_and_puts_it_back(served: Served, tmp_path: Path) -> None:
    before = served.config()
    line = [
        "bench", "--url", served.url, "--admin-url", served.admin, "--max-num-seqs", "1,2,4",
        "--wave", "4", "--waves", "1", "--silence", "0", "--prompt-tokens", "8", "16",
        "--max-tokens", "4", "8", "--vocab-size", "300", "--out", str(tmp_path),
    ]  # fmt: skip
    assert main(line) == 0
    found = json.loads((tmp_path / "bench.json").read_text())
    assert found["caps_are"] == LIVE
    assert [(p["cap"], p["failed"]) for p in found["points"]] == [(1, 0), (2, 0), (4, 0)]
    after = served.config()
    assert after["cap"] == before["cap"]
    assert after["epoch"] >= before["epoch"] + 4


def test_load_counts_what_the_gate_answers(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    line = [
        "load", "--url", served.url, "--model", "m", "--phases", "one:closed:2:1",
        "--prompt-tokens", "8", "16", "--max-tokens", "4", "8", "--words",
    ]  # fmt: skip
    assert main(line) == 0
    assert '"results": {"ok": ' in capsys.readouterr().out


def test_one_ctrl_c_ends_the_gate_and_then_the_engine(served: Served) -> None:
    upstream = served.log.read_text().split("--port=")[1].split()[0]
    assert get(f"http://127.0.0.1:{upstream}/health").status_code == 200
    served.process.send_signal(signal.SIGINT)
    assert served.process.wait(60) == 0
    for port in (served.url.rpartition(":")[2], upstream):
        with pytest.raises(ConnectError):
            get(f"http://127.0.0.1:{port}/health")
