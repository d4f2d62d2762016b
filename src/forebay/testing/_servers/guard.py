"""A watchman for child processes: what a test run started dies with it, however the run ends.

Context managers and fixtures end their children in every ordinary case. They cannot when the test process
itself is killed. `PR_SET_PDEATHSIG` would be the kernel's answer, but it follows the *thread* that forked, so
a server started from a pool thread dies with that thread. Instead one small process per test process reads a
pipe: a line `+pid` adds a child, `-pid` forgets it, and the end of the pipe, which the kernel makes when the
test process is gone, kills whatever is left. Children are held by pidfd, so a recycled number is never hit.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import sys
import threading
from typing import BinaryIO

__all__ = ["forget", "watch"]

_lock = threading.Lock()
_watchmen: dict[int, subprocess.Popen[bytes]] = {}
"""By the process that started them: after a fork the child needs a watchman of its own."""


def watch(pid: int) -> None:
    """Kill `pid`, a child of this process, when this process is gone."""
    _tell(f"+{pid}\n")


def forget(pid: int) -> None:
    """Let go of a child that has ended."""
    _tell(f"-{pid}\n")


def _tell(line: str) -> None:
    with _lock:
        own = _watchmen.get(os.getpid()) or _start()
        assert own.stdin is not None
        # A watchman that somebody killed costs only the safety net, never the test.
        with contextlib.suppress(BrokenPipeError):
            own.stdin.write(line.encode())
            own.stdin.flush()


def _start() -> subprocess.Popen[bytes]:
    # The file is run as a script, isolated and without site packages: it needs nothing, and starts in a
    # fraction of the time. A session of its own keeps Ctrl-C from ending it before its work is done.
    command = [sys.executable, "-I", "-S", __file__]
    own = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    _watchmen[os.getpid()] = own
    atexit.register(_dismiss, os.getpid())
    return own


def _dismiss(owner: int) -> None:
    own = _watchmen.pop(owner, None)
    if own is not None and owner == os.getpid() and own.stdin is not None:
        with contextlib.suppress(BrokenPipeError):
            own.stdin.close()
        own.wait()


def _stand_watch(lines: BinaryIO) -> None:
    held: dict[int, int] = {}
    for line in lines:
        pid = int(line[1:])
        if line.startswith(b"+"):
            with contextlib.suppress(ProcessLookupError):
                held[pid] = os.pidfd_open(pid)
        elif pid in held:
            os.close(held.pop(pid))
    for descriptor in held.values():
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)


if __name__ == "__main__":
    _stand_watch(sys.stdin.buffer)
