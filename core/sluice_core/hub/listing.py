"""The files of a model on the hub, and which of them are fetched. Pure but for the index that
`weight_files` reads.

Names are hostile input. Only plain names are taken: known ones at the top of the repository, chat
templates in their folder, and the modules of sentence-transformers in theirs. So no file is ever
written outside its directory, or run.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..bounded import count
from ..errors import CheckpointError, DownloadError
from ..model.files import JINJA, TEMPLATES, Directory
from ..model.images import PROCESSOR, PROCESSORS
from ..model.sentence import MODULES, PROMPTS, TRANSFORMER_FILES
from ..model.stored import INDEX, WEIGHTS, Weights

TOKENIZER = "tokenizer.json"
REQUIRED = ("config.json", TOKENIZER)
OPTIONAL = (
    PROCESSOR,
    PROCESSORS,
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    JINJA,
    MODULES,
    PROMPTS,
    *TRANSFORMER_FILES,
)
_TEMPLATE = re.compile(rf"{TEMPLATES}/[A-Za-z0-9][A-Za-z0-9_-]{{0,63}}\.jinja")
_MODULE = re.compile(r"[0-9]{1,2}_[A-Za-z0-9_]{1,64}/(config\.json|model\.safetensors)")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_ETAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file. `etag`: its SHA-256 if it is a large one, else its git blob id; "" if unknown."""

    name: str
    size: int | None
    etag: str


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of one commit."""

    commit: str
    files: Mapping[str, RemoteFile]


def parse_listing(repo: str, answer: object) -> Listing:
    """The hub's answer to /api/models/ORG/NAME/revision/REV?blobs=true; DownloadError."""
    if not isinstance(answer, Mapping):
        raise DownloadError(f"the hub's listing of {repo} is not a JSON object.")
    commit, siblings = answer.get("sha"), answer.get("siblings")
    if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
        raise DownloadError(f"the hub's listing of {repo} names no commit.")
    if not isinstance(siblings, list):
        raise DownloadError(f"the hub's listing of {repo} names no files.")
    files = (_file(sibling) for sibling in siblings if isinstance(sibling, Mapping))
    return Listing(commit, {file.name: file for file in files})


def _file(sibling: Mapping[str, object]) -> RemoteFile:
    lfs = sibling.get("lfs")
    large = lfs if isinstance(lfs, Mapping) else {}
    etag = large.get("sha256") or sibling.get("blobId")
    return RemoteFile(str(sibling.get("rfilename")), count(sibling.get("size")), clean_etag(etag))


def clean_etag(etag: object) -> str:
    """An entity tag that can name a file, without quotes; "" for any other."""
    text = etag.removeprefix("W/").strip('"') if isinstance(etag, str) else ""
    return text if _ETAG.fullmatch(text) else ""


def small_files(repo: str, listing: Listing, *, weights: bool) -> tuple[RemoteFile, ...]:
    """All but the weights. CheckpointError, before anything is fetched, if it cannot be served."""
    missing = [name for name in REQUIRED if name not in listing.files]
    if PROCESSOR in listing.files and missing == [TOKENIZER]:
        missing = []  # it may read images only; the engine says if it reads texts
    if missing:
        raise CheckpointError(f"{repo} has no {' and no '.join(missing)}.")
    if weights and not {INDEX, WEIGHTS} & listing.files.keys():
        raise CheckpointError(
            f"{repo} has no {WEIGHTS}; other formats are never fetched, because they can run code."
        )
    templates = sorted(filter(_TEMPLATE.fullmatch, listing.files))
    modules = sorted(filter(_MODULE.fullmatch, listing.files))
    modules = [name for name in modules if weights or not name.endswith(WEIGHTS)]
    wanted = (*REQUIRED, *OPTIONAL, *templates, *modules, *((INDEX,) if weights else ()))
    return tuple(listing.files[name] for name in wanted if name in listing.files)


def weight_files(repo: str, listing: Listing, directory: Path) -> tuple[RemoteFile, ...]:
    """The safetensors files: the one, or those that the index in `directory` names."""
    names = Weights.of(Directory(directory), listing.files).files
    missing = [name for name in names if name not in listing.files]
    if missing:
        raise CheckpointError(f"{repo}: {INDEX} names {missing[0]}, which is not there.")
    return tuple(listing.files[name] for name in names)


def total_bytes(files: Iterable[RemoteFile]) -> int:
    """Bytes of `files`, all of known size."""
    return sum(file.size or 0 for file in files)
