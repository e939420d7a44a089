"""How a model is named: a directory, or a model on the hub at a revision. Pure but for `exists`."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..model.files import cause

HUB = "hf://"
FILE = "file://"
DEFAULT_ENDPOINT = "https://huggingface.co"
DEFAULT_REVISION = "main"
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_MODEL = re.compile(rf"({_NAME}/{_NAME})(?:@([A-Za-z0-9][A-Za-z0-9._/-]{{0,253}}))?")
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,253}")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_TRUE = frozenset({"1", "ON", "YES", "TRUE"})


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model on the hub: ORG/NAME at a branch, a tag or a commit."""

    repo: str
    revision: str = DEFAULT_REVISION

    @property
    def commit(self) -> str | None:
        """The revision, where it names a commit: what it stands for never changes."""
        return self.revision if _COMMIT.fullmatch(self.revision) else None

    def __str__(self) -> str:
        return f"{self.repo}@{self.revision}"


@dataclass(frozen=True, slots=True)
class Access:
    """The hub's address, the token, and the directory for its files.

    `timeout_s`: the longest silence of a connection; `retry_s`: the first wait before another
    attempt, which doubles.
    """

    endpoint: str
    cache: Path
    token: str | None = field(default=None, repr=False)
    offline: bool = False
    timeout_s: float = 10.0
    retry_s: float = 0.5


def hub_model(model: str, revision: str | None = None) -> HubModel | None:
    """The hub's model that --model and --revision name, or None where --model is a directory.

    A directory of that name wins over the hub, as in vLLM. Raises ValueError with one sentence.
    """
    named = model.startswith(HUB)
    found = _MODEL.fullmatch(model.removeprefix(HUB))
    if not named and (model.startswith(FILE) or found is None or _is_there(model)):
        if revision is not None:
            raise ValueError(f"--revision {revision} belongs to models of the hub, not to {model}")
        return None
    if found is None or ".." in model:
        raise ValueError(f"--model {model} must have the form hf://ORG/NAME or hf://ORG/NAME@REV")
    if revision is not None and (not _REVISION.fullmatch(revision) or ".." in revision):
        raise ValueError(f"--revision {revision} is no branch, tag or commit")
    repo, written = found.groups()
    if None not in (revision, written) and revision != written:
        raise ValueError(f"--model {model} and --revision {revision} name two revisions")
    return HubModel(repo, revision or written or DEFAULT_REVISION)


def _is_there(model: str) -> bool:
    try:
        os.lstat(model)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise ValueError(f"--model {model} cannot be read: {cause(error)}") from error
    return True


def access(environ: Mapping[str, str], download_dir: Path | None) -> Access:
    """Read the hub's own environment variables; ValueError with one sentence."""
    endpoint = environ.get("HF_ENDPOINT", "").rstrip("/") or DEFAULT_ENDPOINT
    if not endpoint.startswith(("https://", "http://")):
        raise ValueError(f"HF_ENDPOINT must start with https:// or http://, not be {endpoint!r}")
    seconds = environ.get("HF_HUB_DOWNLOAD_TIMEOUT", "10")
    try:
        timeout_s = float(seconds)
    except ValueError:
        timeout_s = 0.0
    if not 0 < timeout_s < float("inf"):
        raise ValueError(f"HF_HUB_DOWNLOAD_TIMEOUT must be seconds over 0, not {seconds!r}")
    home = _home(environ)
    return Access(
        endpoint=endpoint,
        cache=(download_dir or Path(environ.get("HF_HUB_CACHE") or home / "hub")).expanduser(),
        token=_token(environ, home),
        offline=environ.get("HF_HUB_OFFLINE", "").upper() in _TRUE,
        timeout_s=timeout_s,
    )


def _home(environ: Mapping[str, str]) -> Path:
    caches = environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(environ.get("HF_HOME") or Path(caches) / "huggingface").expanduser()


def _token(environ: Mapping[str, str], home: Path) -> str | None:
    named = (environ.get(name, "").strip() for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"))
    token = next(filter(None, named), None) or _saved_token(environ, home)
    if token and not (token.isascii() and token.isprintable()):
        raise ValueError("the hub's token (HF_TOKEN) must be one line of ASCII")  # it is not shown
    return token


def _saved_token(environ: Mapping[str, str], home: Path) -> str | None:
    """The token that `hf auth login` saved."""
    path = Path(environ.get("HF_TOKEN_PATH") or home / "token").expanduser()
    try:
        return path.read_text(encoding="utf-8").strip() or None
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ValueError(f"the hub's token {path} cannot be read: {cause(error)}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"the hub's token {path} cannot be read: not UTF-8 text") from error
