"""The compare-and-set of the manifest: whatever the store answers, the truth is found or called unknown."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Literal

import pytest
from tests.buffer.scripted_store import ManualClock, ScriptedStore

from forebay.buffer import (
    BufferConfig,
    CommitFailed,
    Committed,
    CommitUnknown,
    ManifestCommitter,
    ManifestLost,
    QueueFull,
    Upload,
)
from forebay.buffer._manifest_file import ManifestFile
from forebay.buffer._metrics import BufferMetrics
from forebay.errors import AccessDenied
from forebay.formats import buffer_manifest
from forebay.formats.buffer_manifest import CorruptManifest, Metadata, NewEntry
from forebay.kit import RetryPolicy, SystemClock
from forebay.kit.conditions import ANY
from forebay.storage import MemoryStore, StoredObject
from forebay.storage._api import Buffer, When

PATH = "ingest/manifest"
CONFIG = BufferConfig(commit_retry=RetryPolicy(attempts_max=4, base_ms=10, cap_ms=50, deadline_ms=5_000))


class Bench:
    """A committer on a scripted store."""

    def __init__(self, config: BufferConfig = CONFIG) -> None:
        self.clock = ManualClock()
        self.store = ScriptedStore(PATH, self.clock)
        self.config = config
        self.metrics = BufferMetrics(None, "producer", "test")
        self.committer = self.another()

    def another(self) -> ManifestCommitter:
        return ManifestCommitter(
            ManifestFile(self.store, PATH, self.clock, bytes_max=1 << 30),
            self.config,
            clock=self.clock,
            randomness=random.Random(1),
            metrics=self.metrics,
        )

    def upload(self, name: str, **more: float) -> Upload:
        now = self.clock.monotonic()
        return Upload(NewEntry(name, (Metadata(0, 1, b"m"),)), more.get("at", now), now)

    async def commit(self, *names: str) -> list[object]:
        return list(await self.committer.commit([self.upload(name) for name in names]))

    async def locations(self) -> list[str]:
        return list(
            buffer_manifest.decode((await super(ScriptedStore, self.store).get(PATH)).data).locations()
        )


async def test_batches_get_the_next_sequences_in_order() -> None:
    bench = Bench()
    assert await bench.commit("a", "b") == [Committed(0, "a"), Committed(1, "b")]
    assert await bench.commit("c") == [Committed(2, "c")]
    assert await bench.locations() == ["a", "b", "c"]


async def test_after_an_own_write_nothing_is_read() -> None:
    bench = Bench()
    for name in "abcdef":
        await bench.commit(name)
    assert (bench.store.counts["manifest.get"], bench.store.counts["manifest.put"]) == (1, 6)


@pytest.mark.parametrize("word", ["after", "refused", "lost", "before", "late"])
@pytest.mark.parametrize("existing", [False, True])
async def test_no_answer_of_the_store_doubles_or_loses_a_batch(word: str, existing: bool) -> None:
    bench = Bench()
    if existing:
        await bench.commit("earlier")
    bench.store.script.append(word)
    answers = await bench.commit("a", "b")
    await bench.commit("later")
    locations = await bench.locations()
    assert locations == [*(["earlier"] if existing else []), "a", "b", "later"]
    assert answers == [Committed(locations.index(name), name) for name in "ab"]


async def test_a_refusal_caused_by_our_own_write_is_seen_through() -> None:
    bench = Bench()
    bench.store.script.extend(["refused", "refused"])
    assert await bench.commit("a") == [Committed(0, "a")]
    assert bench.store.counts["manifest.put"] == 1


async def test_a_late_write_and_its_repetition_exclude_each_other() -> None:
    bench = Bench()
    bench.store.script.extend(["late"])
    assert await bench.commit("a") == [Committed(0, "a")]
    assert bench.store.counts["manifest.put"] == 2 and await bench.locations() == ["a"]


async def test_somebody_else_who_was_faster_only_moves_our_place() -> None:
    bench = Bench()
    other = bench.another()

    async def intrude() -> None:
        await other.commit([bench.upload("theirs")])

    await bench.commit("a")
    bench.store.before_put = intrude
    assert await bench.commit("b") == [Committed(2, "b")]
    assert await bench.locations() == ["a", "theirs", "b"]
    assert bench.metrics.writes.conflict_rate() == pytest.approx(25)


@pytest.mark.parametrize("policy", ["fail", "append_again"])
async def test_a_place_that_was_consumed_before_we_looked_is_unknown(policy: str) -> None:
    bench = Bench(replace(CONFIG, on_unknown=policy))  # type: ignore[arg-type]
    await bench.commit("a")
    bench.store.script.append("after")

    async def consume() -> None:
        found = await super(ScriptedStore, bench.store).get(PATH)
        rest = buffer_manifest.dequeue(buffer_manifest.decode(found.data), 99)
        await super(ScriptedStore, bench.store).put(PATH, rest.data)

    async def consume_before_the_look(*_: object) -> None:
        await consume()

    original = bench.store.get_if_changed

    async def racing(key: str, version: str):  # type: ignore[no-untyped-def]
        if bench.store.counts["manifest.put"] == 2:
            await consume()
        return await original(key, version)

    bench.store.get_if_changed = racing  # type: ignore[method-assign]
    [answer] = await bench.commit("b")
    if policy == "fail":
        assert isinstance(answer, CommitUnknown) and answer.location == "b"
    else:
        assert answer == Committed(2, "b")
    assert bench.metrics.commit_unknown.value == 1


async def test_a_manifest_that_is_gone_is_lost_and_never_made_anew() -> None:
    bench = Bench()
    await bench.commit("a")
    await bench.store.delete([PATH])
    for _ in range(2):
        [answer] = await bench.commit("b")
        assert isinstance(answer, ManifestLost)
    assert [info.key async for info in bench.store.list("")] == []


async def test_a_manifest_that_went_back_in_time_is_lost() -> None:
    bench = Bench()
    await bench.commit("a")
    old = (await bench.store.get(PATH)).data
    await bench.commit("b")
    await bench.store.put(PATH, old)
    [answer] = await bench.commit("c")
    assert isinstance(answer, ManifestLost) and "went from 2 to 1" in answer.reason


async def test_nothing_is_appended_to_a_corrupt_manifest() -> None:
    bench = Bench()
    await bench.store.put(PATH, buffer_manifest.append(buffer_manifest.EMPTY, [NewEntry("x")]).data[1:])
    [answer] = await bench.commit("a")
    assert isinstance(answer, CommitFailed) and isinstance(answer.__cause__, CorruptManifest)
    assert bench.store.counts["manifest.put"] == 1


async def test_giving_up_is_a_failure_only_where_nothing_can_land_any_more() -> None:
    bench = Bench()
    bench.store.script.extend(["before"] * 9)
    [answer] = await bench.commit("a")
    assert isinstance(answer, CommitFailed)
    bench.store.script.clear()
    bench.store.script.extend(["lost"] * 9)
    [answer] = await bench.commit("b")
    assert isinstance(answer, CommitUnknown), "the last one may still arrive"
    assert bench.store.counts["manifest.put"] == 8, "attempts are bounded"


async def test_an_unknown_outcome_and_a_failed_look_stay_unknown() -> None:
    bench = Bench()
    await bench.commit("a")
    bench.store.script.append("after")
    bench.store.reads.extend(["before"] * 20)
    [answer] = await bench.commit("b")
    assert isinstance(answer, CommitUnknown)
    bench.store.reads.clear()
    assert await bench.commit("c") == [Committed(2, "c")], "and what follows does not overtake it"


async def test_the_deadline_ends_a_commit_that_attempts_would_not() -> None:
    bench = Bench(
        replace(CONFIG, commit_retry=RetryPolicy(1_000_000, base_ms=500, cap_ms=500, deadline_ms=3_000))
    )
    bench.store.script.extend(["before"] * 10_000)
    began = bench.clock.monotonic()
    [answer] = await bench.commit("a")
    assert isinstance(answer, CommitFailed) and bench.clock.monotonic() - began <= 3.5


async def test_what_cannot_pass_is_not_tried_again() -> None:
    bench = Bench()

    async def denied() -> None:
        raise AccessDenied("no")

    bench.store.before_put = denied
    [answer] = await bench.commit("a")
    assert isinstance(answer, CommitFailed) and isinstance(answer.__cause__, AccessDenied)
    assert bench.store.counts["manifest.put"] == 1


async def test_a_full_queue_takes_what_fits_and_refuses_the_rest() -> None:
    bench = Bench(replace(CONFIG, manifest_append_bytes_max=1_024))
    answers = await bench.commit(*[f"{index:0100}" for index in range(9)])
    fitting = [answer for answer in answers if isinstance(answer, Committed)]
    full = [answer for answer in answers if isinstance(answer, QueueFull)]
    assert len(fitting) == 7 and len(full) == 2
    assert full[0].limit == 1_024 < full[0].actual
    found = buffer_manifest.decode((await bench.store.get(PATH)).data)
    assert len(found.data) <= 1_024
    await bench.store.put(PATH, buffer_manifest.dequeue(found, 3).data)
    assert await bench.commit("again") == [Committed(7, "again")], "room made by the consumer is seen"


async def test_an_upload_that_grew_old_is_uploaded_under_a_new_name() -> None:
    bench = Bench(replace(CONFIG, upload_age_ms_max=1_000, gc_grace_period_ms=2_000))
    old = bench.upload("old", at=bench.clock.monotonic() - 1)

    async def renew() -> Upload:
        return bench.upload("new")

    old.renew = renew
    assert await bench.committer.commit([old]) == [Committed(0, "new")]
    assert await bench.locations() == ["new"] and bench.metrics.reuploads.value == 1


async def test_the_old_name_still_counts_while_its_write_may_land() -> None:
    bench = Bench(replace(CONFIG, upload_age_ms_max=1_000, gc_grace_period_ms=2_000))
    old = bench.upload("old")
    renewed = []

    async def renew() -> Upload:
        renewed.append(1)
        return bench.upload("new")

    old.renew = renew

    async def age() -> None:
        bench.clock.advance(2)

    bench.store.before_put = age
    bench.store.script.append("late")
    assert await bench.committer.commit([old]) == [Committed(0, "old")]
    assert renewed and await bench.locations() == ["old"]


async def test_batches_that_become_ready_while_a_commit_tries_again_go_along() -> None:
    bench = Bench()
    first, second, fourth = (bench.upload(name) for name in ("a", "b", "d"))
    first.number, first.following = 0, 1
    second.number, second.following = 1, 2
    fourth.number, fourth.following = 3, 4
    told: list[Committed] = []
    second.on_commit = told.append

    async def more() -> None:
        bench.committer.ready(second)
        bench.committer.ready(fourth)

    bench.store.before_put = more
    bench.store.script.append("before")
    assert await bench.committer.commit([first]) == [Committed(0, "a")]
    assert await bench.locations() == ["a", "b"], "and the one behind a gap waits"
    assert told == [Committed(1, "b")], "whoever waits for it is told at once"
    writes = bench.store.counts["manifest.put"]
    assert await bench.committer.commit([second]) == [Committed(1, "b")]
    assert bench.store.counts["manifest.put"] == writes, "the answer is repeated, not the write"


async def test_a_batch_that_no_attempt_has_carried_is_not_unknown_for_what_others_consumed() -> None:
    """The reply to the first is lost and its place consumed; the second, taken along, was never sent."""
    bench = Bench()
    first, second = bench.upload("a"), bench.upload("b")
    first.number, first.following = 0, 1
    second.number, second.following = 1, 2

    async def others() -> None:
        bench.committer.ready(second)
        await bench.another().commit([bench.upload("x"), bench.upload("y")])
        found = await bench.store.get(PATH)
        rest = buffer_manifest.dequeue(buffer_manifest.decode(found.data), 1)
        await MemoryStore.put(bench.store, PATH, rest.data, found.version)

    bench.store.before_put = others
    bench.store.script.extend(["ok", "lost"])
    [answer] = await bench.committer.commit([first])
    assert isinstance(answer, CommitUnknown)
    assert await bench.committer.commit([second]) == [Committed(2, "b")]


async def test_a_refusal_whose_truth_nobody_could_see_is_unknown() -> None:
    """A client that sent the write twice is told of its own success as a conflict."""
    bench = Bench(replace(CONFIG, commit_retry=RetryPolicy(attempts_max=1)))
    bench.store.script.append("refused")
    bench.store.reads.extend(["ok", "before"])
    [answer] = await bench.commit("a")
    assert isinstance(answer, CommitUnknown)
    assert await bench.locations() == ["a"]


class StallingStore(MemoryStore):
    """The first put to the manifest after `stall` was set is not answered before `answer` is."""

    def __init__(self) -> None:
        super().__init__()
        self.stall: Literal["", "before", "after"] = ""
        """Whether it happens before it is not answered, or when it is."""
        self.stalled, self.answer = asyncio.Event(), asyncio.Event()
        self.looks = 0
        self.looked = asyncio.Event()
        """It was looked at twice since it stalled."""

    async def get(self, key: str) -> StoredObject:
        self._look()
        return await super().get(key)

    async def get_if_changed(self, key: str, version: str) -> StoredObject | None:
        self._look()
        return await super().get_if_changed(key, version)

    def _look(self) -> None:
        self.looks += self.stalled.is_set()
        if self.looks >= 2:
            self.looked.set()

    async def put(self, key: str, data: Buffer, when: When = ANY) -> str:
        stall, self.stall = self.stall, ""
        if not stall:
            return await super().put(key, data, when)
        landed = await super().put(key, data, when) if stall == "before" else None
        self.stalled.set()
        await self.answer.wait()
        return landed or await super().put(key, data, when)


def committer_on(store: MemoryStore) -> ManifestCommitter:
    clock = SystemClock()
    file = ManifestFile(store, PATH, clock, bytes_max=1 << 30)
    metrics = BufferMetrics(None, "producer", "test")
    return ManifestCommitter(file, CONFIG, clock=clock, randomness=random.Random(1), metrics=metrics)


def upload(name: str) -> Upload:
    now = SystemClock().monotonic()
    return Upload(NewEntry(name, (Metadata(0, 1, b"m"),)), now, now)


async def committed(store: MemoryStore) -> list[str]:
    return list(buffer_manifest.decode((await store.get(PATH)).data).locations())


@pytest.mark.parametrize("existing", [False, True])
async def test_a_write_that_has_lost_its_race_is_not_waited_for(existing: bool) -> None:
    store = StallingStore()
    ours, theirs = committer_on(store), committer_on(store)
    if existing:
        await ours.commit([upload("before")])
    store.stall = "after"
    slow = asyncio.create_task(ours.commit([upload("ours")]))
    await store.stalled.wait()
    [first] = await theirs.commit([upload("theirs")])
    assert isinstance(first, Committed)
    assert await slow == [Committed(first.sequence + 1, "ours")]  # and the answer never came
    assert (await committed(store))[-2:] == ["theirs", "ours"]


async def test_a_write_that_happened_is_waited_for_whoever_wrote_since() -> None:
    store = StallingStore()
    ours, theirs = committer_on(store), committer_on(store)
    store.stall = "before"
    slow = asyncio.create_task(ours.commit([upload("ours")]))
    await store.stalled.wait()
    await theirs.commit([upload("theirs")])
    store.looks = 0
    await store.looked.wait()  # and goes on waiting
    assert not slow.done()
    store.answer.set()
    assert await slow == [Committed(0, "ours")]
    assert await committed(store) == ["ours", "theirs"]


async def test_a_write_whose_place_was_consumed_is_waited_for_and_not_called_unknown() -> None:
    store = StallingStore()
    ours = committer_on(store)
    store.stall = "before"
    slow = asyncio.create_task(ours.commit([upload("ours")]))
    await store.stalled.wait()
    manifest = buffer_manifest.decode((await store.get(PATH)).data)
    await store.put(PATH, buffer_manifest.dequeue(manifest, 0).data)
    store.looks = 0
    await store.looked.wait()
    assert not slow.done()
    store.answer.set()
    assert await slow == [Committed(0, "ours")]


async def test_a_write_that_nobody_overtook_is_waited_for() -> None:
    store = StallingStore()
    ours = committer_on(store)
    store.stall = "after"
    slow = asyncio.create_task(ours.commit([upload("ours")]))
    await store.stalled.wait()
    await store.looked.wait()
    assert not slow.done()
    store.answer.set()
    assert await slow == [Committed(0, "ours")]
    assert await committed(store) == ["ours"]
