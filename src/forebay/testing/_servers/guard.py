"""A watchman for child processes: what a test run started dies with it, however the run ends.

Context managers and fixtures end their children in every ordinary case. They cannot when the test process
itself is killed. `PR_SET_PDEATHSIG` would be the kernel's answer, but it follows the *thread* that forked, so
a server started from a pool thread dies with that thread. Instead one small process per test process reads a
pipe: a line of JSON adds a child or lets go of it, and the end of the pipe, which the kernel makes when the
test process is gone, kills whatever is left and removes its temporary files. Children are held by pidfd, so
a recycled number is never hit.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

__all__ = ["forget", "watch"]

_lock = threading.Lock()
_watchmen: dict[int, subprocess.Popen[bytes]] = {}
"""By the process that started them: after a fork the child needs a watchman of its own."""


def watch(pid: int, leftovers: Sequence[Path] = ()) -> None:
    """Kill `pid`, a child of this process, when this process is gone, and remove its files."""
    _tell({"watch": pid, "leftovers": [str(path.absolute()) for path in leftovers]})


def forget(pid: int) -> None:
    """Let go of a child that has ended."""
    _tell({"forget": pid})


def _tell(news: dict[str, object]) -> None:
    with _lock:
        own = _watchmen.get(os.getpid()) or _start()
        assert own.stdin is not None
        # A watchman that somebody killed costs only the safety net, never the test.
        with contextlib.suppress(BrokenPipeError):
            own.stdin.write(json.dumps(news).encode() + b"\n")
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
    held: dict[int, tuple[int, list[str]]] = {}
    for line in lines:
        news = json.loads(line)
        if "watch" in news:
            with contextlib.suppress(ProcessLookupError):
                held[news["watch"]] = os.pidfd_open(news["watch"]), news["leftovers"]
        elif news["forget"] in held:
            os.close(held.pop(news["forget"])[0])
    for descriptor, leftovers in held.values():
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        select.select([descriptor], [], [])  # Readable once it has ended: nothing writes any more.
        for path in leftovers:
            shutil.rmtree(path, ignore_errors=True)
            with contextlib.suppress(OSError):
                os.unlink(path)  # noqa: PTH108 (a socket, which rmtree leaves alone)


if __name__ == "__main__":
    _stand_watch(sys.stdin.buffer)
