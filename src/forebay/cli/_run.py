"""From a command, which is a plain function, into the asynchronous core and back."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["wait_for"]

T = TypeVar("T")


def wait_for(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end on a loop of its own. Ctrl-C cancels it, so that what it opened is closed."""
    return asyncio.run(work)
