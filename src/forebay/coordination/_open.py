"""From a URL to a coordinator. Nothing here talks to a network: a dead server shows at the first call.

memory://                        keys of this one object
memory://NAME                    keys shared by everything in this process that opens NAME
sqlite:///absolute/file.db       keys of all processes of this machine, in one file
sqlite:///./relative/file.db
DIRECTORY                        the same, in DIRECTORY/.forebay/coordination.db
oxia://HOST:PORT/NAMESPACE       keys of a deployment, on an Oxia server
"""

from __future__ import annotations

import os
import threading
import urllib.parse
from pathlib import Path

from forebay.coordination._api import Coordinator
from forebay.coordination._memory import MemoryCoordinator
from forebay.coordination._memory_state import MemoryState
from forebay.coordination._sqlite import SqliteCoordinator
from forebay.coordination._sqlite_file import make_durable_directory
from forebay.errors import InvalidUrl, Unsupported
from forebay.kit.clock import SystemClock

__all__ = ["is_there", "open_coordinator"]

DATABASE_IN_DIRECTORY = Path(".forebay") / "coordination.db"
"""Where the embedded coordinator of a data directory keeps its keys."""

_KNOWN = "memory://, sqlite:///path.db, a directory, oxia://host:port/namespace"
_OXIA_MODULES = ("grpc", "google", "xxhash")

_shared: dict[str, MemoryState] = {}
_shared_lock = threading.Lock()


def open_coordinator(url: str | os.PathLike[str]) -> Coordinator:
    """Open what `url` names. Opens files, but no connections; close the coordinator when done."""
    text = os.fspath(url)
    if not text or "\0" in text:
        raise InvalidUrl(f"{url!r} is no coordinator", hint=f"use one of {_KNOWN}")
    scheme, separator, rest = text.partition("://")
    if not separator or isinstance(url, os.PathLike):
        if isinstance(url, str):
            _refuse_half_a_scheme(url)
        return _open_directory(Path(os.path.expanduser(text)))  # noqa: PTH111 - the same path as that of a store
    if scheme == "memory":
        return _open_memory(rest, text)
    if scheme == "sqlite":
        return SqliteCoordinator(_sqlite_path(rest, text), url=text)
    if scheme == "oxia":
        return _open_oxia(text)
    raise InvalidUrl(f"unknown coordinator scheme {scheme[:50]!r}", hint=f"use one of {_KNOWN}")


def is_there(url: str | os.PathLike[str]) -> bool:
    """Whether opening it makes no file: for who only reads. A server counts as there, and so does memory."""
    text = os.fspath(url)
    scheme, separator, rest = text.partition("://")
    if not separator or isinstance(url, os.PathLike):
        return (Path(os.path.expanduser(text)) / DATABASE_IN_DIRECTORY).is_file()  # noqa: PTH111 - as above
    return scheme != "sqlite" or Path(_sqlite_path(rest, text)).is_file()


def _refuse_half_a_scheme(path: str) -> None:
    """`oxia:host:6648` would quietly be an embedded database that no other machine sees."""
    scheme = path.partition(":")[0]
    if ":" in path and scheme in ("memory", "sqlite", "oxia"):
        raise InvalidUrl(
            f"{path[:200]!r} is neither a URL nor a plain path",
            hint=f"use one of {_KNOWN}; for a directory of that name write ./{scheme}:",
        )


def _open_memory(name: str, url: str) -> Coordinator:
    if not name:
        return MemoryCoordinator()
    if not all(letter.isalnum() or letter in "-_." for letter in name):
        raise InvalidUrl(f"{url!r}: not a plain name", hint="use letters, digits, '-', '_' and '.'")
    with _shared_lock:
        state = _shared.setdefault(name, MemoryState(SystemClock()))
    return MemoryCoordinator(state=state, url=url)


def _sqlite_path(rest: str, url: str) -> str:
    path = urllib.parse.unquote(rest)
    if "?" in rest or "#" in rest:
        raise InvalidUrl(f"{url!r}: a sqlite URL takes no options", hint="write %3F and %23 for ? and #")
    if not path.startswith("/") or path.endswith("/") or "\0" in path:
        raise InvalidUrl(
            f"{url!r} names no file",
            hint="three slashes: sqlite:///absolute/file.db or sqlite:///./relative.db",
        )
    return path[1:] if path.startswith(("/./", "/../")) else path


def _open_directory(directory: Path) -> Coordinator:
    directory = directory.absolute()
    path = directory / DATABASE_IN_DIRECTORY
    make_durable_directory(path.parent)
    return SqliteCoordinator(path, url=str(directory))


def _open_oxia(url: str) -> Coordinator:
    try:
        from forebay.coordination._oxia import open_oxia
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _OXIA_MODULES:
            raise
        raise Unsupported(
            f"{error.name} is not installed, which oxia:// needs", hint="pip install 'forebay[oxia]'"
        ) from error
    coordinator: Coordinator = open_oxia(url)
    return coordinator
