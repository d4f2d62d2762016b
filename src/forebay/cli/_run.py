"""From a command, which is a plain function, into the asynchronous core and back."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import signal
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

__all__ = ["hold_endings", "on_ending", "wait_for"]

T = TypeVar("T")

ENDINGS: Final = (signal.SIGTERM, signal.SIGINT)


def wait_for(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end on a loop of its own. Ctrl-C cancels it, so that what it opened is closed."""
    return asyncio.run(work)


def on_ending(asked: Callable[[], object]) -> None:
    """Call `asked` on the running loop whenever SIGTERM or Ctrl-C comes, for as long as the process lives.

    Handlers of a loop go with the loop. The process takes a while longer to end, and a second signal in that
    time would end it with -15, in the place of its own exit code.
    """
    loop = asyncio.get_running_loop()

    def handle(*_: object) -> None:
        with contextlib.suppress(RuntimeError):  # The loop is closed, and the process ends already.
            loop.call_soon_threadsafe(asked)

    hold_endings(handle)


def hold_endings(handle: Callable[..., object]) -> None:
    """The same for a command without a loop: `handle` is a handler of Python's."""
    for number in ENDINGS:
        signal.signal(number, handle)
    atexit.register(_ignore)


def _ignore() -> None:
    """For the last steps of the interpreter, before which it takes its handlers away."""
    for number in ENDINGS:
        signal.signal(number, signal.SIG_IGN)
