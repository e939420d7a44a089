"""`sluice serve --engine llamacpp` with the real server of `bench.peers`."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
from bench.peers.checkpoint import CACHE
from engines.served import serving
from integration.apiserver import free_ports

PROGRAM = CACHE / "llama.cpp/build/bin/llama-server"
MODEL = CACHE / "models/88M.gguf"

pytestmark = pytest.mark.skipif(
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
