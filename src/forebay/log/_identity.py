"""Which log this is: a random name that a deployment is given once, by whoever asks first.

Two deployments may use one directory for a cache, and one deployment may be removed and made again at the
same place; topics, partitions and offsets are then the same, and the records are not. Whatever is kept
outside of the coordinator and the store is therefore kept under this name.
"""

from __future__ import annotations

import random
import re
from typing import Final

from forebay.coordination import Coordinator
from forebay.errors import OutcomeUnknown, PreconditionFailed, StorageDamaged, Unavailable
from forebay.kit.clock import Clock
from forebay.kit.conditions import ABSENT
from forebay.kit.ids import IdSource
from forebay.kit.retry import RetryPolicy, retry
from forebay.log._keys import CATALOG_PARTITION_KEY, IDENTITY_KEY

__all__ = ["log_identity"]

_POLICY: Final = RetryPolicy(attempts_max=8, base_ms=20, cap_ms=500)
_NAME: Final = re.compile(rb"[0-9a-f]{32}")


async def log_identity(
    coordinator: Coordinator, *, clock: Clock, ids: IdSource, randomness: random.Random
) -> str:
    """The name of the log behind this coordinator: 32 hexadecimal digits. One request, two the first time."""

    async def attempt() -> str:
        found = await coordinator.get(IDENTITY_KEY, partition_key=CATALOG_PARTITION_KEY)
        if found is None:
            name = ids.token()
            await coordinator.put(IDENTITY_KEY, name.encode(), ABSENT, partition_key=CATALOG_PARTITION_KEY)
            return name
        # It becomes the name of a directory, so nothing else will do.
        if not _NAME.fullmatch(found.value):
            raise StorageDamaged(
                f"{IDENTITY_KEY!r} holds no name of a log", hint="something else wrote this key; delete it"
            )
        return found.value.decode()

    return await retry(
        attempt,
        policy=_POLICY,
        clock=clock,
        randomness=randomness,
        # Refused or not known: somebody may have been first, also ourselves. The next look tells.
        retryable=lambda error: isinstance(error, Unavailable | OutcomeUnknown | PreconditionFailed),
    )
