"""The openai client's files and batches against a real worker and a real gate."""

import json
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pytest
from integration.worker_process import Worker, gate_of, running_worker
from openai import OpenAI
from openai.types import Batch, FileObject

CHAT: Literal["/v1/chat/completions"] = "/v1/chat/completions"
COMPLETIONS: Literal["/v1/completions"] = "/v1/completions"
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
FLAGS = (
    *("--max-num-seqs", "4", "--num-gpu-blocks-override", "256", "--max-model-len", "2048"),
    *("--served-model-name", "tiny"),
)
ALWAYS = {
    *("id", "object", "endpoint", "model", "errors", "input_file_id", "completion_window"),
    *("status", "output_file_id", "error_file_id", "created_at", "in_progress_at", "expires_at"),
    *("finalizing_at", "completed_at", "failed_at", "expired_at", "cancelling_at", "cancelled_at"),
    *("request_counts", "usage", "metadata"),
}
Server = Callable[..., Any]


def until(holds: Callable[[], Any], limit_s: float = 60.0) -> Any:
    end_s = time.monotonic() + limit_s
    while not (found := holds()):
        assert time.monotonic() < end_s
        time.sleep(0.05)
    return found


@contextmanager
def served(kind: str, directory: Path, *flags: str) -> Iterator[Worker]:
    """A worker that keeps batches, or a gate that does before one that does not."""
    kept = ("--batch-dir", str(directory / "kept"), *flags)
    (directory / "kept").mkdir(exist_ok=True)
    with ExitStack() as held:
        if not (directory / "model").exists():
            (directory / "model").mkdir()
            (directory / "model" / "chat_template.jinja").write_text(TEMPLATE)
        own = FLAGS if kind == "gate" else (*FLAGS, *kept)
        server = held.enter_context(running_worker(directory, *own))
        if kind == "gate":
            server = held.enter_context(gate_of(server.url, directory / "gate", *kept))
        yield server


@pytest.fixture(scope="module", params=["worker", "gate"])
def server(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Worker]:
    with served(request.param, tmp_path_factory.mktemp(request.param)) as server:
        yield server


def client_of(server: Worker, key: str = "none") -> OpenAI:
    return OpenAI(base_url=server.url + "/v1", api_key=key, max_retries=0)


@pytest.fixture
def client(server: Worker) -> Iterator[OpenAI]:
    with client_of(server) as client:
        yield client


def line(custom_id: str, url: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": "def", "max_tokens": 4, "ignore_eos": True} | body
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def chat(custom_id: str, text: str) -> dict[str, Any]:
    body = {"model": "tiny", "max_tokens": 4, "ignore_eos": True}
    said = {"messages": [{"role": "user", "content": text}]}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body | said}


def uploaded(client: OpenAI, lines: list[Any]) -> FileObject:
    data = "".join(each if isinstance(each, str) else json.dumps(each) + "\n" for each in lines)
    return client.files.create(file=("lines.jsonl", data.encode()), purpose="batch")


def created(client: OpenAI, lines: list[Any], endpoint: Any = COMPLETIONS) -> Batch:
    file = uploaded(client, lines)
    return client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", metadata={"a": "b"}
    )


def ended(client: OpenAI, batch_id: str, limit_s: float = 60.0) -> Batch:
    live = ("validating", "in_progress", "finalizing", "cancelling")

    def batch() -> Batch | None:
        found = client.batches.retrieve(batch_id)
        return None if found.status in live else found

    found: Batch = until(batch, limit_s)
    return found


def results(client: OpenAI, file_id: str | None) -> dict[str, Any]:
    assert file_id is not None
    text = client.files.content(file_id).text
    assert text.endswith("\n")
    found = [json.loads(each) for each in text.split("\n")[:-1]]  # U+2028 may stand in one
    by_id = {each["custom_id"]: each for each in found}
    assert len(by_id) == len(found), "a line is there twice"
    return by_id


def under_way(server: Worker) -> float:
    return server.metric("sluice_num_requests_background")


