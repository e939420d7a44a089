"""`sluice serve` as a process: its curl line works, and one user pays for nobody else."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from sluice_cluster.shell import tail, wait_until

MODEL = Path(__file__).parents[2] / "examples/model"
NUM_PAIRS = 16
NUM_TOKENS = 32


@dataclass(frozen=True)
class Served:
    """A running `sluice serve`, and what it has said."""

    process: subprocess.Popen[bytes]
    log: Path

    def curl(self) -> list[str]:
        """The words of its curl line, once it is ready."""
        pattern = re.compile(r"^  (curl .*)$", re.MULTILINE)

        def found() -> re.Match[str] | None:
            assert self.process.poll() is None, self.log.read_text()
            return pattern.search(self.log.read_text())

        wait_until("the curl line", lambda: bool(found()), 120.0, why_not=lambda: tail(self.log))
        line = found()
        assert line is not None
        return shlex.split(line[1])


@contextmanager
def serving(folder: Path, *flags: str) -> Iterator[Served]:
    folder.mkdir()
    log = folder / "serve.log"
    line = [sys.executable, "-m", "sluice", "serve", str(MODEL), "--port=0", "--admin-port=0"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*line, "--host=127.0.0.1", "--device=cpu", *flags],
            stderr=output,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    try:
        yield Served(process, log)
    finally:
        process.terminate()
        process.wait(timeout=30)


def timed(words: list[str]) -> tuple[float, float]:
    """Seconds to the first token, and to the last one, of one stream."""
    body = {**json.loads(words[-1]), "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True}
    at_s = [time.monotonic()]
    with httpx.stream("POST", words[1], json=body, timeout=60) as stream:
        assert stream.status_code == 200
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                at_s.append(time.monotonic())
    assert len(at_s) >= NUM_TOKENS // 2
    return at_s[1] - at_s[0], at_s[-1] - at_s[0]


def test_its_curl_line_works_and_one_user_waits_no_longer_than_with_the_default_flags(
    tmp_path: Path,
) -> None:
    with ExitStack() as stack:
        alone = stack.enter_context(serving(tmp_path / "alone", "--max-num-seqs=1"))
        default = stack.enter_context(serving(tmp_path / "default"))
        line, rival = alone.curl(), default.curl()
        answer = httpx.post(line[1], json=json.loads(line[-1]), timeout=60).json()
        assert answer["usage"]["completion_tokens"] > 0
        assert "Ready: at most 1 requests at once" in alone.log.read_text()
        pairs = [(timed(line), timed(rival)) for _ in range(NUM_PAIRS)][2:]
    # Other work on this machine only adds to either, so the least of each is without it. (It may
    # shorten the gaps: what waited for a reader that was stopped comes all at once.)
    ttft, whole = (
        min(one[i] for one, _ in pairs) / min(other[i] for _, other in pairs) for i in (0, 1)
    )
    print(f"--max-num-seqs 1 against the default: first token x {ttft:.2f}, all x {whole:.2f}")
    assert ttft <= 1.5
    assert whole <= 1.5
