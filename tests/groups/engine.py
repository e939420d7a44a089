"""An engine in parts: the first pod of a group serves once the others have joined it.

Its own source is the program of its pods. As with real ones, the end of a part is the end of all.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time

PORT = 7000


def lead(arguments: list[str]) -> int:
    """Wait for the others, then serve; 1 once one of them is gone."""
    with socket.create_server(("", PORT)) as door:
        others = [door.accept()[0] for _ in range(int(os.environ["LWS_GROUP_SIZE"]) - 1)]
        engine = subprocess.Popen(["sluice-worker", *arguments])
        signal.signal(signal.SIGTERM, lambda *_: engine.terminate())
        for other in others:
            threading.Thread(target=_ends_with, args=(other, engine), daemon=True).start()
        return engine.wait()


def _ends_with(other: socket.socket, engine: "subprocess.Popen[bytes]") -> None:
    if not other.recv(1):
        engine.kill()


def follow() -> int:
    """Join the first pod, and stay while it is there."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    while True:
        try:
            first = socket.create_connection((os.environ["LWS_LEADER_ADDRESS"], PORT), 5)
            break
        except OSError:
            time.sleep(0.5)
    first.settimeout(None)
    first.recv(1)
    return 1


if __name__ == "__main__":
    sys.exit(lead(sys.argv[1:]) if os.environ["LWS_WORKER_INDEX"] == "0" else follow())
