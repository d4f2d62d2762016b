"""The bucket as a tenant of the seam.

Reads go through a client that does not repeat requests, and are repeated here as a whole: a connection that
breaks in the middle of a body is then one more failed attempt.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

from obstore.exceptions import NotModifiedError

from forebay.errors import ForebayError, NotFound, Unavailable
from forebay.kit.clock import Clock, SystemClock
from forebay.kit.conditions import ANY
from forebay.kit.ids import IdSource
from forebay.kit.retry import RetryPolicy, retry
from forebay.storage._api import (
    LIST_PAGE_KEYS,
    BucketMissing,
    Buffer,
    DeleteResult,
    ObjectInfo,
    ObjectStore,
    Range,
    StoredObject,
    When,
    copy_of,
    validate_key,
    validate_page_keys,
    validate_prefix,
    validate_range,
    validate_when,
)
from forebay.storage._bucket._failure import CLIENT_ERRORS, Failure
from forebay.storage._bucket._listing import info_of, listed, listed_and_sorted
from forebay.storage._bucket._put import TOKEN_ATTRIBUTE, Writer
from forebay.storage._bucket._ranges import fetch_ranges
from forebay.storage._bucket._rest import rest_at_exit
from forebay.storage._bucket._url import BucketUrl, parse_bucket_url
from forebay.storage._handle import Handle
from forebay.storage._source import Source

__all__ = ["BucketStore", "open_bucket"]

T = TypeVar("T")
rest_at_exit()

DEFAULT_POLICY = RetryPolicy(attempts_max=6, base_ms=50, cap_ms=2_000, deadline_ms=30_000)
"""How often and how long a request is tried again."""
SINGLE_DELETES_MAX = 16
"""Deletes under way at once when a bulk delete failed and the reason is looked for key by key."""


def open_bucket(
    url: str,
    *,
    clock: Clock | None = None,
    ids: IdSource | None = None,
    randomness: random.Random | None = None,
    policy: RetryPolicy = DEFAULT_POLICY,
) -> BucketStore:
    """Open the bucket that `url` names; nothing is contacted yet."""
    return BucketStore(
        parse_bucket_url(url),
        clock or SystemClock(),
        ids or IdSource(),
        randomness or random.SystemRandom(),
        policy,
    )


class BucketStore(ObjectStore):
    """A bucket, or the part of it below a prefix."""

    def __init__(
        self, url: BucketUrl, clock: Clock, ids: IdSource, randomness: random.Random, policy: RetryPolicy
    ) -> None:
        self.url = url.shown
        self._url = url
        self._clock = clock
        self._random = randomness
        self._policy = policy
        self._handle = Handle(url.shown)
        clients = url.clients(policy)
        self._client = clients.once
        self._patient = clients.patient
        self._writer = Writer(url, clients, policy, clock, ids, randomness, self._read_back, self)
        self._bucket_is_there = False

    async def put(self, key: str, data: Buffer, when: When = ANY) -> str:
        """One PUT, settled by reading back where its reply was lost. Large and unconditional: in parts."""
        self._check(key)
        validate_when(when)
        version = await self._writer.put(key, copy_of(data), when)
        self._bucket_is_there = True
        return version

    async def put_source(self, key: str, source: Source, when: When = ANY) -> str:
        """S3: one PUT that reads the source as it goes. Elsewhere: as `put`, few bodies in memory at once."""
        self._check(key)
        validate_when(when)
        version = await self._writer.put_source(key, source, when)
        self._bucket_is_there = True
        return version

    async def get(self, key: str) -> StoredObject:
        """One GET: data and version come in the same answer."""
        self._check(key)
        found, _ = await self._reading("reading", key, lambda: self._get(key, {}))
        return found

    async def get_if_changed(self, key: str, version: str) -> StoredObject | None:
        """One GET that the server answers with 304 where nothing changed."""
        self._check(key)
        if self._url.versions_are_generations:
            return None if (await self.head(key)).version == version else await self.get(key)
        try:
            found, _ = await self._reading("reading", key, lambda: self._get(key, {"if_none_match": version}))
        except NotModifiedError:
            return None
        return None if found.version == version else found

    async def get_ranges(self, key: str, ranges: Sequence[Range]) -> list[bytes]:
        """As few GETs as the distances allow, all of the same write."""
        self._check(key)
        for start, length in ranges:
            validate_range(key, start, length)
        wanted = [(start, length) for start, length in ranges if length]
        if len(wanted) < len(ranges) or not ranges:
            size = (await self.head(key)).size
            for start, length in ranges:
                validate_range(key, start, length, size)
        found = await self._reading("reading", key, lambda: fetch_ranges(self._client, key, wanted))
        pieces = iter(found)
        return [next(pieces) if length else b"" for _, length in ranges]

    async def head(self, key: str) -> ObjectInfo:
        """One HEAD request."""
        self._check(key)
        try:
            meta = await self._reading("reading", key, lambda: self._client.head_async(key))
        except NotFound:
            await self._look_for_bucket()
            raise
        return info_of(meta, by_generation=self._url.versions_are_generations)

    def list_pages(
        self, prefix: str = "", *, after: str = "", page_keys: int = LIST_PAGE_KEYS
    ) -> AsyncIterator[list[ObjectInfo]]:
        """Pages as the server gives them; collected and sorted first where its order is not known."""
        self._handle.check()
        validate_prefix(prefix)
        validate_page_keys(page_keys)
        if self._url.lists_in_order:
            return self._pages(prefix, after, page_keys)
        return self._sorted_pages(prefix, after, page_keys)

    async def _sorted_pages(self, prefix: str, after: str, page_keys: int) -> AsyncIterator[list[ObjectInfo]]:
        found = await self._reading("listing", "", lambda: self._listed_and_sorted(prefix, after))
        for first in range(0, len(found), page_keys):
            yield found[first : first + page_keys]

    async def _listed_and_sorted(self, prefix: str, after: str) -> list[ObjectInfo]:
        by_generation = self._url.versions_are_generations
        return await listed_and_sorted(self._client, prefix, after, by_generation=by_generation)

    async def _pages(self, prefix: str, after: str, page_keys: int) -> AsyncIterator[list[ObjectInfo]]:
        page: list[ObjectInfo] = []
        by_generation = self._url.versions_are_generations
        try:
            async for info in listed(self._patient, prefix, after, by_generation=by_generation):
                page.append(info)
                if len(page) == page_keys:
                    yield page
                    page = []
        except CLIENT_ERRORS as error:
            raise Failure.of(error).explained("listing", "", self.url) from error
        if page:
            yield page

    async def delete(self, keys: Sequence[str]) -> list[DeleteResult]:
        """Bulk requests; where one fails, key by key, so that each error finds its key."""
        self._handle.check()
        for key in keys:
            validate_key(key)
        distinct = list(dict.fromkeys(keys))
        errors: dict[str, ForebayError | None] = {}
        if distinct:
            try:
                await self._writer.repeat("deleting", "", lambda: self._client.delete_async(distinct))
            except (BucketMissing, Unavailable) as error:
                errors = dict.fromkeys(distinct, error)
            except ForebayError:
                errors = await self._delete_one_by_one(distinct)
        return [DeleteResult(key, errors.get(key)) for key in keys]

    async def _delete_one_by_one(self, keys: Sequence[str]) -> dict[str, ForebayError | None]:
        turns = asyncio.Semaphore(SINGLE_DELETES_MAX)

        async def delete(key: str) -> ForebayError | None:
            async with turns:
                return await self._delete_one(key)

        return dict(zip(keys, await asyncio.gather(*map(delete, keys)), strict=True))

    async def _delete_one(self, key: str) -> ForebayError | None:
        try:
            await self._writer.repeat("deleting", key, lambda: self._client.delete_async(key))
        except NotFound:
            return None
        except ForebayError as error:
            return error
        return None

    async def close(self) -> None:
        """Refuse further use. Connections close when the last request on them is over."""
        self._handle.close()
        self._writer.close()

    async def _get(self, key: str, options: Any) -> tuple[StoredObject, str | None]:
        result = await self._client.get_async(key, options=options)
        data = b"" if options.get("head") else bytes(await result.bytes_async())
        info = info_of(result.meta, by_generation=self._url.versions_are_generations)
        return StoredObject(key, data, info.version), result.attributes.get(TOKEN_ATTRIBUTE)

    async def _read_back(self, key: str, with_data: bool) -> tuple[StoredObject, str | None]:
        return await self._attempt(
            "reading back", key, lambda: self._get(key, {} if with_data else {"head": True})
        )

    async def _reading(self, operation: str, key: str, request: Callable[[], Awaitable[T]]) -> T:
        """Repeat a read while it fails for a passing reason. Lets `NotModifiedError` through."""
        result = await retry(
            lambda: self._attempt(operation, key, request),
            policy=self._policy,
            clock=self._clock,
            randomness=self._random,
        )
        self._bucket_is_there = True
        return result

    async def _attempt(self, operation: str, key: str, request: Callable[[], Awaitable[T]]) -> T:
        try:
            return await request()
        except (NotModifiedError, ForebayError):
            raise
        except CLIENT_ERRORS as error:
            raise Failure.of(error).explained(operation, key, self.url) from error

    async def _look_for_bucket(self) -> None:
        """A HEAD request is answered by a bare 404 whether the key or the bucket is missing: list to tell."""
        if self._bucket_is_there:
            return
        try:
            async for _ in self._client.list(chunk_size=1):
                break
        except CLIENT_ERRORS as error:
            failure = Failure.of(error)
            if failure.is_missing_bucket:
                raise BucketMissing(self.url) from error
            return  # No right to list, perhaps. The key is what was asked for, and it is not there.
        self._bucket_is_there = True

    def _check(self, key: str) -> None:
        self._handle.check()
        validate_key(key)
