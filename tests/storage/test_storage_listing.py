"""Listings of buckets: passed on where the server sorts them, collected and sorted where it may not."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from forebay.errors import LimitExceeded, StorageDamaged, Unavailable
from forebay.kit.clock import SystemClock
from forebay.kit.ids import IdSource
from forebay.kit.retry import RetryPolicy
from forebay.storage import BucketStore
from forebay.storage._bucket import _listing
from forebay.storage._bucket._url import parse_bucket_url
from forebay.testing.s3_faults import S3FaultServer, answer

if TYPE_CHECKING:
    from forebay.testing.servers import SeaweedServer

QUICK = RetryPolicy(attempts_max=2, base_ms=1, cap_ms=2, deadline_ms=20_000)
KEYS = ["a-b", "a.1", "a/1", "a/2", "a0", "b/c/d", "b/c0"]


@pytest.fixture
def server() -> Iterator[S3FaultServer]:
    with S3FaultServer() as running:
        yield running


def trusting(url: str) -> BucketStore:
    """A store that takes its server for one that lists in byte order."""
    parsed = dataclasses.replace(parse_bucket_url(url), lists_in_order=True)
    return BucketStore(parsed, SystemClock(), IdSource(), random.Random(), QUICK)


async def test_a_sorted_server_is_listed_page_by_page(server: S3FaultServer) -> None:
    for key in KEYS:
        server.put(f"p/{key}", key.encode())
    server.put("other/x", b"")
    async with trusting(server.url("p")) as store:
        assert [info.key async for info in store.list()] == KEYS
        assert [info.key async for info in store.list("a/")] == ["a/1", "a/2"]
        assert [info.key async for info in store.list("b/c")] == ["b/c/d", "b/c0"]
        assert [info.key async for info in store.list("a", after="a/1")] == ["a/2", "a0"]
        pages = [[info.key for info in page] async for page in store.list_pages(page_keys=3)]
        assert pages == [KEYS[:3], KEYS[3:6], KEYS[6:]]
        server.fail_next("LIST", answer(500), times=QUICK.attempts_max)
        with pytest.raises(Unavailable):
            [info async for info in store.list()]


async def test_a_server_that_breaks_the_order_is_found_out(seaweed: SeaweedServer) -> None:
    async with trusting(seaweed.url("unordered")) as store:
        for key in ("a/1", "a-b"):
            await store.put(key, b"")
        with pytest.raises(StorageDamaged) as found:
            [info async for info in store.list()]
        assert "endpoint" in found.value.hint


async def test_a_listing_over_the_limit_is_refused(
    server: S3FaultServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_listing, "SORTED_KEYS_MAX", 3)
    for key in KEYS:
        server.put(f"p/{key}", b"")
    parsed = parse_bucket_url(server.url("p"))
    async with BucketStore(parsed, SystemClock(), IdSource(), random.Random(), QUICK) as store:
        with pytest.raises(LimitExceeded) as refused:
            [info async for info in store.list()]
        assert "longer prefix" in refused.value.hint
        assert [info.key async for info in store.list("a/")] == ["a/1", "a/2"]
