"""`sluice serve`: the worker's command line that it makes, and the sentences that it says."""

from __future__ import annotations

import json
import logging
import shlex
from pathlib import Path
from typing import Any

import pytest
from sluice import serve
from sluice.__main__ import main
from sluice_frontend.config import API_KEY
from sluice_worker.base.config import parse
from unit.worker.api.tiny import write_checkpoint


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model")


def narration(model: Path, *flags: str) -> serve.Narration:
    given = serve.arguments(str(model), ["--load-format=dummy", *flags])
    return serve.Narration(parse(given, {}))


def said(told: serve.Narration, event: str, **fields: Any) -> str:
    record = logging.makeLogRecord({"msg": event, "levelname": "INFO", **fields})
    return told.format(record)


def test_a_machine_without_a_gpu_keeps_half_of_its_memory_unless_told_otherwise(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "GPU_FILES", (model / "no-such-device",))
    more = ["--load-format=dummy", "--max-num-seqs", "1"]
    assert parse(serve.arguments(str(model), more), {}).engine.memory_utilization == 0.5
    more.append("--gpu-memory-utilization=0.8")
    assert parse(serve.arguments(str(model), more), {}).engine.memory_utilization == 0.8
    monkeypatch.setattr(serve, "GPU_FILES", (model / "config.json",))
    given = serve.arguments(str(model), ["--load-format=dummy"])
    assert parse(given, {}).engine.memory_utilization == 0.9


def test_the_curl_line_asks_the_model_that_is_served_with_the_key_that_it_wants(
    model: Path, tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text("secret-canary\n")
    keys = f"--api-key-file={tmp_path / 'keys'}"
    share = "--gpu-memory-utilization=0.75"
    told = narration(model, "--served-model-name=it's", keys, share)
    assert "on port 8000 of all addresses" in said(
        told, "listening", port=8000, admin_port=8001, model="it's"
    )
    memory = dict.fromkeys(
        ("weights_bytes", "activation_bytes", "reserve_bytes", "kv_cache_bytes", "total_bytes"),
        2**30,
    )
    facts = {"kv_tokens": 4096, "cap": 1, "max_model_len": 512, "task": "generate"}
    ready = said(told, "ready", memory=memory, **facts)
    assert "at most 1 requests at once" in ready
    assert "4,096 tokens; of 0.75 GiB, 0.75 of the 1.00 that there are." in ready
    words = shlex.split(ready.splitlines()[-1])
    assert words[:2] == ["curl", "http://localhost:8000/v1/completions"]
    assert json.loads(words[-1])["model"] == "it's"
    assert any(word.startswith("Authorization: Bearer $(head") for word in words)
    assert "secret-canary" not in ready


def test_the_curl_line_names_the_variable_that_holds_the_key_and_not_the_key(model: Path) -> None:
    given = serve.arguments(str(model), ["--load-format=dummy"])
    told = serve.Narration(parse(given, {API_KEY: "secret-canary"}))
    memory = {"weights_bytes": 0, "activation_bytes": 0, "reserve_bytes": 0}
    memory |= {"kv_cache_bytes": 0, "total_bytes": 0}
    facts = {"memory": memory, "kv_tokens": 9, "cap": 1, "max_model_len": 9}
    ready = said(told, "ready", **facts, task="generate")
    assert '-H "Authorization: Bearer $VLLM_API_KEY"' in ready
    assert "secret-canary" not in ready
    assert "curl /v1/embeddings -H" in said(told, "ready", **facts, task="embed")
    assert "curl /classify -H" in said(told, "ready", **facts, task="classify")


def test_an_address_of_ipv6_is_a_url_that_can_be_asked(model: Path) -> None:
    told = narration(model, "--host=::1")
    listening = said(told, "listening", port=8000, admin_port=8001, model="m")
    assert "on port 8000 of ::1." in listening
    assert "Progress: http://[::1]:8000/readyz" in listening


def test_an_event_without_a_sentence_is_told_with_its_fields(model: Path) -> None:
    assert said(narration(model), "engine died", reason="x") == "Info: engine died (reason=x)"


def test_flags_before_the_model_are_told_their_place(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["serve", "--max-num-seqs", "1", "/nowhere"])
    assert stop.value.code == 2
    assert "--max-num-seqs; flags go after MODEL" in capsys.readouterr().err


def test_what_cannot_be_served_is_one_sentence_and_code_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["serve", "/nowhere", "--max-num-seqs", "1"]) == 2
    assert capsys.readouterr().err.startswith("sluice serve: --model /nowhere is not a directory")
