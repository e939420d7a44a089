"""Commands, waiting, locks, and the progress printed while they run."""

import contextlib
import fcntl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from sluice_cluster.settings import LocalClusterError

Word = str | Path  # one part of a command
STARTED = time.monotonic()
PROGRESS_SECONDS = 5.0


def say(message: str) -> None:
    """Print one line of progress, with the seconds since the command started."""
    print(f"[{time.monotonic() - STARTED:6.1f}s] {message}", file=sys.stderr, flush=True)


def run(
    command: Sequence[Word],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdin: str | None = None,
    check: bool = True,
    timeout: float = 600.0,
) -> str:
    """Standard output of `command`. ClusterError with the end of its error output if it fails."""
    name = Path(command[0]).name
    try:
        done = subprocess.run(
            [str(part) for part in command],
            env=None if env is None else dict(env),
            cwd=cwd,
            input=stdin if stdin is not None else "",
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    except FileNotFoundError as error:
        raise LocalClusterError(f"the command {name} is not installed") from error
    except subprocess.TimeoutExpired as error:
        raise LocalClusterError(f"{name} did not finish within {timeout:.0f} s") from error
    if check and done.returncode != 0:
        tail = (done.stderr or done.stdout).strip()[-2000:]
        raise LocalClusterError(f"{' '.join(map(str, command))} failed: {tail}")
    return done.stdout


def succeeds(command: Sequence[Word], timeout: float = 30.0) -> bool:
    """True if `command` exists and exits 0."""
    try:
        run(command, timeout=timeout)
    except LocalClusterError:
        return False
    return True


def run_visibly(
    what: str,
    command: Sequence[Word],
    log: Path,
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    describe: Callable[[list[str]], str] = lambda lines: lines[-1][:70] if lines else "started",
) -> None:
    """Run a command of minutes: a line of progress every few seconds, its output in `log`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            [str(part) for part in command],
            env=None if env is None else dict(env),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        code = _watch(process, what, log, describe)
    if code != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise LocalClusterError(f"{what} failed (the whole output is in {log}):\n{tail}")
    say(f"{what}: done in {time.monotonic() - started:.0f} s")


def _watch(
    process: subprocess.Popen[bytes], what: str, log: Path, describe: Callable[[list[str]], str]
) -> int:
    started = time.monotonic()
    try:
        while True:
            try:
                return process.wait(timeout=PROGRESS_SECONDS)
            except subprocess.TimeoutExpired:
                lines = log.read_text(errors="replace").splitlines()
                say(f"{what}: {time.monotonic() - started:.0f} s, {describe(lines)}")
    except BaseException:
        process.terminate()
        process.wait()
        raise


def wait_until(
    what: str, holds: Callable[[], bool], seconds: float, *, why_not: Callable[[], str] = str
) -> None:
    """Ask `holds` ten times a second until it is true; ClusterError after `seconds`."""
    deadline = time.monotonic() + seconds
    pause = threading.Event()
    while not holds():
        if time.monotonic() > deadline:
            raise LocalClusterError(f"{what}: not within {seconds:.0f} s. {why_not()}".strip())
        pause.wait(0.1)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """One holder at a time on this machine; a process that waits says so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another run of this command ({path})")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def write_whole(file: Path, text: str) -> None:
    """Write `text` at once: if the process is killed meanwhile, the file stays as it was."""
    file.parent.mkdir(parents=True, exist_ok=True)
    staging = file.with_suffix(".new")
    staging.write_text(text)
    staging.replace(file)


def tail(path: Path) -> str:
    """The last lines of a log, or nothing if there is no such file."""
    if not path.exists():
        return ""
    return "\n".join(path.read_text(errors="replace").splitlines()[-8:])
