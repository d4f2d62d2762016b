"""A manifest in the bucket, as several tasks of one process know it."""

from __future__ import annotations

import asyncio
import random

from tests.ingest.parts import PRODUCERS, HandClock

from forebay.formats.ingest_manifest import ProducerManifest, encode
from forebay.ingest._manifest_file import Manifests
from forebay.kit.metrics import MetricsRegistry
from forebay.kit.retry import RetryPolicy
from forebay.storage import MemoryStore, StoredObject


class Overtaken(MemoryStore):
    """The first conditional read is answered with what it found, after all that were sent later."""

    def __init__(self) -> None:
        super().__init__()
        self.found, self.answered = asyncio.Event(), asyncio.Event()

    async def get_if_changed(self, key: str, version: str) -> StoredObject | None:
        changed = await super().get_if_changed(key, version)
        if not self.found.is_set():
            self.found.set()
            await self.answered.wait()
        return changed


async def test_an_answer_that_was_overtaken_does_not_bring_back_what_is_gone() -> None:
    store = Overtaken()
    await store.put(PRODUCERS, encode(ProducerManifest(["a"])))
    known = Manifests.of(
        store,
        PRODUCERS,
        "collector",
        clock=HandClock(),
        randomness=random.Random(1),
        policy=RetryPolicy(),
        registry=MetricsRegistry(),
    ).producers
    await known.load()
    await store.put(PRODUCERS, encode(ProducerManifest(["a", "b"])))
    slow = asyncio.create_task(known.load())
    await store.found.wait()
    await store.put(PRODUCERS, encode(ProducerManifest(["c"])))
    assert (await known.load()).pending == ["c"]
    store.answered.set()
    assert (await slow).pending == ["c"]
    assert known.value.pending == ["c"]
