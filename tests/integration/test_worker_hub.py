"""A real worker that fetches its model: what its ports say meanwhile, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from integration.worker_process import Worker, command, listening
from sluice_cluster.shell import tail, wait_until
from unit.worker.api.tiny import write_checkpoint
from unit.worker.hub.hub_server import COMMIT, REPO, Hub, files_of, running_hub, safetensors

ROOT = Path(__file__).parents[2]
WEIGHTS = "model.safetensors"


def _environment(hub: Hub, directory: Path) -> dict[str, str]:
    own = {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(directory / "cache")}
    return {**os.environ, "OMP_NUM_THREADS": "1", "NO_PROXY": "127.0.0.1", **own}


@contextmanager
def fetching_worker(hub: Hub, directory: Path, *flags: str) -> Iterator[Worker]:
    """A worker of the hub's model, in a process of its own."""
    log = directory / "worker.log"
    line = command(f"hf://{REPO}", *flags, load_format="auto")
    with log.open("wb") as output:
        process = subprocess.Popen(line, stderr=output, env=_environment(hub, directory))
    try:
        yield listening(process, log)
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def demo() -> Iterator[Hub]:
    """The demo model, on a hub."""
    wanted = {"config.json", "tokenizer.json", "generation_config.json", WEIGHTS}
    files = {n: c for n, c in files_of(ROOT / "examples/model").items() if n in wanted}
    with running_hub(Hub(files)) as hub:
        yield hub


def _until(worker: Worker, what: str, holds: Callable[[], bool]) -> None:
    """Wait for `what`, as long as the worker lives."""

    def holds_alive() -> bool:
        assert worker.process.poll() is None, worker.log.read_text()
        return holds()

    wait_until(what, holds_alive, 60.0, why_not=lambda: tail(worker.log))


def _percent(worker: Worker) -> int:
    """How far it says that it is."""
    said = worker.until("/readyz", 503).json()
    assert said["reason"] == f"downloading {said['percent']} %"
    return int(said["percent"])


def _is_said_alive(worker: Worker, percent: int) -> bool:
    """Whether the probe of its life says so much of the model as well."""
    answer = httpx.get(worker.url + "/healthz")
    assert answer.status_code == 200
    return bool(answer.json()["reason"] == f"downloading {percent} %")


def test_a_pod_is_alive_says_its_percent_then_serves_what_it_fetched(
    demo: Hub, tmp_path: Path
) -> None:
    demo.gate.clear()
    with fetching_worker(demo, tmp_path) as worker:
        _until(worker, "the first half", lambda: _percent(worker) >= 40)
        _until(worker, "the same on both probes", lambda: _is_said_alive(worker, _percent(worker)))
        assert _percent(worker) <= 50
        assert httpx.get(worker.url + "/health").status_code == 503
        refused = httpx.post(worker.url + "/v1/completions", json={"prompt": "a"})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "30")
        assert refused.json()["error"]["type"] == "ServiceUnavailableError"
        assert httpx.get(worker.admin_url + "/v1/evidence").status_code == 503
        demo.gate.set()
        worker.until("/readyz", 200)
        body = {"prompt": "import ", "max_tokens": 4, "ignore_eos": True}
        answer = httpx.post(worker.url + "/v1/completions", json=body, timeout=60)
        assert answer.json()["usage"]["completion_tokens"] == 4
        lines = [event for event in worker.events() if event["event"] == "downloading"]
        assert lines[-1]["percent"] == 100
        assert lines[-1]["bytes"] == lines[-1]["total_bytes"] == len(demo.files[WEIGHTS])


def test_a_pod_that_leaves_while_it_fetches_keeps_what_has_come(demo: Hub, tmp_path: Path) -> None:
    demo.gate.clear()
    with fetching_worker(demo, tmp_path) as worker:
        _until(worker, "the first bytes", lambda: _percent(worker) > 0)
        worker.process.send_signal(signal.SIGTERM)
        assert httpx.get(worker.url + "/healthz").status_code == 200  # and it has seen the signal
        demo.gate.set()
        assert worker.process.wait(15) == 0
        assert "Traceback" not in worker.log.read_text()
    kept = next((tmp_path / "cache").rglob("*.incomplete")).stat().st_size
    assert 0 < kept < len(demo.files[WEIGHTS])


def test_a_pod_that_leaves_while_the_hub_is_asked_does_not_serve_what_it_kept(
    demo: Hub, tmp_path: Path
) -> None:
    with fetching_worker(demo, tmp_path) as worker:
        worker.until("/readyz", 200)
        worker.terminate()
        assert worker.process.wait(15) == 0
    demo.seen.clear()
    demo.listing_gate.clear()
    with fetching_worker(demo, tmp_path) as worker:
        _until(worker, "a question for the listing", lambda: bool(demo.seen))
        worker.terminate()
        assert httpx.get(worker.url + "/healthz").status_code == 200  # and it has seen the signal
        demo.listing_gate.set()
        assert worker.process.wait(15) == 0
        assert "ready" not in {event["event"] for event in worker.events()}


def _last_words(hub: Hub, tmp_path: Path, *flags: str) -> str:
    """The last line of a worker that cannot start, which Kubernetes shows as the reason."""
    line, environment = command(f"hf://{REPO}", *flags), _environment(hub, tmp_path)
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    return done.stderr.splitlines()[-1]


def test_what_cannot_be_fetched_ends_the_worker_with_its_sentence(tmp_path: Path) -> None:
    files = files_of(write_checkpoint(tmp_path / "model"))
    with running_hub(Hub({**files, WEIGHTS: safetensors({}, 10)}, gated=True)) as hub:
        assert _last_words(hub, tmp_path).startswith(f"sluice-worker: {REPO} is gated: accept")
        hub.gated = False
        hub.files["config.json"] = json.dumps(
            {**json.loads(files["config.json"]), "quantization_config": {"bits": 4}}
        ).encode()
        words = _last_words(hub, tmp_path, "--revision", COMMIT)
        assert words == "sluice-worker: config.json: quantization_config is not supported."
