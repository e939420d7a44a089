"""`sluice batch` with real engines: one that it starts, and one that runs; and kills at any time.

    SLUICE_LONG=1 .venv/bin/python -m pytest -q -s tests/integration/test_batch.py -k killed

kills it 20 times over 10,000 lines.
"""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest
from integration.worker_process import Worker, running_worker
from openai.types.chat import ChatCompletion
from openai.types.completion import Completion
from sluice.__main__ import main
from sluice.batch.target import Target
from sluice.measure.endpoint import named_live
from unit.cli.batch.tiny_api import Asked, Reply, line, results, tiny_api, write_input
from unit.worker.api.tiny import write_checkpoint
from unit.worker.execution.encoder_models import random_model, save_tokenizer

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
NUM_KILLS, NUM_LINES = (20, 10_000) if os.environ.get("SLUICE_LONG") == "1" else (3, 400)
FLAGS = (
    *("--load-format=dummy", "--device=cpu", "--dtype=float32", "--num-gpu-blocks-override=64"),
    *("--max-num-seqs=4", "--max-model-len=256"),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_checkpoint(tmp_path_factory.mktemp("batch") / "model")
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


@pytest.fixture(scope="module")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    directory = tmp_path_factory.mktemp("vectors")
    random_model("Bert").save_pretrained(directory / "model")
    save_tokenizer(directory / "model")
    flags = ("--load-format", "auto", "--max-num-seqs", "8", "--initial-num-seqs", "3")
    with running_worker(directory, *flags, model=directory / "model") as worker:
        yield worker


def command(folder: Path, *flags: str) -> list[str]:
    return ["batch", str(folder / "in"), "-o", str(folder / "out"), *flags]


def of_model(folder: Path, model: Path) -> list[str]:
    return command(folder, "--model", str(model), "--served-model-name=tiny", *FLAGS)


def until(holds: Callable[[], object], limit_s: float = 120.0) -> None:
    end_s = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def is_gone(log: Path) -> bool:
    """True if nobody listens at the port of the engine that wrote `log`."""
    [port] = re.findall(r"http://localhost:(\d+)/readyz", log.read_text())
    try:
        httpx.get(f"http://127.0.0.1:{port}/readyz", timeout=5)
    except httpx.ConnectError:
        return True
    except httpx.TransportError:  # it leaves
        return False
    return False


def write_texts(path: Path, num: int) -> None:
    """Lines of two routes, one of which is over the window."""
    made = []
    for i in range(num):
        said = [{"role": "system", "content": "a"}, {"role": "user", "content": "b" * i}]
        chat = {"model": "tiny", "messages": said, "max_tokens": 4}
        text = {"model": "tiny", "prompt": "c" * (i + 1), "max_tokens": 4, "seed": i}
        made.append(line(f"chat-{i}", "/v1/chat/completions", **chat))
        made.append(line(f"text-{i}", "/v1/completions", **text))
    over = {"model": "tiny", "prompt": [9] * 300, "max_tokens": 4}
    path.write_text(line("over", "/v1/completions", **over) + "".join(made))


def test_an_engine_of_its_own_answers_each_line_and_one_over_the_window_is_an_error_line(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_texts(tmp_path / "in", 20)
    assert main(of_model(tmp_path, model)) == 1
    shown = capfd.readouterr()
    assert shown.out == f"41 of 41 done, 1 failed: {tmp_path / 'out'}.\n"
    found = {each["custom_id"]: each for each in results(tmp_path / "out")}
    assert len(found) == 41
    over = found.pop("over")
    assert (over["error"], over["response"]["status_code"]) == (None, 400)
    assert "256" in over["response"]["body"]["error"]["message"]
    for custom_id, each in found.items():
        kind = ChatCompletion if custom_id.startswith("chat") else Completion
        answer = kind.model_validate(each["response"]["body"])
        assert answer.usage is not None
        assert answer.usage.completion_tokens <= 4
        assert each["response"]["request_id"]
    (tmp_path / "log").write_text(shown.err)
    assert is_gone(tmp_path / "log")


def test_after_kill_9_its_engine_leaves_and_the_same_command_goes_on(
    model: Path, tmp_path: Path
) -> None:
    write_texts(tmp_path / "in", 200)
    out, log = tmp_path / "out", tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "sluice", *of_model(tmp_path, model)], stderr=output
        )
    try:
        until(lambda: out.exists() and out.read_bytes().count(b"\n") >= 20)
    finally:
        process.kill()
        process.wait()
    before = out.read_bytes()
    assert before.count(b"\n") < 401
    until(lambda: is_gone(log))
    assert main(of_model(tmp_path, model)) == 1
    assert out.read_bytes().startswith(before[: before.rindex(b"\n") + 1])
    found = [each["custom_id"] for each in results(out)]
    assert len(found) == len(set(found)) == 401


