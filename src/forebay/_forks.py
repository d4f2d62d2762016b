"""Whether this process may connect to a service: not where its parent did so before the fork.

The clients of buckets and of Oxia run on threads of native code, one set per process, started with the first
use and there until the end. A forked child has their locks and queues but none of the threads: its calls wait
for ever, or the process dies on a signal. No Python code can mend that, so the child is told at once, and
what to do instead. Directories, memory and the embedded coordinator need no such threads.
"""

from __future__ import annotations

import os
from typing import Final

from forebay.errors import UsageError

__all__ = ["check_not_forked"]

_LOCAL: Final = frozenset({"", "file", "memory", "sqlite"})


class _Process:
    connected = False
    inherited = False


def check_not_forked(*urls: str | os.PathLike[str] | None) -> None:
    """Raise `UsageError` in a child that inherited a client of a service and is about to open another."""
    schemes = {os.fspath(url).partition("://")[0] if "://" in os.fspath(url) else "" for url in urls if url}
    if not {scheme.lower() for scheme in schemes} - _LOCAL:
        return
    if _Process.inherited:
        raise UsageError(
            "this process was forked from one that had connected to a bucket or to Oxia",
            hint="fork before connecting, or start workers by multiprocessing.get_context('spawn')",
        )
    _Process.connected = True


def _forked() -> None:
    _Process.inherited = _Process.connected or _Process.inherited


os.register_at_fork(after_in_child=_forked)
