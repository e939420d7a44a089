"""Claims on how a model is named, and on what the hub's own environment variables do."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sluice_core.errors import CheckpointError, ConfigError
from sluice_core.hub.listing import clean_etag
from sluice_core.hub.reference import HubModel, access, hub_model
from sluice_core.model.stored import shard_names
from sluice_worker.base.config import parse
from sluice_worker.hub.progress import DownloadProgress, bar

COMMIT = "0123456789abcdef" * 2 + "01234567"


@pytest.mark.parametrize(
    ("model", "revision", "wanted"),
    [
        ("hf://Qwen/Qwen3-0.6B", None, HubModel("Qwen/Qwen3-0.6B", "main")),
        ("hf://Qwen/Qwen3-0.6B@v1", None, HubModel("Qwen/Qwen3-0.6B", "v1")),
        ("Qwen/Qwen3-0.6B", "refs/pr/3", HubModel("Qwen/Qwen3-0.6B", "refs/pr/3")),
        ("Qwen/Qwen3-0.6B@v1", "v1", HubModel("Qwen/Qwen3-0.6B", "v1")),
        ("file:///models/demo", None, None),
        ("/models/demo", None, None),
        ("demo", None, None),
    ],
)
def test_a_name_is_the_hubs_or_a_directory(
    model: str, revision: str | None, wanted: HubModel | None
) -> None:
    assert hub_model(model, revision) == wanted


def test_a_directory_of_that_name_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert hub_model("org/name") is None
    assert hub_model("hf://org/name") is not None


@pytest.mark.parametrize(
    ("model", "revision", "says"),
    [
        ("hf://Qwen", None, "must have the form hf://ORG/NAME"),
        ("hf://Qwen/../etc", None, "must have the form"),
        ("hf://a/b@..", None, "must have the form"),
        ("hf://a/b@v1", "v2", "name two revisions"),
        ("hf://a/b", "../v2", "no branch, tag or commit"),
        ("/models/demo", "main", "belongs to models of the hub"),
    ],
)
def test_what_names_nothing_is_refused(model: str, revision: str | None, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        hub_model(model, revision)


@given(st.text(max_size=40), st.none() | st.text(max_size=10))
def test_no_name_leads_out_of_the_cache(name: str, revision: str | None) -> None:
    try:
        found = hub_model(f"hf://{name}", revision)
    except ValueError:
        return
    assert found is not None
    assert found.repo.count("/") == 1
    for part in (*found.repo.split("/"), *found.revision.split("/")):
        assert part not in {".", ".."}
    assert not found.revision.startswith("/")


def test_only_a_whole_commit_is_one() -> None:
    assert HubModel("a/b", COMMIT).commit == COMMIT
    assert HubModel("a/b", COMMIT[:7]).commit is None


@given(st.text(max_size=60))
def test_an_etag_that_is_kept_names_a_file_of_its_own(etag: str) -> None:
    kept = clean_etag(etag)
    assert "/" not in kept
    assert "." not in kept


@pytest.mark.parametrize("name", ["../x.safetensors", "a/b.safetensors", "x.bin", ".safetensors"])
def test_a_shard_is_a_plain_safetensors_file(name: str) -> None:
    with pytest.raises(CheckpointError):
        shard_names({"weight_map": {"t": name}})


def test_the_hubs_variables_are_honoured(tmp_path: Path) -> None:
    environ = {
        "HF_ENDPOINT": "https://hub.example/",
        "HF_TOKEN": " hf_canary\n",
        "HF_HUB_OFFLINE": "yes",
        "HF_HUB_CACHE": "/cache",
        "HF_HUB_DOWNLOAD_TIMEOUT": "3",
    }
    found = access(environ, None)
    assert (found.endpoint, found.token, found.offline) == (
        "https://hub.example",
        "hf_canary",
        True,
    )
    assert (found.cache, found.timeout_s) == (Path("/cache"), 3.0)
    assert access(environ, tmp_path).cache == tmp_path
    assert "hf_canary" not in repr(found)


def test_the_older_name_of_the_token_is_read_behind_the_newer_one() -> None:
    environ = {"HUGGING_FACE_HUB_TOKEN": "hf_old", "HF_HOME": "/nowhere"}
    assert access(environ, None).token == "hf_old"
    assert access(environ | {"HF_TOKEN": "hf_new"}, None).token == "hf_new"


@pytest.mark.parametrize("token", ["hf_canary\nsecond", "hf_canaré"])
def test_a_token_that_no_header_can_hold_is_refused_and_not_shown(
    token: str, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text(token)
    for environ in ({"HF_TOKEN": token}, {"HF_HOME": str(tmp_path)}):
        with pytest.raises(ValueError, match="must be one line of ASCII") as refused:
            access(environ, None)
        assert "canar" not in str(refused.value)


def test_without_variables_it_is_the_public_hub_and_the_users_cache(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("hf_saved\n")
    found = access({"HF_HOME": str(tmp_path)}, None)
    assert (found.endpoint, found.token) == ("https://huggingface.co", "hf_saved")
    assert (found.cache, found.offline) == (tmp_path / "hub", False)
    assert access({"HF_HOME": "/nowhere"}, None).token is None


@pytest.mark.parametrize(
    ("name", "value"), [("HF_ENDPOINT", "ftp://hub"), ("HF_HUB_DOWNLOAD_TIMEOUT", "soon")]
)
def test_a_variable_that_makes_no_sense_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse(["--model", "hf://a/b"], {name: value})
    [problem] = refused.value.problems
    assert name in problem


def test_flags_name_a_model_of_the_hub_which_clients_know_by_its_own_name(tmp_path: Path) -> None:
    flags = ["--model=Qwen/Qwen3-0.6B", "--revision=v1", f"--download-dir={tmp_path}"]
    config = parse(flags, {})
    assert config.hub is not None
    assert config.hub.model == HubModel("Qwen/Qwen3-0.6B", "v1")
    assert config.hub.access.cache == tmp_path
    there = config.at(tmp_path / "snapshot")
    assert there.model_name == there.root == "Qwen/Qwen3-0.6B"
    assert there.engine.model == str(tmp_path / "snapshot")


@pytest.mark.parametrize("flag", ["--revision=main", "--download-dir=/cache"])
def test_a_flag_of_the_hub_is_refused_with_a_directory(tmp_path: Path, flag: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse(["--model", str(tmp_path), flag], {})
    [problem] = refused.value.problems
    assert flag.partition("=")[0] in problem


def test_the_bar_fits_a_terminal_and_says_how_much() -> None:
    line = bar("Qwen/Qwen3-0.6B@main", 3 << 30, 12 << 30, 200 * 2**20)
    assert " 25 % 3.00 of 12.00 GiB, 200 MiB/s" in line
    assert len(line) < 120


class Terminal(io.StringIO):
    """Standard error of a person."""

    def isatty(self) -> bool:
        return True


def test_on_a_terminal_one_line_grows_and_ends() -> None:
    output = Terminal()
    told = DownloadProgress("a/b@main", output)
    for done in (0, 1 << 30, 2 << 30, 2 << 30):
        told(done, 2 << 30)
    assert output.getvalue().count("\r") == 3
    assert output.getvalue().count("\n") == 1
    assert told.percent == 100


def test_a_log_gets_a_line_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "sluice_worker")
    told = DownloadProgress("a/b@main", io.StringIO())
    for done in range(101):
        told(done, 100)
    assert [getattr(record, "percent", None) for record in caplog.records] == [0, 100]
    DownloadProgress("a/b@main", io.StringIO())(100, 100)
    assert len(caplog.records) == 2
