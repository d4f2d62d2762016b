"""How many connections the limit on open files has room for.

A connection is an open file, and so is every object that is being written. Where connections may take all of
them, whoever opens a thousand and sends nothing keeps everybody from appending: the usual limit of a process
is 1,024. So the limit is raised as far as it may be, and connections get what the store does not need.
"""

from __future__ import annotations

import contextlib
import resource
from typing import Final

__all__ = ["FILES_KEPT", "connections_that_fit"]

FILES_KEPT: Final = 512
"""Open files that are left to the store, the coordinator and refusals; of a low limit, half of it."""


def connections_that_fit(wanted: int) -> int:
    """Raise the limit on open files for so many connections; how many there is room for."""
    needed = wanted + FILES_KEPT
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        reached = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        with contextlib.suppress(ValueError, OSError):  # Not allowed here: then it stays as it is.
            resource.setrlimit(resource.RLIMIT_NOFILE, (reached, hard))
            soft = reached
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    return min(wanted, max(soft - FILES_KEPT, soft // 2))
