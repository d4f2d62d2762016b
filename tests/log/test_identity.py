"""A store and a coordinator that do not belong together are told before they do harm."""

from __future__ import annotations

import pytest
from tests.log.compaction_bed import Bed
from tests.log.writing import counted_coordinator, counted_store, group, writer_of

from forebay.coordination import MemoryCoordinator
from forebay.errors import AccessDenied, OutcomeUnknown, StorageDamaged, Unavailable
from forebay.kit.clock import SystemClock
from forebay.kit.ids import IdSource
from forebay.log import AnotherLog, LogWriter
from forebay.log._identity import LogPair
from forebay.log._keys import CATALOG_PARTITION_KEY, IDENTITY_KEY, IDENTITY_OBJECT
from forebay.storage import MemoryStore


def _pair(store: MemoryStore, coordinator: MemoryCoordinator) -> LogPair:
    return LogPair(store, coordinator, IdSource(SystemClock()))


async def _log(topic: str = "t") -> tuple[MemoryStore, MemoryCoordinator, LogWriter]:
    """A log that was never vacuumed, with a compacted object."""
    store, coordinator = MemoryStore(), MemoryCoordinator()
    writer = writer_of(store, coordinator)
    await writer.append_shared([group(topic, 0, b"x")])
    await store.put(f"llog/{topic}/partitions/0/data/compacted/1", b"compacted")
    return store, coordinator, writer


async def _objects(store: MemoryStore) -> list[str]:
    return [info.key async for info in store.list("")]


async def test_the_coordinator_of_another_log_may_not_vacuum_a_store_that_was_never_vacuumed() -> None:
    bed = Bed()
    await bed.append(2, 2)
    await bed.compact()
    before = await _objects(bed.store)
    right = bed.coordinator
    _, bed.coordinator, _ = await _log("elsewhere")
    for dry_run in (True, False, False):
        await bed.clock.sleep(3_600)
        with pytest.raises(AnotherLog, match="another log"):
            await bed.vacuum().run_once(dry_run=dry_run)
    assert await _objects(bed.store) == before
    bed.coordinator = right
    assert await bed.unreadable() == []


async def test_a_topic_of_another_log_that_is_called_alike_loses_no_object() -> None:
    store, _, _ = await _log()
    _, other, _ = await _log()
    before = await _objects(store)
    with pytest.raises(AnotherLog, match="another log"):
        await writer_of(store, other).catalog.delete("t")
    assert await _objects(store) == before
    assert (await writer_of(store, other).catalog.describe("t")).state == "ACTIVE"


async def test_a_writer_between_two_logs_appends_to_neither() -> None:
    store, _, _ = await _log()
    _, other, _ = await _log()
    [result] = await writer_of(store, other).append_shared([group("t", 0, b"lost")])
    assert isinstance(result.error, AnotherLog)
    assert IDENTITY_OBJECT in result.error.hint


@pytest.mark.parametrize("begun", ["anew", "by an append"])
async def test_a_coordinator_that_was_lost_is_not_begun_anew_over_the_objects(begun: str) -> None:
    store, _, _ = await _log()
    writer = writer_of(store, MemoryCoordinator())
    with pytest.raises(AnotherLog, match="another log"):
        if begun == "anew":
            await writer.catalog.create("u")
        else:
            [result] = await writer.append_shared([group("u", 0, b"x")])
            result.unwrap()
    assert await writer.catalog.list() == []


async def test_verify_calls_nothing_an_orphan_for_the_coordinator_of_another_log() -> None:
    bed = Bed()
    await bed.append(2, 2)
    _, bed.coordinator, _ = await _log("elsewhere")
    report = await bed.verify()
    assert not report.ok and "another log" in report.problems[0] and report.orphans == []


