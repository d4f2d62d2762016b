"""What vacuum remembers between two runs: since when an object has been without a name.

    llog-catalog/vacuum-marks    {"revision", "log", "first_ms": {key: milliseconds since the Unix epoch}}

One object, replaced by compare-and-set. Losing it costs time, not data: everything is marked anew. Marks of
two vacuums that ran at once are joined, since each mark is true by itself.

`log` is the name of the log whose coordinator was asked (`log_identity`). Asked for its references, the
coordinator of another log names none of these objects, and so does one that was lost and begun anew: whoever
comes with another name than the marks have is refused before it can take everything for garbage.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

import msgspec

from forebay.errors import NotFound, OutcomeUnknown, PreconditionFailed, Unavailable, UsageError
from forebay.kit.ids import IdSource
from forebay.storage import ABSENT, ObjectStore
from forebay.storage._api import When

__all__ = ["MARKS_KEY", "Marks", "MarksStore"]

MARKS_KEY: Final = "llog-catalog/vacuum-marks"
_ROUNDS_MAX: Final = 5


class _Stored(msgspec.Struct):
    revision: str
    first_ms: dict[str, int]
    log: str = ""
    """Empty: stored before there was such a name."""


@dataclass(frozen=True, slots=True)
class Marks:
    """Since when each object has been without a name."""

    first_ms: dict[str, int]
    version: When


class MarksStore:
    """Reads and replaces the marks."""

    def __init__(self, store: ObjectStore, ids: IdSource, log: Callable[[], Awaitable[str]]) -> None:
        """`log` tells which log is asked for what it names."""
        self._store = store
        self._ids = ids
        self._log = log

    async def load(self) -> Marks:
        """The marks; none where there are none, or where they cannot be read. Raises for another log's."""
        try:
            found = await self._store.get(MARKS_KEY)
        except NotFound:
            return Marks({}, ABSENT)
        try:
            stored = msgspec.json.decode(found.data, type=_Stored)
        except msgspec.MsgspecError:
            return Marks({}, found.version)
        if stored.log and stored.log != await self._log():
            raise UsageError(
                f"the objects in {self._store.url} belong to another log than this coordinator's",
                hint=f"check the coordinator; if it is the right one, delete the object {MARKS_KEY}",
            )
        return Marks(stored.first_ms, found.version)

    async def replace(self, before: Marks, marks: dict[str, int], marks_max: int) -> None:
        """Replace what `load` returned; if another vacuum came in between, keep its marks as well."""
        for _ in range(_ROUNDS_MAX):
            body = msgspec.json.encode(_Stored(self._ids.token(), marks, await self._log()))
            try:
                await self._store.put(MARKS_KEY, body, before.version)
            except (PreconditionFailed, OutcomeUnknown):
                before = await self.load()
                marks = dict(list({**marks, **before.first_ms}.items())[:marks_max])
            else:
                return
        raise Unavailable(
            "the marks of vacuum could not be stored", hint="let one vacuum run at a time, then run it again"
        )
