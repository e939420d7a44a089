"""Log lines as JSON events. No prompt, token or secret is ever given to a logger."""

import json
import logging
import sys
import time

from sluice_core.errors import ConfigError

_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}
PACKAGES = ("sluice_frontend", "sluice_gate", "sluice_worker")
"""The packages whose events are told."""
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


class EventFormatter(logging.Formatter):
    """One JSON object a line: time, level, event, and the fields passed as `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        event = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **fields_of(record),
        }
        if record.exc_info:
            event["traceback"] = self.formatException(record.exc_info)
        return json.dumps(event, default=str)


def fields_of(record: logging.LogRecord) -> dict[str, object]:
    """The fields that were passed as `extra`."""
    return {k: v for k, v in record.__dict__.items() if k not in _STANDARD}


def install(level: str = "INFO", formatter: logging.Formatter | None = None) -> None:
    """Events go to standard error, as JSON if not told otherwise; libraries speak from warnings.

    Raises ConfigError for an unknown `level`; upper and lower case are equal.
    """
    if level.upper() not in _LEVELS:
        problem = f"SLUICE_LOG_LEVEL must be one of {', '.join(_LEVELS)}, not {level!r}"
        raise ConfigError([problem])
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter or EventFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for package in PACKAGES:
        logging.getLogger(package).setLevel(level.upper())
