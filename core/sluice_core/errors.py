"""Everything that a worker refuses or fails with, as one tree.

SluiceError
├── StartupError                exit code 2, before or instead of serving
│   ├── ConfigError             flags, files
│   ├── CheckpointError         missing, not safetensors, truncated, wrong shape
│   ├── DownloadError           the hub refuses, is away, or there is no room
│   ├── UnsupportedModel        an architecture or option that is not built
│   └── DoesNotFit              the memory arithmetic says no
├── RequestError           400  what a caller can put right
│   ├── UnsupportedParameter
│   ├── ContextLengthExceeded   prompt + output over the window
│   ├── KvCapacityExceeded      could never fit in the KV pool
│   ├── Unauthorized       401
│   ├── ModelNotFound      404
│   ├── NotKept            404
│   ├── RequestTimeout     408
│   ├── StaleEpoch         409
│   ├── IsOver             409
│   ├── BodyTooLarge       413
│   └── OverCeiling        422
├── Overloaded             429  retry later
│   ├── QueueFull
│   │   └── TooManyOpen         its body was not read
│   ├── Shed                    the first-token target is already out of reach
│   └── DeadlineUnreachable     so is the request's own
├── Unavailable            503  retry elsewhere
│   ├── NotReady
│   ├── Draining
│   └── EngineDied
├── RequestFailed          500  this one request failed in the engine
└── NotStored              507  the directory of files cannot be written
"""

from datetime import UTC, datetime
from signal import Signals
from typing import ClassVar

from .words import clean

MAX_TOLD = 200


class SluiceError(Exception):
    """One sentence for a person, an HTTP status and a stable code for a program.

    The sentence may quote a client, an engine or a model's files, so it is cleaned.
    `exit_status`: of a process that ends by it. `param` names the request field at fault.
    `retry_after_s` becomes the Retry-After header.
    """

    http_status: ClassVar[int] = 500
    exit_status: ClassVar[int] = 1
    kind: ClassVar[str] = (
        "InternalServerError"  # the `type` of an OpenAI error body, as vLLM spells it
    )
    code: ClassVar[str] = "internal_error"

    def __init__(
        self, message: str, *, param: str | None = None, retry_after_s: int | None = None
    ) -> None:
        self.message = clean(message)
        super().__init__(self.message)
        self.param = None if param is None else clean(param, MAX_TOLD)
        self.retry_after_s = retry_after_s


class StartupError(SluiceError):
    """The worker cannot start."""

    exit_status = 2


class ConfigError(StartupError):
    """Flags or files that contradict; `problems` holds one sentence each."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = tuple(map(clean, problems))
        super().__init__("")
        self.message = "\n".join(self.problems)
        self.args = (self.message,)


class CheckpointError(StartupError):
    """The checkpoint directory is missing, incomplete, malformed or not safetensors."""


class DownloadError(StartupError):
    """The model could not be brought from the hub; what has come is kept for the next start."""


class UnsupportedModel(StartupError):
    """The checkpoint is sound, but this engine cannot run it."""


class DoesNotFit(StartupError):
    """Weights, activations and one sequence of KV cache need more memory than there is."""


class RequestError(SluiceError):
    """The caller can put this right."""

    http_status = 400
    kind = "BadRequestError"
    code = "invalid_request"


class UnsupportedParameter(RequestError):
    """A known parameter with a value that is not built: refused, never ignored."""

    code = "unsupported_parameter"


class ContextLengthExceeded(RequestError):
    """The prompt, or a length that was asked for, is over the model's window."""

    code = "context_length_exceeded"


class KvCapacityExceeded(RequestError):
    """The request could never fit in the KV pool."""

    code = "kv_capacity_exceeded"


class Unauthorized(RequestError):
    """No bearer token, or a wrong one."""

    http_status = 401
    kind = "AuthenticationError"
    code = "unauthorized"


class NotOffered(RequestError):
    """A route that would change the server for all its clients."""

    http_status = 403
    kind = "PermissionDeniedError"
    code = "not_offered"


class ModelNotFound(RequestError):
    """`model` is not the one served here."""

    http_status = 404
    kind = "NotFoundError"
    code = "model_not_found"


class NotKept(RequestError):
    """No file and no batch of this name is kept here for this client."""

    http_status = 404
    kind = "NotFoundError"
    code = "not_found"


class MethodNotAllowed(RequestError):
    """No server has this method."""

    http_status = 405
    kind = "MethodNotAllowedError"
    code = "method_not_allowed"


class RequestTimeout(RequestError):
    """The body did not arrive within the receive deadline."""

    http_status = 408
    kind = "RequestTimeoutError"
    code = "request_timeout"


class StaleEpoch(RequestError):
    """A runtime patch older than the one in force."""

    http_status = 409
    kind = "ConflictError"
    code = "stale_epoch"


class IsOver(RequestError):
    """A batch that has ended cannot be cancelled."""

    http_status = 409
    kind = "ConflictError"
    code = "is_over"


class BodyTooLarge(RequestError):
    """The body is over the cap; what was left of it was not read."""

    http_status = 413
    kind = "RequestEntityTooLargeError"
    code = "body_too_large"


class OverCeiling(RequestError):
    """A runtime patch over what the buffers were sized for."""

    http_status = 422
    kind = "UnprocessableEntityError"
    code = "over_ceiling"


class Overloaded(SluiceError):
    """Too much work here and now; retry after `retry_after_s`."""

    http_status = 429
    kind = "RateLimitError"
    code = "overloaded"


class QueueFull(Overloaded):
    """The queue has reached --max-num-queued-reqs or --max-num-queued-tokens."""

    code = "queue_full"


class TooManyOpen(QueueFull):
    """More requests are open than may ever run and wait; its body was not read."""


class Shed(Overloaded):
    """The first-token target can no longer be met, and overload is Shed."""

    code = "shed"


class DeadlineUnreachable(Overloaded):
    """A latency that the request asks for cannot be kept here and now."""

    code = "deadline_unreachable"


class Unavailable(SluiceError):
    """This worker does not serve now; another one may."""

    http_status = 503
    kind = "ServiceUnavailableError"
    code = "unavailable"


class NotReady(Unavailable):
    """The engine is still starting."""

    code = "not_ready"


class Draining(Unavailable):
    """The worker is shutting down: no new work, and no more time for what is open."""

    code = "draining"


class EngineDied(Unavailable):
    """The engine process ended; open requests cannot be finished."""

    code = "engine_died"


class RequestFailed(SluiceError):
    """The engine failed this one request."""

    code = "request_failed"


class NotStored(SluiceError):
    """The disk is full, or away; what is there is kept."""

    http_status = 507
    kind = "InsufficientStorageError"
    code = "not_stored"


def told(error: Exception) -> str:
    """An unexpected error's type and first line, short enough for a pod's status. CUDA's errors
    continue with advice for developers; the traceback has all of it."""
    line = next(iter(str(error).splitlines()), "")
    return clean(f"{type(error).__name__}: {line}", MAX_TOLD)


def timestamp(unix_s: float) -> str:
    """Unix time as Kubernetes writes it."""
    return datetime.fromtimestamp(int(unix_s), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def signal_name(number: int) -> str:
    """A signal in a sentence: `signal 9 (SIGKILL)`."""
    try:
        return f"signal {number} ({Signals(number).name})"
    except ValueError:  # a real-time one, or another system's
        return f"signal {number}"