def test_a_batch_ends_with_an_output_and_an_error_file(server: Worker, client: OpenAI) -> None:
    chats = [chat(f"c-{i}", "x" * (i + 1)) for i in range(20)]
    chats[7]["body"]["max_tokens"] = -1
    batch = created(client, chats, CHAT)
    assert (batch.status, batch.endpoint, batch.metadata) == ("validating", CHAT, {"a": "b"})
    assert batch.request_counts is not None
    assert batch.request_counts.total == 0
    raw = httpx.get(f"{server.url}/v1/batches/{batch.id}").json()
    assert raw.keys() == ALWAYS
    done = ended(client, batch.id)
    assert (done.status, done.model, done.errors) == ("completed", "tiny", None)
    assert done.request_counts is not None
    assert done.request_counts.model_dump() == {"total": 20, "completed": 19, "failed": 1}
    assert done.usage is not None
    assert done.usage.output_tokens == 19 * 4
    assert done.usage.total_tokens == done.usage.input_tokens + 19 * 4
    assert None not in (done.in_progress_at, done.finalizing_at, done.completed_at)
    assert done.expires_at == done.created_at + 86_400
    good, bad = results(client, done.output_file_id), results(client, done.error_file_id)
    assert set(good) | set(bad) == {f"c-{i}" for i in range(20)}
    assert set(bad) == {"c-7"}
    assert bad["c-7"]["error"] is None
    assert bad["c-7"]["response"]["status_code"] == 400
    for each in good.values():
        answer = openai.types.chat.ChatCompletion.model_validate(each["response"]["body"])
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 4
        assert each["response"]["request_id"]
    assert done.output_file_id is not None
    file = client.files.retrieve(done.output_file_id)
    assert (file.purpose, file.filename) == ("batch_output", f"{batch.id}_output.jsonl")
    assert file.expires_at == file.created_at + 30 * 86_400
    assert client.batches.list(limit=1).data[0].id == batch.id
    page = httpx.get(server.admin_url + "/metrics", timeout=30).text
    labels = set(re.findall(r'^http_requests_total{handler="(/v1/[^"]*)"', page, re.MULTILINE))
    if "gate" not in server.log.name:  # which shows those of its engine
        assert {"/v1/files", "/v1/batches/{batch_id}", "/v1/files/{file_id}/content"} <= labels
    assert batch.id not in page


def test_all_lines_failed_is_completed_without_an_output(client: OpenAI) -> None:
    done = ended(client, created(client, [line(str(i), model="other") for i in range(3)]).id)
    assert (done.status, done.output_file_id) == ("completed", None)
    bad = results(client, done.error_file_id)
    assert {each["response"]["status_code"] for each in bad.values()} <= {404, 400}
    assert len(bad) == 3


