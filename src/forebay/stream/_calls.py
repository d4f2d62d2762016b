"""Requests to the store, repeated while that is safe.

Reads and deletes may be repeated whatever became of them. A put of an immutable object may be too, because
its key says what is in it: whoever finds the key taken compares. So an answer that was lost costs a second
look and is never handed on.

A store may also never answer. Every attempt has a deadline of its own; when it is over the attempt is given
up and repeated like any other, so nothing waits longer than the retry policy and one attempt allow.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from forebay.errors import ForebayError, NotFound, OutcomeUnknown, PreconditionFailed, Unavailable
from forebay.kit.clock import Clock
from forebay.kit.conditions import ABSENT
from forebay.kit.retry import RetryPolicy, retry
from forebay.storage import ObjectStore

__all__ = ["Calls"]

T = TypeVar("T")

REQUEST_TIMEOUT_MS_DEFAULT = 45_000
"""Milliseconds that one attempt may take. A fragment of 64 MiB at 2 MB/s fits."""
DELETE_KEYS_MAX = 1000
"""Keys of one delete request, as in S3."""


def _repeatable(error: ForebayError) -> bool:
    return isinstance(error, Unavailable | OutcomeUnknown)


class Calls:
    """A store, with patience."""

    def __init__(
        self,
        store: ObjectStore,
        *,
        clock: Clock,
        randomness: random.Random,
        policy: RetryPolicy,
        timeout_ms: int = REQUEST_TIMEOUT_MS_DEFAULT,
    ) -> None:
        self.store = store
        self.clock = clock
        self.random = randomness
        self.policy = policy
        self.timeout_s = timeout_ms / 1000
        """Of one attempt."""
        self.retries = 0
        """Requests that were repeated."""

    async def again(self, operation: Callable[[], Awaitable[T]]) -> T:
        """Await `operation()`, which may safely be done twice, until it succeeds or patience ends."""

        async def bounded() -> T:
            try:
                async with asyncio.timeout(self.timeout_s):
                    return await operation()
            except TimeoutError as error:
                raise OutcomeUnknown("a request", reason=f"no answer in {self.timeout_s:g} s") from error

        return await retry(
            bounded,
            policy=self.policy,
            clock=self.clock,
            randomness=self.random,
            retryable=_repeatable,
            on_retry=self._count,
        )

    def _count(self, _attempt: int, _error: ForebayError) -> None:
        self.retries += 1

    async def look(self, operation: Callable[[], Awaitable[T]]) -> T:
        """`again` for what changes nothing: without an answer it certainly did not happen."""
        try:
            return await self.again(operation)
        except OutcomeUnknown as error:
            raise Unavailable(error.message, hint="the store does not answer: try again") from error

    async def get(self, key: str) -> bytes:
        """A whole object."""
        return (await self.look(lambda: self.store.get(key))).data

    async def get_range(self, key: str, start: int, length: int) -> bytes:
        """One byte range, of exactly that length."""
        data = await self.look(lambda: self.store.get_range(key, start, length))
        if len(data) != length:
            raise Unavailable(
                f"{key!r}: {len(data)} bytes instead of {length}", hint="the store answers short: try again"
            )
        return data

    async def size(self, key: str) -> int:
        """Bytes of an object. Raises `NotFound`."""
        return (await self.look(lambda: self.store.head(key))).size

    async def put_new(self, key: str, data: bytes) -> None:
        """Store an object under a key that nobody else uses; the same bytes may be there already."""

        async def attempt() -> None:
            try:
                await self.store.put(key, data, ABSENT)
            except PreconditionFailed:
                if (await self.store.get(key)).data != data:
                    raise

        await self.again(attempt)

    async def exists(self, key: str) -> bool:
        """Whether there is such an object."""
        try:
            await self.size(key)
        except NotFound:
            return False
        return True

    async def delete(self, keys: Sequence[str]) -> None:
        """Remove objects, page by page, in order."""
        for at in range(0, len(keys), DELETE_KEYS_MAX):
            page = list(keys[at : at + DELETE_KEYS_MAX])

            async def attempt(page: list[str] = page) -> None:
                results = await self.store.delete(page)
                failed = [result for result in results if result.error is not None]
                page[:] = [result.key for result in failed]
                for result in failed:
                    assert result.error is not None
                    raise result.error

            await self.again(attempt)
