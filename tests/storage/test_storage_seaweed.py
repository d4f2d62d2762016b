"""What only a real S3 server can show: multipart uploads, metadata, real refusals, many writers."""

from __future__ import annotations

import asyncio
import hashlib
from typing import TYPE_CHECKING

import pytest

from forebay.errors import AccessDenied, PreconditionFailed
from forebay.storage import ABSENT, BucketMissing, open_store

if TYPE_CHECKING:
    from forebay.testing.servers import SeaweedServer


async def test_a_large_object_goes_up_in_parts_and_comes_back(seaweed: SeaweedServer) -> None:
    async with open_store(seaweed.url("large")) as store:
        data = hashlib.shake_256(b"forebay").digest(9 * 1024 * 1024)
        version = await store.put("any", data)
        found = await store.get("any")
        assert (found.data, found.version) == (data, version)
        assert await store.get_ranges("any", [(len(data) - 3, 3), (0, 3)]) == [data[-3:], data[:3]]
        conditional = await store.put("any", data, version)
        assert (await store.head("any")).version == conditional
        with pytest.raises(PreconditionFailed):
            await store.put("any", b"", version if version != conditional else ABSENT)


async def test_writers_that_race_on_one_key_lose_no_update(seaweed: SeaweedServer) -> None:
    async with open_store(seaweed.url("race")) as store:
        await store.put("count", b"0")

        async def add(name: str) -> int:
            refused = 0
            while True:
                found = await store.get("count")
                body = f"{int(found.data.split()[0]) + 1} {name} {refused}".encode()
                try:
                    await store.put("count", body, found.version)
                    return refused
                except PreconditionFailed:
                    refused += 1

        refusals = await asyncio.gather(*(add(f"w{number}") for number in range(6)))
        assert int((await store.get("count")).data.split()[0]) == 6
        assert sum(refusals) > 0


async def test_a_missing_bucket_is_told_apart_from_a_missing_key(seaweed: SeaweedServer) -> None:
    url = seaweed.url("p").replace(f"s3://{seaweed.bucket}/", "s3://not-a-bucket-here/")
    async with open_store(url) as store:
        for call in (store.get("k"), store.head("k"), store.get_ranges("k", [(0, 1)])):
            with pytest.raises(BucketMissing) as missing:
                await call
            assert "create it" in missing.value.hint
        with pytest.raises(BucketMissing):
            [info async for info in store.list()]


async def test_a_wrong_secret_is_denied(seaweed: SeaweedServer) -> None:
    url = seaweed.url("p").replace(seaweed.secret_key, "not-the-secret")
    async with open_store(url) as store:
        for call in (store.get("k"), store.put("k", b""), store.put("k", b"", ABSENT), store.head("k")):
            with pytest.raises(AccessDenied) as denied:
                await call
            assert "not-the-secret" not in str(denied.value)
        with pytest.raises(AccessDenied):
            [info async for info in store.list()]
        [result] = await store.delete(["k"])
        assert isinstance(result.error, AccessDenied)


async def test_a_listing_of_many_pages_is_whole_and_in_order(seaweed: SeaweedServer) -> None:
    keys = [f"d{number % 7}/{number:04d}" for number in range(1100)] + ["d1-x", "d1.x", "d1"]
    async with open_store(seaweed.url("many")) as store:
        turns = asyncio.Semaphore(16)

        async def put(key: str) -> None:
            async with turns:
                await store.put(key, key.encode())

        await asyncio.gather(*map(put, keys[:-1]))
        assert [info.key async for info in store.list()] == sorted(keys[:-1])
        results = await store.delete(keys)
        assert [result.error for result in results] == [None] * len(keys)
        assert [info.key async for info in store.list()] == []
