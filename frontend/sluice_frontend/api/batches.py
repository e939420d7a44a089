"""OpenAI's files and batches: their objects, the bodies that make them, and their routes. Pure."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field
from sluice_core.bounded import Count

from .operations import NO_WORK, Operation

MAX_METADATA = 16
Purpose = Literal["assistants", "batch", "fine-tune", "vision", "user_data", "evals"]
Live = Literal["validating", "in_progress", "finalizing", "cancelling"]
Ending = Literal["completed", "failed", "expired", "cancelled"]
Key = Annotated[str, Meta(max_length=64)]
Value = Annotated[str, Meta(max_length=512)]
KeptSeconds = Annotated[int, Meta(ge=3600, le=2_592_000)]


class ExpiresAfter(Struct, frozen=True):
    """For how many seconds a file is kept."""

    seconds: KeptSeconds
    anchor: Literal["created_at"]


class FileUpload(Struct, frozen=True):
    """The form of POST /v1/files."""

    file: str
    purpose: Purpose
    anchor: Literal["created_at"] = field(name="expires_after[anchor]", default="created_at")
    seconds: KeptSeconds | None = field(name="expires_after[seconds]", default=None)


class FileObject(Struct, frozen=True, kw_only=True):
    """A file. `status` and `status_details` say nothing: OpenAI has deprecated and sends them."""

    id: str
    object: Literal["file"] = "file"
    bytes: Count
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"
    status_details: None = None


class FileList(Struct, frozen=True):
    """The answer of GET /v1/files."""

    data: list[FileObject]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: Literal["list"] = "list"


class FileDeleted(Struct, frozen=True):
    """The answer of DELETE /v1/files/{file_id}."""

    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


class BatchProblem(Struct, frozen=True):
    """Why a batch failed; `line`: of its input, from 1."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchProblems(Struct, frozen=True):
    """Why a batch failed: the first problems."""

    data: list[BatchProblem]
    object: Literal["list"] = "list"


class RequestCounts(Struct, frozen=True):
    """Lines of a batch."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class InputDetails(Struct, frozen=True):
    """Prompt tokens that the prefix cache gave."""

    cached_tokens: int = 0


class OutputDetails(Struct, frozen=True):
    """Tokens that a model thought with, where an engine tells them."""

    reasoning_tokens: int = 0


class BatchUsage(Struct, frozen=True):
    """Tokens of all lines that were answered."""

    input_tokens: int = 0
    input_tokens_details: InputDetails = InputDetails()
    output_tokens: int = 0
    output_tokens_details: OutputDetails = OutputDetails()
    total_tokens: int = 0


class Batch(Struct, kw_only=True):
    """A batch; times are Unix seconds."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    model: str | None = None
    errors: BatchProblems | None = None
    input_file_id: str
    completion_window: Literal["24h"] = "24h"
    status: Live | Ending = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = RequestCounts()
    usage: BatchUsage = BatchUsage()
    metadata: dict[str, str] | None = None


class BatchList(Struct, frozen=True):
    """The answer of GET /v1/batches."""

    data: list[Batch]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: Literal["list"] = "list"


class BatchRequest(Struct, frozen=True):
    """The body of POST /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: Literal["24h"]
    metadata: Annotated[dict[Key, Value], Meta(max_length=MAX_METADATA)] | None = None
    output_expires_after: ExpiresAfter | None = None


def _operation(
    method: str, path: str, summary: str, reply: Any, *errors: int, **more: Any
) -> Operation:
    errors = (400, 404, *errors, 507)
    return Operation(method, path, summary, reply, errors=errors, counting=NO_WORK, **more)


FORM = "multipart/form-data"
BINARY = "application/octet-stream"
UPLOADED = {"file": "lines.jsonl", "purpose": "batch"}
CREATED = {"input_file_id": "file-…", "endpoint": "/v1/embeddings", "completion_window": "24h"}
_UPLOAD: dict[str, Any] = {"bodies": ((FileUpload,),), "accepts": FORM, "example": UPLOADED}
_CREATE: dict[str, Any] = {"bodies": ((BatchRequest,),), "example": CREATED}
_RAW: dict[str, Any] = {"media_type": BINARY, "answers": (200, 206)}

UPLOAD = _operation("POST", "/v1/files", "Keeps a file.", FileObject, 408, 413, 429, **_UPLOAD)
FILES = _operation("GET", "/v1/files", "The files, a page of them.", FileList)
FILE = _operation("GET", "/v1/files/{file_id}", "One file.", FileObject)
CONTENT = _operation("GET", "/v1/files/{file_id}/content", "The content of a file.", None, **_RAW)
DELETE = _operation("DELETE", "/v1/files/{file_id}", "Deletes a file.", FileDeleted)
CREATE = _operation("POST", "/v1/batches", "Sends a file's lines.", Batch, 408, 413, **_CREATE)
BATCHES = _operation("GET", "/v1/batches", "The batches, a page of them.", BatchList)
BATCH = _operation("GET", "/v1/batches/{batch_id}", "One batch.", Batch)
CANCEL = _operation("POST", "/v1/batches/{batch_id}/cancel", "Ends a batch.", Batch, 409)
OPERATIONS = (UPLOAD, FILES, FILE, CONTENT, DELETE, CREATE, BATCHES, BATCH, CANCEL)
PREFIXES = ("/v1/files", "/v1/batches")
"""Beginnings of their paths."""
