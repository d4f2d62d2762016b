"""The end of a process: the client's threads come to rest before the interpreter is taken down.

The client answers on threads of its own. One that has handed over its last answer, and still has a Python
object to let go of, needs the interpreter once more; if that is being taken down by then, the thread is ended
in the middle of native code, and the whole process aborts, although all of its work was done. So the last
thing a process does is to give these threads the interpreter until each of them sleeps. One that waits for
the interpreter would have it, since nobody else has; so whoever sleeps now is done.
"""

from __future__ import annotations

import atexit
import time
from pathlib import Path

__all__ = ["rest_at_exit", "wait_for_rest"]

THREAD_NAME = "tokio-"
REST_S_MAX = 1.0
"""Longest wait at the end of a process, in seconds."""
STEP_S = 0.002
BLIND_S = 0.03
"""What is waited where a system does not tell what its threads do, in seconds."""


def rest_at_exit() -> None:
    """Wait at the end of this process. What is registered later, and may still use a store, comes before."""
    atexit.unregister(wait_for_rest)
    atexit.register(wait_for_rest)


def wait_for_rest(tasks: Path = Path("/proc/self/task")) -> None:
    """Return when every thread of the client sleeps, or after a second."""
    if not tasks.is_dir():
        time.sleep(BLIND_S)
        return
    ends = time.monotonic() + REST_S_MAX
    time.sleep(STEP_S)
    while any(_works(task) for task in tasks.iterdir()) and time.monotonic() < ends:
        time.sleep(STEP_S)


def _works(task: Path) -> bool:
    try:
        name, _, state = (task / "stat").read_text().partition("(")[2].rpartition(") ")
    except OSError:
        return False
    return name.startswith(THREAD_NAME) and not state.startswith("S")