async def test_looking_at_a_store_does_not_take_it_over() -> None:
    store, coordinator, _ = await _log()
    await store.delete([IDENTITY_OBJECT])
    strange = MemoryCoordinator()
    await _pair(store, strange).check()
    assert IDENTITY_OBJECT not in await _objects(store)
    assert await strange.get(IDENTITY_KEY, partition_key=CATALOG_PARTITION_KEY) is None
    await _pair(store, coordinator).claim()
    with pytest.raises(AnotherLog):
        await _pair(store, strange).check()


async def test_deleting_the_name_lets_a_new_coordinator_in() -> None:
    store, _, _ = await _log()
    await store.delete([IDENTITY_OBJECT])
    writer = writer_of(store, MemoryCoordinator())
    await writer.catalog.create("u")
    [result] = await writer.append_shared([group("u", 0, b"x")])
    assert result.ok


async def test_a_name_that_is_none_is_said() -> None:
    store, coordinator, _ = await _log()
    await store.put(IDENTITY_OBJECT, b"../../etc")
    with pytest.raises(StorageDamaged, match="no name of a log"):
        await _pair(store, coordinator).check()
    # It says nothing against the pair: who writes goes on.
    [result] = await writer_of(store, coordinator).append_shared([group("t", 0, b"more")])
    assert result.ok


async def test_two_that_name_a_store_at_once_agree() -> None:
    store, coordinator = MemoryStore(), MemoryCoordinator()
    late = _pair(store, coordinator)
    stored = late._stored

    async def then_the_other() -> str | None:
        found = await stored()
        await _pair(store, coordinator).claim()
        return found

    late._stored = then_the_other  # type: ignore[method-assign]
    with pytest.raises(Unavailable):
        await late.claim()
    await late.claim()


async def test_a_lost_reply_to_the_name_is_settled_by_looking() -> None:
    class Forgetful(MemoryStore):
        lost = False

        async def put(self, key, data, when=None):  # type: ignore[no-untyped-def]
            version = await (super().put(key, data) if when is None else super().put(key, data, when))
            if key == IDENTITY_OBJECT and not self.lost:
                self.lost = True
                raise OutcomeUnknown("put")
            return version

    store = Forgetful()
    writer = writer_of(store, MemoryCoordinator())
    [result] = await writer.append_shared([group("t", 0, b"x")])
    assert result.ok and store.lost


async def test_a_store_that_does_not_tell_whose_it_is_keeps_nobody_from_appending() -> None:
    class Silent(MemoryStore):
        silent = False

        async def get(self, key, *args, **options):  # type: ignore[no-untyped-def]
            if self.silent and key == IDENTITY_OBJECT:
                raise Unavailable("silent", hint="")
            return await super().get(key, *args, **options)

    store, coordinator = Silent(), MemoryCoordinator()
    await writer_of(store, coordinator).append_shared([group("t", 0, b"x")])
    store.silent = True
    [result] = await writer_of(store, coordinator).append_shared([group("t", 0, b"more")])
    assert result.ok, result.error


async def test_a_writer_that_may_put_and_nothing_else_creates_its_topic() -> None:
    class PutOnly(MemoryStore):
        async def get(self, key, *args, **options):  # type: ignore[no-untyped-def]
            raise AccessDenied(key, hint="")

    [result] = await writer_of(PutOnly(), MemoryCoordinator()).append_shared([group("t", 0, b"x")])
    assert result.ok, result.error


async def test_a_pair_is_looked_at_once_by_each_writer() -> None:
    store, requests = counted_store(MemoryStore())
    coordinator, calls = counted_coordinator(MemoryCoordinator())
    await writer_of(store, coordinator).append_shared([group("t", 0, b"x")])
    writer = writer_of(store, coordinator)
    for expected in ({"put": 1, "get": 1}, {"put": 1}, {"put": 1}):
        requests.clear()
        await writer.append_shared([group("t", 0, b"x")])
        assert requests == expected
    # Nor do further partitions of a known topic, which are read for the first time, ask again.
    calls.clear()
    requests.clear()
    await writer.append_shared([group("t", 1, b"x")])
    assert requests == {"put": 1}
