"""Which log this is: a random name that a deployment is given once, by whoever asks first.

Two deployments may use one directory for a cache, and one deployment may be removed and made again at the
same place; topics, partitions and offsets are then the same, and the records are not. Whatever is kept
outside of the coordinator and the store is therefore kept under this name.

The store has the name too, as an object that is put with the first topic. A log is a pair: its keys say what
its objects are. A coordinator that was lost and begun anew, or one of another log that somebody named by
mistake, knows nothing of these objects, so its vacuum takes them for garbage, its deletions take what is
called alike, and what is appended through it lands where its readers do not look. `LogPair` tells before any
of this. It costs a request or two where topics are made and deleted, where a vacuum begins, and with the
first flush of a writer; none after that.

Only who creates a topic, or has seen the vacuum to know this log, puts the name into a store that has none.
Everybody else compares: a wrong coordinator must not take a store over by looking at it.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Final

from forebay.coordination import Coordinator
from forebay.errors import (
    AccessDenied,
    NotFound,
    OutcomeUnknown,
    PreconditionFailed,
    StorageDamaged,
    Unavailable,
)
from forebay.kit.clock import Clock
from forebay.kit.conditions import ABSENT
from forebay.kit.ids import IdSource
from forebay.kit.retry import RetryPolicy, retry
from forebay.log._errors import AnotherLog
from forebay.log._keys import CATALOG_PARTITION_KEY, IDENTITY_KEY, IDENTITY_OBJECT
from forebay.storage import ObjectStore

__all__ = ["LogPair", "log_identity"]

_POLICY: Final = RetryPolicy(attempts_max=8, base_ms=20, cap_ms=500)
_NAME: Final = re.compile(rb"[0-9a-f]{32}")


async def log_identity(
    coordinator: Coordinator, *, clock: Clock, ids: IdSource, randomness: random.Random
) -> str:
    """The name of the log behind this coordinator: 32 hexadecimal digits. One request, two the first time."""
    return await retry(
        lambda: _given(coordinator, ids),
        policy=_POLICY,
        clock=clock,
        randomness=randomness,
        # Refused or not known: somebody may have been first, also ourselves. The next look tells.
        retryable=lambda error: isinstance(error, Unavailable | OutcomeUnknown | PreconditionFailed),
    )


async def _given(coordinator: Coordinator, ids: IdSource) -> str:
    """One attempt: the name, made up where there is none."""
    name = await _kept(coordinator)
    if name is None:
        name = ids.token()
        await coordinator.put(IDENTITY_KEY, name.encode(), ABSENT, partition_key=CATALOG_PARTITION_KEY)
    return name


async def _kept(coordinator: Coordinator) -> str | None:
    found = await coordinator.get(IDENTITY_KEY, partition_key=CATALOG_PARTITION_KEY)
    return None if found is None else _checked(IDENTITY_KEY, found.value)


def _checked(key: str, value: bytes) -> str:
    # It becomes the name of a directory, so nothing else will do.
    if not _NAME.fullmatch(value):
        raise StorageDamaged(
            f"{key!r} holds no name of a log", hint="something else wrote this key; delete it"
        )
    return value.decode()


class LogPair:
    """A store and a coordinator that should belong together. Callers try again what fails on the way."""

    def __init__(self, store: ObjectStore, coordinator: Coordinator, ids: IdSource) -> None:
        self._store = store
        self._coordinator = coordinator
        self._ids = ids
        self._claimed = False
        self.on_put: Callable[[], None] = lambda: None
        """Hears of the put, for those who count what they send."""

    async def check(self) -> None:
        """Raise `AnotherLog` where the store has the name of another log. Changes nothing."""
        named = await self._stored()
        if named is not None:
            self._compare(named, await _kept(self._coordinator))

    async def claim(self) -> None:
        """`check`, and give the store its name where it has none."""
        if self._claimed:
            return
        try:
            own = await _given(self._coordinator, self._ids)
            named = await self._stored()
            if named is None:
                self.on_put()
                await self._store.put(IDENTITY_OBJECT, own.encode(), ABSENT)
            else:
                self._compare(named, own)
        except AccessDenied:
            return  # A writer that may put its batches and nothing else: others will give the name.
        except (PreconditionFailed, OutcomeUnknown) as error:
            # Somebody was first, perhaps ourselves. The next look tells.
            raise Unavailable(
                f"the name of the log in {self._store.url} could not be put", hint="try again"
            ) from error
        self._claimed = True

    async def _stored(self) -> str | None:
        try:
            found = await self._store.get(IDENTITY_OBJECT)
        except NotFound:
            return None
        return _checked(IDENTITY_OBJECT, found.data)

    def _compare(self, named: str, own: str | None) -> None:
        if named != own:
            raise AnotherLog(self._store.url, IDENTITY_OBJECT)
