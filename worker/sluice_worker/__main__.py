"""`sluice-worker`: one model over HTTP, with or without Kubernetes."""

import os
import sys
from collections.abc import Sequence

import uvloop

from .config import parse
from .errors import ConfigError, StartupError
from .server import logs
from .server.run import serve


def main(argv: Sequence[str] | None = None) -> int:
    """Run a worker until it is told to leave. Exit status 0, 1 (engine died), 2 (cannot start)."""
    logs.install(os.environ.get("SLUICE_LOG_LEVEL", "INFO"))
    try:
        config = parse(sys.argv[1:] if argv is None else argv)
        return uvloop.run(serve(config))
    except ConfigError as error:
        for problem in error.problems:
            print(f"sluice-worker: {problem}", file=sys.stderr)
        return error.exit_status
    except StartupError as error:
        print(f"sluice-worker: {error.message}", file=sys.stderr)
        return error.exit_status


if __name__ == "__main__":
    sys.exit(main())