@pytest.mark.parametrize(
    ("lines", "code", "number"),
    [
        ([line("a"), "{\n"], "invalid_json_line", 2),
        ([line("a"), line("b"), line("a")], "duplicate_custom_id", 3),
        ([line("a"), line("b", CHAT)], "url_mismatch", 2),
        ([line("a"), line("b", model="other")], "model_mismatch", 2),
        ([line("a", stream=True)], "invalid_json_line", 1),
        (["\n"], "empty_file", None),
        ([line(str(i)) for i in range(50_001)], "too_many_tasks", None),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_input_makes_a_batch_that_fails(
    client: OpenAI, lines: list[Any], code: str, number: int | None
) -> None:
    done = ended(client, created(client, lines).id)
    assert done.status == "failed"
    assert done.failed_at
    assert done.errors is not None
    assert done.errors.data is not None
    [problem] = done.errors.data
    assert (problem.code, problem.line) == (code, number)
    assert problem.message
    assert (done.output_file_id, done.error_file_id) == (None, None)


def test_files_are_listed_read_and_deleted(client: OpenAI) -> None:
    made = [uploaded(client, [line(str(i))]) for i in range(3)]
    other = client.files.create(
        file=("x.txt", b"abc"),
        purpose="user_data",
        expires_after={"anchor": "created_at", "seconds": 3600},
    )
    assert (other.bytes, other.filename, other.status) == (3, "x.txt", "processed")
    assert other.expires_at == other.created_at + 3600
    assert client.files.content(other.id).read() == b"abc"
    newest = [file.id for file in client.files.list(limit=2, purpose="batch").data]
    assert newest == [made[2].id, made[1].id]
    behind = client.files.list(after=made[0].id, order="asc", limit=10_000)
    assert [file.id for file in behind.data] == [made[1].id, made[2].id, other.id]
    assert client.files.delete(made[1].id).deleted
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            call(made[1].id)


def test_what_cannot_be_is_refused_with_a_sentence(server: Worker, client: OpenAI) -> None:
    file = uploaded(client, [line("a")])
    asked: dict[str, Any] = {"input_file_id": file.id, "completion_window": "24h"}
    with pytest.raises(openai.BadRequestError, match="is none of this server"):
        client.batches.create(endpoint="/v1/videos", **asked)
    with pytest.raises(openai.BadRequestError, match="completion_window"):
        client.batches.create(endpoint=COMPLETIONS, **asked | {"completion_window": "1h"})
    with pytest.raises(openai.NotFoundError, match="No such File object"):
        client.batches.create(endpoint=COMPLETIONS, **asked | {"input_file_id": "../x"})
    done = ended(client, client.batches.create(endpoint=COMPLETIONS, **asked).id)
    with pytest.raises(openai.ConflictError, match="Cannot cancel a batch with status 'completed'"):
        client.batches.cancel(done.id)
    for path in ("/v1/files/%2e%2e", "/v1/batches/batch_x", "/v1/files/x/content"):
        assert httpx.get(server.url + path).status_code in (400, 404)
    for query in ("limit=0", "limit=10001", "limit=x", "order=up"):
        assert httpx.get(f"{server.url}/v1/files?{query}").status_code == 400
    for data in (b"", b"--x\r\n", b"--x--\r\n"):
        headers = {"content-type": "multipart/form-data; boundary=x"}
        answer = httpx.post(server.url + "/v1/files", content=data, headers=headers)
        assert answer.status_code == 400, answer.text
    answer = httpx.post(server.url + "/v1/files", json={"file": "x"})
    assert "multipart/form-data" in answer.json()["error"]["message"]


def test_cancel_ends_within_ten_seconds_and_frees_the_places(
    server: Worker, client: OpenAI
) -> None:
    lines = [
        line(str(i), max_tokens=4 if i < 8 else 2000, prompt="a" * (30 - i)) for i in range(30)
    ]
    batch = created(client, lines)
    behind = created(client, [line("a")])
    until(lambda: under_way(server) >= 4)
    until(lambda: client.batches.retrieve(behind.id).status == "in_progress")
    start_s = time.monotonic()
    assert client.batches.cancel(behind.id).status == "cancelling"
    assert ended(client, behind.id, 10).status == "cancelled"
    assert client.batches.cancel(batch.id).cancelling_at
    done = ended(client, batch.id, 10)
    assert time.monotonic() - start_s < 10
    assert done.status == "cancelled"
    assert done.cancelled_at
    until(lambda: under_way(server) == 0, 5)
    assert done.request_counts is not None
    assert done.request_counts.failed == 0
    if done.output_file_id is not None:
        assert len(results(client, done.output_file_id)) == done.request_counts.completed


@pytest.mark.parametrize("kind", ["worker", "gate"])
def test_a_batch_goes_on_after_kill_9_and_nothing_is_lost_or_doubled(
    kind: str, tmp_path: Path
) -> None:
    num = 300
    with served(kind, tmp_path) as server, client_of(server) as client:
        batch_id = created(client, [line(str(i), max_tokens=100) for i in range(num)]).id
        until(lambda: completed(client, batch_id) >= 20)
        kill(server)
    with served(kind, tmp_path) as server, client_of(server) as client:
        until(lambda: completed(client, batch_id) >= 100)
        kill(server)
    with served(kind, tmp_path) as server, client_of(server) as client:
        assert client.batches.retrieve(batch_id).status == "in_progress"
        done = ended(client, batch_id)
        assert done.status == "completed"
        assert done.request_counts is not None
        assert done.request_counts.model_dump() == {"total": num, "completed": num, "failed": 0}
        assert len(results(client, done.output_file_id)) == num
        assert done.error_file_id is None
        assert not list((tmp_path / "kept" / "live").iterdir())


def completed(client: OpenAI, batch_id: str) -> int:
    counts = client.batches.retrieve(batch_id).request_counts
    assert counts is not None
    return counts.completed


def kill(server: Worker) -> None:
    server.process.send_signal(signal.SIGKILL)
    server.process.wait()


def test_a_server_that_leaves_hands_its_batch_to_another(tmp_path: Path) -> None:
    """Two servers share a directory, and any of them cancels."""
    (tmp_path / "b").mkdir()
    with served("worker", tmp_path) as first:
        (tmp_path / "b" / "kept").symlink_to(tmp_path / "kept")
        with client_of(first) as client:
            batch = created(client, [line(str(i), max_tokens=200) for i in range(60)])
            until(lambda: under_way(first) >= 4)
        with served("worker", tmp_path / "b") as second, client_of(second) as client:
            long = created(client, [line(str(i), max_tokens=2000) for i in range(60)])
            until(lambda: under_way(second) >= 4)
            first.terminate()
            first.process.wait(60)
            assert client.batches.cancel(long.id).status == "cancelling"
            assert ended(client, long.id, 10).status == "cancelled"
            done = ended(client, batch.id, 120)
            assert done.status == "completed"
            assert done.request_counts is not None
            assert done.request_counts.completed == 60
            assert len(results(client, done.output_file_id)) == 60


def test_files_and_batches_belong_to_their_key(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("one\ntwo\n")
    with (
        served("worker", tmp_path, "--api-key-file", str(tmp_path / "keys")) as server,
        client_of(server, "one") as one,
        client_of(server, "two") as two,
    ):
        batch = created(one, [line("a")])
        done = ended(one, batch.id)
        assert done.status == "completed"
        assert done.output_file_id is not None
        for call, name in (
            (two.batches.retrieve, batch.id),
            (two.batches.cancel, batch.id),
            (two.files.retrieve, batch.input_file_id),
            (two.files.content, done.output_file_id),
            (two.files.delete, done.output_file_id),
        ):
            with pytest.raises(openai.NotFoundError):
                call(name)
        with pytest.raises(openai.NotFoundError):
            two.batches.create(
                input_file_id=batch.input_file_id,
                endpoint=COMPLETIONS,
                completion_window="24h",
            )
        assert not two.files.list().data
        assert not two.batches.list().data
        assert one.files.list().data


def test_an_upload_may_take_long_while_it_goes_on(tmp_path: Path) -> None:
    with served("worker", tmp_path, "--receive-timeout", "1") as server:
        begin = "Content-Disposition: form-data; name="
        head = f'--x\r\n{begin}"purpose"\r\n\r\nbatch\r\n--x\r\n{begin}"file"; filename="a"'

        def pieces(num_bytes: int) -> Iterator[bytes]:
            yield head.encode() + b"\r\n\r\n"
            for _ in range(25):
                time.sleep(0.1)  # a slow client
                yield b"x" * num_bytes
            yield b"\r\n--x--\r\n"

        headers = {"content-type": "multipart/form-data; boundary=x"}
        for num_bytes, status in ((20_000, 200), (10, 408)):
            sent = pieces(num_bytes)
            answer = httpx.post(f"{server.url}/v1/files", content=sent, headers=headers, timeout=30)
            assert answer.status_code == status, answer.text


def test_without_the_flag_the_routes_say_which_it_is(tmp_path: Path) -> None:
    with running_worker(tmp_path, *FLAGS) as server, client_of(server) as client:
        with pytest.raises(openai.NotFoundError, match="--batch-dir"):
            client.batches.list()
        with pytest.raises(openai.NotFoundError, match="--batch-dir"):
            uploaded(client, [line("a")])
