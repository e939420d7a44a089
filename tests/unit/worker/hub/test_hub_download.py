"""Claims on fetching a model: what is fetched, resumed, verified, and refused with what words."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sluice_core.errors import CheckpointError, StartupError, UnsupportedModel
from sluice_core.hub.listing import RemoteFile
from sluice_core.hub.reference import Access, HubModel
from sluice_core.model.files import Directory, read_json
from sluice_worker.hub.cache import Cache, Stopped
from sluice_worker.hub.download import download
from unit.worker.api.tiny import write_checkpoint
from unit.worker.hub.forward_proxy import running_proxy
from unit.worker.hub.hub_server import (
    COMMIT,
    REPO,
    TOKEN,
    Hub,
    files_of,
    running_hub,
    safetensors,
    tls_of_own,
)

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
MODEL = HubModel(REPO)
SIZE = 300_000


def _nothing(*_: object) -> None:
    """Check nothing, show nothing."""


@pytest.fixture(scope="module")
def small_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return files_of(write_checkpoint(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def hub(small_files: dict[str, bytes]) -> Iterator[Hub]:
    with running_hub(Hub({**small_files, WEIGHTS: safetensors({}, SIZE)})) as served:
        yield served


@pytest.fixture
def access(hub: Hub, tmp_path: Path) -> Access:
    return Access(hub.url, tmp_path / "cache", timeout_s=5, retry_s=0.01)


def fetch(access: Access, model: HubModel = MODEL, **changes: Any) -> Path:
    given: dict[str, Any] = {
        "weights": True, "check": _nothing, "progress": _nothing, "stop": threading.Event(),
    }  # fmt: skip
    return download(model, access, **{**given, **changes})


def test_a_proxy_of_the_environment_is_asked_for_all(
    access: Access, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_proxy() as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy.url)
        folder = fetch(access)
        assert (folder / WEIGHTS).read_bytes() == hub.files[WEIGHTS]
        assert len(proxy.asked) == len(hub.seen)


def test_a_hub_with_an_authority_of_its_own_is_trusted_where_the_environment_names_that(
    access: Access, hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tls, authority = tls_of_own(tmp_path / "pki")
    with running_hub(Hub(hub.files), tls) as own:
        access = dataclasses.replace(access, endpoint=own.url)
        with pytest.raises(StartupError, match="CERTIFICATE_VERIFY_FAILED"):
            fetch(access)
        monkeypatch.setenv("SSL_CERT_FILE", str(authority))
        assert (fetch(access) / WEIGHTS).read_bytes() == hub.files[WEIGHTS]


def test_a_volume_without_symbolic_links_gets_hard_ones(
    access: Access, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    folder = fetch(access)
    assert (folder / WEIGHTS).read_bytes() == hub.files[WEIGHTS]
    assert (folder / WEIGHTS).stat().st_nlink == 2
    assert fetch(access) == folder, "and once more, as all of it is there"


def partial(access: Access, hub: Hub) -> Path:
    """Where the beginning of the weights is kept."""
    folder = access.cache / "models--acme--tiny" / "blobs"
    return folder / f"{hub.etag(WEIGHTS)}.incomplete"


def refusal(access: Access, **changes: Any) -> str:
    with pytest.raises(StartupError) as refused:
        fetch(access, **changes)
    assert refused.value.exit_status == 2
    assert refused.value.message.count("\n") == 0
    return refused.value.message


def test_all_that_is_served_is_fetched_and_nothing_that_can_run(hub: Hub, access: Access) -> None:
    hub.files |= {
        "pytorch_model.bin": b"\x80\x02}q\x00.", "modeling_tiny.py": b"import os",
        "README.md": b"#", "../evil.json": b"{}", "onnx/model.safetensors": b"",
        "chat_template.jinja": b"{{ 1 }}",
        "additional_chat_templates/tool_use.jinja": b"{{ 2 }}",
        "additional_chat_templates/../../evil.jinja": b"{{ 3 }}",
        "modules.json": b"[]", "config_sentence_transformers.json": b"{}",
        "sentence_bert_config.json": b"{}", "1_Pooling/config.json": b"{}",
        "2_Dense/model.safetensors": safetensors({}, 4), "2_Dense/pytorch_model.bin": b"",
        "3_Dense/../../config.json": b"{}", "3_Dense_1024/config.json": b"{}",
    }  # fmt: skip
    directory = fetch(access)
    fetched = {str(path.relative_to(directory)): path for path in directory.rglob("*.*")}
    assert fetched.keys() == {
        "config.json", "tokenizer.json", "chat_template.jinja", WEIGHTS,
        "additional_chat_templates/tool_use.jinja", "modules.json",
        "config_sentence_transformers.json", "sentence_bert_config.json",
        "1_Pooling/config.json", "2_Dense/model.safetensors", "3_Dense_1024/config.json",
    }  # fmt: skip
    assert Directory(directory / "2_Dense").locate(WEIGHTS).read_bytes()
    assert all(path.read_bytes() == hub.files[name] for name, path in fetched.items())
    asked = {seen.path.rpartition("/")[2] for seen in hub.seen}
    assert asked.isdisjoint({"pytorch_model.bin", "modeling_tiny.py", "evil.json", "evil.jinja"})


def test_files_of_a_snapshot_are_read_as_its_own(access: Access) -> None:
    directory = fetch(access)
    assert read_json(directory, "config.json")["model_type"] == "llama"
    assert Directory(directory).locate(WEIGHTS).stat().st_size > SIZE
    (directory / "out.json").symlink_to("/etc/hostname")
    with pytest.raises(CheckpointError, match="outside"):
        Directory(directory).locate("out.json")


def test_the_cache_is_laid_out_as_huggingface_hub_reads_it(hub: Hub, access: Access) -> None:
    from huggingface_hub import scan_cache_dir, try_to_load_from_cache

    directory = fetch(access)
    for name in ("config.json", WEIGHTS):
        found = try_to_load_from_cache(REPO, name, cache_dir=access.cache, revision="main")
        assert found == str(directory / name)
    [repo] = scan_cache_dir(access.cache).repos
    assert (repo.repo_id, repo.nb_files) == (REPO, 3)
    assert [revision.commit_hash for revision in repo.revisions] == [COMMIT]


def test_a_second_start_fetches_nothing_and_one_at_a_commit_asks_nothing(
    hub: Hub, access: Access
) -> None:
    first = fetch(access)
    hub.seen.clear()
    assert fetch(access) == first
    assert [seen.path for seen in hub.seen] == [f"/api/models/{REPO}/revision/main"]
    hub.seen.clear()
    assert fetch(access, HubModel(REPO, COMMIT)) == first
    assert hub.seen == []


def add_shards(hub: Hub, *sizes: int) -> list[str]:
    """Names of shards of so many bytes, which the model has now in place of its one file."""
    hub.files.pop(WEIGHTS, None)
    shards = {f"model-{i}-of-{len(sizes)}.safetensors": size for i, size in enumerate(sizes, 1)}
    hub.files |= {name: safetensors({}, size) for name, size in shards.items()}
    hub.files[INDEX] = json.dumps({"weight_map": {f"of {name}": name for name in shards}}).encode()
    return list(shards)


def test_only_the_shards_of_the_index_are_fetched(hub: Hub, access: Access) -> None:
    hub.files["consolidated.safetensors"] = b"not needed"
    shards = add_shards(hub, 1001, 1002)
    present = {path.name for path in fetch(access).iterdir()}
    assert present == {"config.json", "tokenizer.json", INDEX, *shards}


def test_a_listing_without_sizes_is_completed_from_the_files_headers(
    hub: Hub, access: Access
) -> None:
    hub.tells_sizes = False
    assert (fetch(access) / WEIGHTS).read_bytes() == hub.files[WEIGHTS]
    assert {seen.path.rpartition("/")[2] for seen in hub.seen if seen.method == "HEAD"} == {
        "config.json", "tokenizer.json", WEIGHTS,
    }  # fmt: skip


def test_a_cut_connection_is_resumed_where_it_broke(hub: Hub, access: Access) -> None:
    hub.cuts[WEIGHTS] = [100_000, 50_000]
    assert (fetch(access) / WEIGHTS).read_bytes() == hub.files[WEIGHTS]
    assert [seen.range for seen in hub.fetched(WEIGHTS)] == ["", "bytes=100000-", "bytes=150000-"]


def test_what_a_killed_process_left_is_resumed_by_the_next(hub: Hub, access: Access) -> None:
    hub.gate.clear()
    stop = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(fetch, access, stop=stop)
        while not partial(access, hub).exists() or partial(access, hub).stat().st_size < 100_000:
            assert not first.done()
        stop.set()
        hub.gate.set()
        with pytest.raises(Stopped):
            first.result()
    kept = partial(access, hub).stat().st_size
    assert 100_000 <= kept < SIZE
    assert (fetch(access) / WEIGHTS).read_bytes() == hub.files[WEIGHTS]
    assert hub.fetched(WEIGHTS)[-1].range == f"bytes={kept}-"
    assert not partial(access, hub).exists()


def test_a_server_without_ranges_sends_the_whole_again(hub: Hub, access: Access) -> None:
    hub.cuts[WEIGHTS] = [100_000]
    hub.serves_ranges = False
    assert (fetch(access) / WEIGHTS).read_bytes() == hub.files[WEIGHTS]


@settings(max_examples=12)
@given(cuts=st.lists(st.integers(0, SIZE), max_size=5), kept=st.integers(0, 2 * SIZE))
def test_wherever_it_is_cut_and_whatever_was_kept_the_file_comes_out_whole(
    small_files: dict[str, bytes], cuts: list[int], kept: int
) -> None:
    content = safetensors({}, SIZE)
    with running_hub(Hub({**small_files, WEIGHTS: content})) as hub, TemporaryDirectory() as folder:
        access = Access(hub.url, Path(folder), timeout_s=5, retry_s=0.001)
        hub.cuts[WEIGHTS] = cuts
        beginning = partial(access, hub)
        beginning.parent.mkdir(parents=True)
        beginning.write_bytes((content * 2)[:kept])
        assert (fetch(access) / WEIGHTS).read_bytes() == content


def test_a_server_that_always_breaks_off_at_the_same_byte_is_given_up(
    hub: Hub, access: Access
) -> None:
    hub.serves_ranges = False
    hub.cuts[WEIGHTS] = [100_000] * 50
    said = refusal(access)
    assert "broke off" in said
    assert "6 attempts" in said
    assert len(hub.fetched(WEIGHTS)) == 6


def test_a_file_longer_than_listed_is_refused_while_it_comes(
    hub: Hub, access: Access, monkeypatch: pytest.MonkeyPatch
) -> None:
    listing = hub.listing(blobs=True)
    [entry] = [one for one in listing["siblings"] if one["rfilename"] == WEIGHTS]
    entry["size"] = 1000
    monkeypatch.setattr(hub, "listing", lambda *, blobs: listing)
    assert "longer than the 1000 bytes" in refusal(access)


def test_a_silent_server_is_left_and_asked_again(hub: Hub, access: Access) -> None:
    hub.gate.clear()
    impatient = dataclasses.replace(access, timeout_s=0.3)

    def open_the_gate(done: int, total: int) -> None:
        if len(hub.fetched(WEIGHTS)) > 1:
            hub.gate.set()

    directory = fetch(impatient, progress=open_the_gate)
    assert (directory / WEIGHTS).read_bytes() == hub.files[WEIGHTS]


def test_429_waits_as_long_as_it_asks(hub: Hub, access: Access) -> None:
    hub.answers[WEIGHTS] = [(429, {"Retry-After": "1"}), (503, {})]
    waits: list[float] = []

    class Clock(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout or 0.0)
            return False

    fetch(access, stop=Clock())
    assert waits == [1.0, 0.02]


def test_a_wrong_checksum_is_refused_and_the_bytes_are_not_kept(hub: Hub, access: Access) -> None:
    hub.corrupt.add(WEIGHTS)
    said = refusal(access)
    assert WEIGHTS in said
    assert "checksum" in said
    assert not partial(access, hub).exists()
    assert not (access.cache / "models--acme--tiny/snapshots" / COMMIT / WEIGHTS).exists()
    hub.corrupt.clear()
    assert (fetch(access) / WEIGHTS).read_bytes() == hub.files[WEIGHTS]


def test_a_wrong_checksum_is_told_without_waiting_for_the_other_shards(
    hub: Hub, access: Access
) -> None:
    small, _ = add_shards(hub, 1000, SIZE)
    hub.corrupt.add(small)
    hub.gate.clear()  # the other stops half-way
    stop = threading.Event()
    said = refusal(dataclasses.replace(access, timeout_s=0.3), stop=stop)
    assert small in said
    assert stop.is_set(), "or the other is asked for again and again before this is told"


def test_a_small_file_is_verified_too(hub: Hub, access: Access) -> None:
    hub.corrupt.add("config.json")
    assert "config.json" in refusal(access)


def test_a_spoilt_beginning_is_thrown_away_once(hub: Hub, access: Access) -> None:
    path = partial(access, hub)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"\xff" * 1000)
    assert (fetch(access) / WEIGHTS).read_bytes() == hub.files[WEIGHTS]
    assert [seen.range for seen in hub.fetched(WEIGHTS)] == ["bytes=1000-", ""]


def test_a_server_that_continues_elsewhere_is_asked_for_the_whole(hub: Hub, access: Access) -> None:
    path = partial(access, hub)
    path.parent.mkdir(parents=True)
    path.write_bytes(hub.files[WEIGHTS][:1000])
    hub.answers[WEIGHTS] = [(206, {"Content-Range": f"bytes 500-999/{SIZE}"})]
    assert (fetch(access) / WEIGHTS).read_bytes() == hub.files[WEIGHTS]
    assert [seen.range for seen in hub.fetched(WEIGHTS)] == [""]


def test_two_pods_that_share_a_volume_fetch_each_file_once(hub: Hub, access: Access) -> None:
    hub.gate.clear()
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(fetch, access) for _ in range(2)]
        while not hub.fetched(WEIGHTS):
            assert not any(one.done() for one in both)
        hub.gate.set()
        assert both[0].result() == both[1].result()
    assert len(hub.fetched(WEIGHTS)) == 1
    assert len(hub.fetched("tokenizer.json")) == 1


def test_who_waits_for_what_another_pod_fetches_leaves_with_its_worker(
    hub: Hub, access: Access
) -> None:
    cache, stop = Cache(access.cache, REPO), threading.Event()
    cache.prepare(COMMIT)
    weights = RemoteFile(WEIGHTS, len(hub.files[WEIGHTS]), hub.etag(WEIGHTS))
    looks = count()
    with ExitStack() as other:
        other.enter_context(cache.writing(weights, threading.Event()))

        def leave(done: int, total: int) -> None:
            stop.set()
            if next(looks) == 50:
                other.close()  # so that who does not leave has an end

        with pytest.raises(Stopped):
            fetch(access, stop=stop, progress=leave)
    assert hub.fetched(WEIGHTS) == []


def test_what_another_pod_wrote_into_a_file_at_the_same_time_is_told(
    hub: Hub, access: Access, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.fsync", lambda fd: os.write(fd, b"of another pod"))
    assert "written by another pod at the same time" in refusal(access)
    monkeypatch.undo()
    assert (fetch(access) / WEIGHTS).read_bytes() == hub.files[WEIGHTS]


def test_progress_counts_what_was_there_before(hub: Hub, access: Access) -> None:
    path, seen = partial(access, hub), []
    path.parent.mkdir(parents=True)
    path.write_bytes(hub.files[WEIGHTS][:200_000])
    fetch(access, progress=lambda done, total: seen.append((done, total)))
    total = len(hub.files[WEIGHTS])
    assert seen[0][0] >= 200_000
    assert seen[-1] == (total, total)
    assert seen == sorted(seen)


def test_the_token_goes_to_the_hub_and_never_to_its_cdn(hub: Hub, access: Access) -> None:
    hub.needs_token = True
    fetch(dataclasses.replace(access, token=TOKEN))
    assert {seen.authorization for seen in hub.seen if not seen.on_cdn} == {f"Bearer {TOKEN}"}
    assert {seen.authorization for seen in hub.seen if seen.on_cdn} == {""}
    assert TOKEN not in repr(dataclasses.replace(access, token=TOKEN))


def test_refusals_say_what_to_do(hub: Hub, access: Access) -> None:
    assert "acme/none does not exist on" in refusal(access, model=HubModel("acme/none"))
    assert "has no revision v9" in refusal(access, model=HubModel(REPO, "v9"))
    hub.needs_token = True
    assert "or is private: set HF_TOKEN" in refusal(access)
    hub.needs_token, hub.gated = False, True
    assert "is gated" in refusal(access)
    assert "set HF_TOKEN" in refusal(access)
    said = refusal(dataclasses.replace(access, token="hf_other"))
    assert "the token of HF_TOKEN may not read it" in said
    assert "hf_other" not in said


def test_no_network_is_one_sentence_after_some_attempts(hub: Hub, access: Access) -> None:
    away = dataclasses.replace(access, endpoint="http://127.0.0.1:9")
    said = refusal(away)
    assert "http://127.0.0.1:9 cannot be reached" in said
    assert "6 attempts" in said


def test_a_hub_that_is_away_does_not_keep_a_fetched_model_from_starting(
    hub: Hub, access: Access
) -> None:
    directory = fetch(access)
    assert fetch(dataclasses.replace(access, endpoint="http://127.0.0.1:9")) == directory


def test_a_fetched_model_is_not_served_once_the_hub_has_taken_it_back(
    hub: Hub, access: Access
) -> None:
    fetch(access)
    hub.needs_token = True
    assert "is private" in refusal(access)
    hub.needs_token, hub.repo = False, "acme/renamed"
    assert "does not exist" in refusal(access)


def test_offline_takes_what_is_whole_and_refuses_the_rest(hub: Hub, access: Access) -> None:
    offline = dataclasses.replace(access, offline=True)
    assert "HF_HUB_OFFLINE is set" in refusal(offline)
    directory = fetch(access)
    hub.seen.clear()
    assert fetch(offline) == directory
    (directory / WEIGHTS).unlink()
    assert "HF_HUB_OFFLINE is set" in refusal(offline)
    assert hub.seen == []


@pytest.mark.parametrize("which", [0, 1])
def test_offline_takes_shards_only_where_all_of_them_are_there(
    hub: Hub, access: Access, which: int
) -> None:
    shards, offline = add_shards(hub, 1001, 1002), dataclasses.replace(access, offline=True)
    directory = fetch(access)
    assert fetch(offline) == directory
    (directory / shards[which]).unlink()
    assert "HF_HUB_OFFLINE is set" in refusal(offline)


def test_a_full_disk_is_said_before_the_weights_are_fetched(
    hub: Hub, access: Access, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=40_960))
    said = refusal(access)
    assert "needs 0.0 GiB more" in said
    assert hub.fetched(WEIGHTS) == []


def test_a_disk_that_fills_up_meanwhile_is_named(
    hub: Hub, access: Access, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    assert f"{access.cache} is full; " in refusal(access)


def test_a_directory_that_cannot_be_written_is_named(access: Access, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said = refusal(dataclasses.replace(access, cache=tmp_path / "file" / "cache"))
    assert "cannot be written" in said
    assert "--download-dir" in said


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", WEIGHTS])
def test_what_cannot_be_served_is_refused_before_anything_is_fetched(
    hub: Hub, access: Access, name: str
) -> None:
    del hub.files[name]
    assert name in refusal(access)
    assert len(hub.seen) == 1


def test_a_model_that_is_not_built_is_refused_before_its_weights(hub: Hub, access: Access) -> None:
    def refuse(directory: Path) -> None:
        assert (directory / "config.json").is_file()
        raise UnsupportedModel("not built")

    assert refusal(access, check=refuse) == "not built"
    assert hub.fetched(WEIGHTS) == []


def test_dummy_weights_are_not_fetched(hub: Hub, access: Access) -> None:
    assert not (fetch(access, weights=False) / WEIGHTS).exists()
    assert hub.fetched(WEIGHTS) == []


def test_an_index_that_leads_outside_is_refused(hub: Hub, access: Access) -> None:
    hub.files[INDEX] = b'{"weight_map": {"t": "../../x.safetensors"}}'
    assert "not a safetensors file beside it" in refusal(access)
