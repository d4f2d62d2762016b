"""Ranges of a bucket's object: few requests, and never bytes of two writes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from forebay.errors import Unavailable
from forebay.storage import open_store
from forebay.storage._bucket._ranges import GAP_BYTES_MAX, SPANS_AT_ONCE, fetch_ranges
from forebay.storage._bucket._url import Client
from forebay.testing.s3_faults import S3FaultServer, truncated


@pytest.fixture
def server() -> Iterator[S3FaultServer]:
    with S3FaultServer() as running:
        yield running


@dataclass
class Answer:
    data: bytes
    meta: dict[str, Any]

    async def bytes_async(self) -> bytes:
        return self.data


@dataclass
class Replaced:
    """A client whose object is another write from the second request on."""

    size: int
    asked: list[tuple[int, int]] = field(default_factory=list)

    async def get_async(self, key: str, *, options: dict[str, Any]) -> Answer:
        start, end = options["range"]
        self.asked.append((start, end))
        write = min(len(self.asked), 2)
        meta = {"size": self.size, "e_tag": f"write-{write}", "version": None}
        return Answer(b"%d" % write * (end - start), meta)


async def test_ranges_of_two_writes_are_never_mixed() -> None:
    far = 2 * GAP_BYTES_MAX
    client = Replaced(size=far + 4)
    with pytest.raises(Unavailable, match="replaced"):
        await fetch_ranges(cast(Client, client), "k", [(0, 4), (far, 4)])
    assert await fetch_ranges(cast(Client, client), "k", [(0, 4), (far, 4)]) == [b"2222", b"2222"]


async def test_close_ranges_share_a_request_and_distant_ones_do_not(server: S3FaultServer) -> None:
    far = 2 * GAP_BYTES_MAX
    data = bytes(number % 251 for number in range(far + 100))
    async with open_store(server.url("p")) as store:
        await store.put("k", data)
        wanted = [(far, 5), (10, 5), (0, 12), (40, 1)]
        assert await store.get_ranges("k", wanted) == [data[at : at + length] for at, length in wanted]
        assert server.requests["GET"] == 2


async def test_more_distant_ranges_than_go_at_once_all_come(server: S3FaultServer) -> None:
    step = GAP_BYTES_MAX + 10
    count = SPANS_AT_ONCE + 3
    data = b"".join(b"%09d" % number + b"." * (step - 9) for number in range(count))
    async with open_store(server.url("p")) as store:
        await store.put("k", data)
        found = await store.get_ranges("k", [(number * step, 9) for number in range(count)])
        assert found == [b"%09d" % number for number in range(count)]
        server.fail_next("GET", truncated(3))
        assert await store.get_range("k", 0, 9) == b"000000000"
