"""A memory store that misbehaves by script, and a clock that only moves when somebody sleeps."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence

from forebay.errors import OutcomeUnknown, PreconditionFailed, Unavailable
from forebay.kit.conditions import ANY
from forebay.storage import DeleteResult, MemoryStore, StoredObject
from forebay.storage._api import Buffer, When

Hook = Callable[[], Awaitable[None]]


class ManualClock:
    """Virtual time in a real loop: sleeping moves it at once."""

    def __init__(self) -> None:
        self.seconds = 1_000_000.0
        self.wall_ms = 1_700_000_000_000

    def now_ms(self) -> int:
        return self.wall_ms

    def monotonic(self) -> float:
        return self.seconds

    async def sleep(self, seconds: float) -> None:
        self.advance(seconds)
        await asyncio.sleep(0)

    def advance(self, seconds: float) -> None:
        self.seconds += seconds
        self.wall_ms += round(seconds * 1000)


class ScriptedStore(MemoryStore):
    """Puts to `path` follow `script`, one word each; further ones are honest.

    `ok`; `before`: nothing happens, `Unavailable`; `after`: it happens, the reply is lost; `lost`: it does
    not, and nobody can tell; `refused`: it happens, and is answered as a conflict, as a client does that
    repeated it on its own; `late`: it happens after the next read, which does not show it yet.
    """

    def __init__(self, path: str = "ingest/manifest", clock: ManualClock | None = None) -> None:
        super().__init__(clock)
        self._path = path
        self.script: deque[str] = deque()
        self.reads: deque[str] = deque()
        """The same for reads of `path`: `ok` or `before`."""
        self.counts: Counter[str] = Counter()
        """Requests by operation, those to `path` under `manifest.get` and so on."""
        self.before_put: Hook | None = None
        """Runs before each put to `path`."""
        self._late: list[tuple[str, bytes, When]] = []

    async def put(self, key: str, data: Buffer, when: When = ANY) -> str:
        mine = key == self._path
        self.counts["manifest.put" if mine else "put"] += 1
        if mine and self.before_put is not None:
            hook, self.before_put = self.before_put, None
            await hook()
        word = self.script.popleft() if mine and self.script else "ok"
        if word == "before":
            raise Unavailable("scripted")
        if word == "late":
            self._late.append((key, bytes(data), when))
        if word in ("lost", "late"):
            raise OutcomeUnknown("put", reason="scripted")
        version = await super().put(key, data, when)
        if word == "after":
            raise OutcomeUnknown("put", reason="scripted")
        if word == "refused":
            raise PreconditionFailed(key, expected=when)
        return version

    async def get(self, key: str) -> StoredObject:
        mine = key == self._path
        self.counts["manifest.get" if mine else "get"] += 1
        if mine and self.reads and self.reads.popleft() == "before":
            raise Unavailable("scripted")
        try:
            return await super().get(key)
        finally:
            await self._arrive()

    async def get_if_changed(self, key: str, version: str) -> StoredObject | None:
        found = await self.get(key)
        if key == self._path and found.version == version:
            self.counts["manifest.unchanged"] += 1
        return None if found.version == version else found

    async def _arrive(self) -> None:
        late, self._late = self._late, []
        for key, data, when in late:
            try:
                await super().put(key, data, when)
            except PreconditionFailed:
                self.counts["late refused"] += 1

    async def delete(self, keys: Sequence[str]) -> list[DeleteResult]:
        self.counts["delete"] += 1
        return await super().delete(keys)
