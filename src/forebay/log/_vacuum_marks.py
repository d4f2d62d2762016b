"""What vacuum remembers between two runs: since when an object has been without a name.

    llog-catalog/vacuum-marks    {"revision", "first_ms": {key: milliseconds since the Unix epoch}}

One object, replaced by compare-and-set. Losing it costs time, not data: everything is marked anew. Marks of
two vacuums that ran at once are joined, since each mark is true by itself.

Asked for its references, the coordinator of another log names none of these objects. So neither are marks
read nor left before store and coordinator are seen to belong together (`LogPair`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec

from forebay.errors import NotFound, OutcomeUnknown, PreconditionFailed, Unavailable
from forebay.kit.ids import IdSource
from forebay.log._identity import LogPair
from forebay.storage import ABSENT, ObjectStore
from forebay.storage._api import When

__all__ = ["MARKS_KEY", "Marks", "MarksStore"]

MARKS_KEY: Final = "llog-catalog/vacuum-marks"
_ROUNDS_MAX: Final = 5


class _Stored(msgspec.Struct):
    revision: str
    first_ms: dict[str, int]


@dataclass(frozen=True, slots=True)
class Marks:
    """Since when each object has been without a name."""

    first_ms: dict[str, int]
    version: When


class MarksStore:
    """Reads and replaces the marks."""

    def __init__(self, store: ObjectStore, ids: IdSource, pair: LogPair) -> None:
        self._store = store
        self._ids = ids
        self._pair = pair

    async def load(self) -> Marks:
        """The marks; none where there are none, or where they cannot be read. Raises for another log's."""
        await self._pair.check()
        try:
            found = await self._store.get(MARKS_KEY)
        except NotFound:
            return Marks({}, ABSENT)
        try:
            stored = msgspec.json.decode(found.data, type=_Stored)
        except msgspec.MsgspecError:
            return Marks({}, found.version)
        return Marks(stored.first_ms, found.version)

    async def replace(self, before: Marks, marks: dict[str, int], marks_max: int) -> None:
        """Replace what `load` returned; if another vacuum came in between, keep its marks as well."""
        await self._pair.claim()
        for _ in range(_ROUNDS_MAX):
            body = msgspec.json.encode(_Stored(self._ids.token(), marks))
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
