"""What a start on a hub's model may not read beside the checkpoint is told with its cause."""

import ssl
from pathlib import Path
from threading import Event

import pytest
from sluice_core.errors import DownloadError, StartupError
from sluice_core.hub.reference import Access, HubModel, access, hub_model
from sluice_core.hub.site import Site
from sluice_worker.hub.cache import Cache
from sluice_worker.hub.download import download
from unit.worker.ordinary_user import ordinary_user

COMMIT = "0123456789abcdef0123456789abcdef01234567"
MODEL = HubModel("org/name")


def kept(folder: Path) -> Path:
    """A cache that holds all of MODEL; its snapshot."""
    cache = Cache(folder, MODEL.repo)
    cache.prepare(COMMIT)
    cache.remember(MODEL, COMMIT)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (cache.snapshot(COMMIT) / name).write_text("{}")
    return cache.snapshot(COMMIT)


def offline(folder: Path) -> Path:
    """The directory of MODEL without a hub."""
    hub = Access("http://127.0.0.1:9", folder, offline=True)
    return download(
        MODEL,
        hub,
        weights=True,
        check=lambda directory: None,
        progress=lambda done, total: None,
        stop=Event(),
    )


def test_a_saved_token_that_may_not_be_read_is_no_missing_token(tmp_path: Path) -> None:
    token = tmp_path / "token"
    environ = {"HF_HOME": str(tmp_path)}
    assert access(environ, None).token is None
    token.write_text("hf_saved\n")
    token.chmod(0)
    with ordinary_user() as user, pytest.raises(ValueError, match="the hub's token") as refused:
        access(environ, None)
    assert str(refused.value).endswith(f"{token} cannot be read: permission denied for user {user}")
    token.chmod(0o644)
    token.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="token cannot be read: not UTF-8 text"):
        access(environ, None)


def test_a_directory_that_may_not_be_looked_into_is_not_taken_for_a_hubs_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "org").mkdir(mode=0)
    monkeypatch.chdir(tmp_path)
    with ordinary_user() as user, pytest.raises(ValueError, match="org/name") as refused:
        hub_model("org/name")
    assert f"cannot be read: permission denied for user {user}" in str(refused.value)


@pytest.mark.parametrize("closed", ["refs/main", "refs", "snapshots", f"snapshots/{COMMIT}"])
def test_a_cache_that_may_not_be_read_is_not_called_incomplete(tmp_path: Path, closed: str) -> None:
    snapshot = kept(tmp_path)
    assert offline(tmp_path) == snapshot
    path = tmp_path / "models--org--name" / closed
    path.chmod(0)
    with ordinary_user() as user, pytest.raises(StartupError) as refused:
        offline(tmp_path)
    path.chmod(0o755)
    assert str(path) in refused.value.message
    assert f"permission denied for user {user}" in refused.value.message


def test_an_index_that_is_cut_is_named_also_without_the_hub(tmp_path: Path) -> None:
    snapshot = kept(tmp_path)
    (snapshot / "model.safetensors.index.json").write_text('{"weight_map": {"a')
    with pytest.raises(StartupError, match=r"^model.safetensors.index.json: not valid JSON"):
        offline(tmp_path)


@pytest.mark.parametrize(
    ("content", "cause"),
    [(None, "No such file or directory"), ("", "no certificate or crl found")],
)
def test_certificates_that_cannot_be_read_are_told_with_their_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None, cause: str
) -> None:
    authorities = tmp_path / "ca.crt"
    if content is not None:
        authorities.write_text(content)
    monkeypatch.setenv("SSL_CERT_FILE", str(authorities))
    with pytest.raises(DownloadError, match="SSL_CERT_FILE") as refused:
        Site("https://127.0.0.1:9", MODEL, advice="none")
    assert cause in refused.value.message
    assert isinstance(refused.value.__cause__, FileNotFoundError | ssl.SSLError)
