"""`sluice bench` against a server of others: no admin port, no metrics, some are refused."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from threading import Lock, Thread

import pytest
from sluice import bench
from sluice.__main__ import main

NUMBERS, LOCK = count(), Lock()


class Foreign(BaseHTTPRequestHandler):
    """Lists one model; streams as many chunks as are asked for; refuses every fourth request."""

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._answer(200, json.dumps({"data": [{"id": "theirs"}]}).encode())
        else:
            self._answer(404, b"")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with LOCK:
            number = next(NUMBERS)
        if number % 4 == 3:
            self._answer(429, b"")
            return
        chunk = b'data: {"choices":[{"text":"a"}]}\n\n'
        self._answer(200, chunk * body["max_tokens"] + b"data: [DONE]\n\n")

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Tests are quiet."""


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Foreign) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_refused_requests_count_and_what_is_unknown_is_not_made_up(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--wave", "8", "--waves", "1", "--silence", "0", "--prompt-tokens", "4", "8"]
    out = ["--slo", "ttft=1m", "--client-side", "--out", str(tmp_path)]
    assert main(["bench", "--url", url, "--max-num-seqs", "1,4", *small, *out]) == 0
    found = json.loads((tmp_path / "bench.json").read_text())
    assert found["model"] == "theirs"
    for point in found["points"]:
        assert (point["requests"], point["failed"], point["holds"]) == (8, 2, False)
        assert point["failures"] == {"HTTP 429": 2}
        assert point["ttft_ms"]["p50"] is not None
        assert (point["ttft_ms"]["p99"], point["effective_batch"]) == (None, None)
    said = capsys.readouterr().out
    assert "none of the caps" in said
    assert "what a step costs here is not known" in said


def test_a_wave_under_way_tells_how_far_it_is_beside_the_output(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = Foreign.do_POST

    def answer_late(self: Foreign) -> None:
        time.sleep(0.2)
        answer(self)

    monkeypatch.setattr(Foreign, "do_POST", answer_late)
    monkeypatch.setattr(bench, "SAY_EVERY_SECONDS", 0.05)
    small = ["--wave", "8", "--waves", "1", "--silence", "0", "--prompt-tokens", "4", "8"]
    asked = ["--max-num-seqs", "2", "--client-side", "--out", str(tmp_path)]
    assert main(["bench", "--url", url, *asked, *small]) == 0
    told = capsys.readouterr()
    lines = [line for line in told.err.splitlines() if line.startswith("round 1 of 1, cap   2: ")]
    assert any(" of 8 answered" in line and " failed after " in line for line in lines), told.err
    assert "warm-up: 0 of 4 answered after" in told.err
    assert " after " not in told.out


def test_a_wave_that_is_done_soon_says_nothing_meanwhile(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--wave", "2", "--waves", "1", "--silence", "0", "--max-num-seqs", "2"]
    assert main(["bench", "--url", url, "--client-side", "--out", str(tmp_path), *small]) == 0
    assert capsys.readouterr().err == ""


def test_a_url_without_a_model_list_is_one_sentence(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--url", f"{url}/elsewhere", "--out", str(tmp_path)]) == 2
    assert "/elsewhere/v1/models lists no model" in capsys.readouterr().err


def test_a_server_that_answers_nothing_is_not_measured(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Foreign, "do_POST", lambda self: self._answer(404, b"no such model"))
        assert main(["bench", "--url", url, "--out", str(tmp_path / "out"), "--scale", "0.01"]) == 2
    assert "no request is answered in full: HTTP 404: no such model" in capsys.readouterr().err


def test_a_file_where_the_results_shall_go_is_told_before_any_request(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").write_text("")
    assert main(["bench", "--url", url, "--out", str(tmp_path / "out")]) == 2
    assert "out" in capsys.readouterr().err