def test_a_signal_while_the_engine_loads_ends_both(model: Path, tmp_path: Path) -> None:
    write_texts(tmp_path / "in", 2)
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "sluice", *of_model(tmp_path, model)],
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
        )
    try:
        until(lambda: "Progress:" in log.read_text())
        process.terminate()
        said, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert said.startswith(f"0 of 5 done, 0 failed: {tmp_path / 'out'}. It was interrupted;")
    assert is_gone(log)


def test_vectors_of_lines_and_of_a_folder_are_alike(vectors: Worker, tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    texts = {f"{i}.txt": "a " * (i + 1) for i in range(9)}
    made = []
    for name, text in texts.items():
        (tmp_path / "texts" / name).write_text(text)
        made.append(line(name, model="tiny", input=text))
    (tmp_path / "in").write_text("".join(made))
    url = ("--url", vectors.url, "--admin-url", vectors.admin_url)
    assert main(command(tmp_path, *url)) == 0
    of_folder = ["batch", str(tmp_path / "texts"), "-o", str(tmp_path / "others"), *url]
    assert main([*of_folder, "--route", "/v1/embeddings"]) == 0

    def by_id(path: Path) -> dict[str, Any]:
        return {
            each["custom_id"]: each["response"]["body"]["data"][0]["embedding"]
            for each in results(path)
        }

    lines, files = by_id(tmp_path / "out"), by_id(tmp_path / "others")
    assert lines.keys() == files.keys() == texts.keys()
    for name, vector in lines.items():
        assert vector == pytest.approx(files[name], abs=1e-5)


async def test_as_many_are_under_way_as_the_cap_tells_also_when_it_changes(
    vectors: Worker,
) -> None:
    async with aiohttp.ClientSession() as session:
        live = await named_live(session, vectors.admin_url, None)
        target = Target(session, vectors.url, live, None, is_background=False)
        await target.read_cap()
        assert target.limit == 2 * 3
        await live.use(5)
        await target.read_cap()
        assert target.limit == 2 * 5
        behind = Target(session, vectors.url, live, None, is_background=True)
        await behind.read_cap()
        assert behind.limit == 2 * (live.ceiling or 0) > target.limit
        await live.restore()


def test_a_run_that_is_killed_at_any_time_loses_nothing_and_doubles_nothing(
    tmp_path: Path,
) -> None:
    """A server kills its client with an answer under way; what stands in the file is never sent
    again, and each other line is."""
    rng = random.Random(7)
    write_input(tmp_path / "in", NUM_LINES)
    kills = sorted(rng.sample(range(1, NUM_LINES), NUM_KILLS))
    running: list[subprocess.Popen[bytes]] = []
    answered = 0

    def says(asked: Asked) -> Reply:
        nonlocal answered
        answered += 1
        if kills and answered >= kills[0]:
            kills.pop(0)
            running[-1].send_signal(signal.SIGKILL)
        return Reply(data=json.dumps({"text": "x" * rng.randrange(9000)}).encode())

    num_torn = 0
    with tiny_api(says) as api:
        line = [sys.executable, "-m", "sluice", *command(tmp_path, "--url", api.url)]
        while kills:
            running.append(subprocess.Popen([*line, "--concurrency", "32"]))
            assert running[-1].wait(300) == -signal.SIGKILL
            num_torn += not (tmp_path / "out").read_bytes().endswith(b"\n")
        done = {json.loads(each)["custom_id"] for each in _whole(tmp_path / "out")}
        sent = len(api.asked)
        start_s = time.monotonic()
        running.append(subprocess.Popen(line))
        assert running[-1].wait(300) == 0
        seconds = time.monotonic() - start_s
    found = [each["custom_id"] for each in results(tmp_path / "out")]
    assert sorted(found, key=int) == [str(i) for i in range(NUM_LINES)]
    again = {asked.body["input"] for asked in api.asked[sent:]}
    assert not again & done, "a line that was done is sent again"
    print(
        f"{NUM_KILLS} kills over {NUM_LINES} lines: {sent} sent before the last run, "
        f"{num_torn} torn lines; the last run: {len(again) / seconds:.0f} lines/s with its start"
    )


def _whole(path: Path) -> list[bytes]:
    return path.read_bytes().split(b"\n")[:-1]
