"""The claiming queue on real stores: local files, a real S3 server, and a network that loses replies."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from pathlib import Path

import pytest
from tests.ingest.parts import batches, claimed, done, pending

from forebay.errors import NotDone, OutcomeUnknown, Unavailable
from forebay.ingest import ClaimLost, Collector, CollectorConfig, Ingestor, IngestorConfig
from forebay.storage import ObjectStore, open_store
from forebay.testing.proxy import FaultProxy, lose_reply
from forebay.testing.servers import SeaweedServer

WRITING = IngestorConfig(flush_interval_ms=5)
READING = CollectorConfig(done_cleanup_threshold=5)
ENTRIES = 40


async def ingest(store: ObjectStore, name: str) -> dict[bytes, str]:
    """What became of each entry."""
    told: dict[bytes, str] = {}
    ingestor = Ingestor(store, WRITING)

    async def send(entry: bytes) -> None:
        try:
            await (await ingestor.ingest([entry])).await_durable()
            told[entry] = "ok"
        except NotDone:
            told[entry] = "failed"
        except OutcomeUnknown:
            told[entry] = "unknown"

    for start in range(0, ENTRIES, 4):
        await asyncio.gather(*[send(b"%s/%03d" % (name.encode(), start + step)) for step in range(4)])
    with contextlib.suppress(NotDone, OutcomeUnknown):  # Each entry was told already.
        await ingestor.close()
    return told


async def collect(
    store: ObjectStore, writing: list[asyncio.Task[dict[bytes, str]]]
) -> dict[str, list[bytes]]:
    """Batches by location, until the writers have ended and nothing is left. One may come twice."""
    found: dict[str, list[bytes]] = {}
    collector = Collector(store, READING)
    while True:
        ended = all(task.done() for task in writing)
        try:
            batch = await collector.next_batch()
            if batch is None:
                if ended:
                    break
                await asyncio.sleep(0.01)
                continue
            found[batch.location] = list(batch.entries)
            await collector.ack(batch)
        except (ClaimLost, Unavailable, OutcomeUnknown):
            continue
    await collector.cleanup()
    await collector.close()
    return found


def check(told: dict[bytes, str], found: dict[str, list[bytes]]) -> None:
    counts = Counter(entry for entries in found.values() for entry in entries)
    assert set(counts.values()) <= {1}, "a location that came twice is the same batch; nothing else repeats"
    assert {entry for entry, status in told.items() if status == "ok"} <= set(counts)
    assert not {entry for entry, status in told.items() if status == "failed"} & set(counts)
    assert set(counts) <= set(told)


async def race(writers: list[ObjectStore], readers: list[ObjectStore]) -> dict[bytes, str]:
    writing = [asyncio.create_task(ingest(store, f"i{number}")) for number, store in enumerate(writers)]
    collected = await asyncio.gather(*[collect(store, writing) for store in readers])
    told = {entry: status for task in writing for entry, status in task.result().items()}
    found = {location: entries for part in collected for location, entries in part.items()}
    check(told, found)
    return told


@pytest.mark.parametrize("kind", ["files", "s3"])
async def test_ingestors_and_collectors_race_on_a_real_store_and_leave_nothing_behind(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url = str(tmp_path) if kind == "files" else request.getfixturevalue("seaweed").url("ingest-race")
    stores = [open_store(url) for _ in range(4)]
    told = await race(stores[:2], stores[2:])
    assert set(told.values()) == {"ok"} and len(told) == 2 * ENTRIES
    last = Collector(stores[0], READING)
    await last.cleanup()
    assert await last.next_batch() is None
    await last.close()
    assert (await pending(stores[0]), await claimed(stores[0]), await done(stores[0])) == ([], {}, [])
    assert await batches(stores[0]) == []
    for store in stores:
        await store.close()


async def test_a_network_that_loses_replies_costs_no_entry(seaweed: SeaweedServer) -> None:
    with FaultProxy("127.0.0.1", seaweed.port) as proxy:
        shaky = open_store(seaweed.url("ingest-proxy", endpoint=f"http://{proxy.address}"))
        direct = open_store(seaweed.url("ingest-proxy"))
        proxy.fail_randomly(0.05, [lose_reply(quiet_ms=5)])
        told = await race([shaky], [direct])
        proxy.heal()
        await shaky.close()
        await direct.close()
    assert "ok" in told.values()
