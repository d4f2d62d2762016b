"""The service: discovery, claims, shuffled passes, health, metrics; and what a store would cost."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest
from tests.log.compaction_bed import EAGER, Bed
from tests.log.writing import group, writer_in

from forebay.errors import OutcomeUnknown, SessionExpired, UsageError
from forebay.kit import HealthStatus, MetricsRegistry, as_json, prometheus_text
from forebay.log import (
    AppendGroup,
    CompactorService,
    CompactorServiceConfig,
    CountingStore,
    TopicSettings,
    VacuumConfig,
)
from forebay.log._billing import PRICES_PER_1000, estimate
from forebay.log._claims import Claims
from forebay.log._compaction_steps import CompactionSteps
from forebay.log._keys import CATALOG_PARTITION_KEY, PartitionKeys, topic_key
from forebay.log._meta import read_meta
from forebay.log._records import Claim, decode_record, encode_record
from forebay.log._uris import key_of
from forebay.testing import Actor, World

CONFIG = CompactorServiceConfig(compaction=EAGER, discovery_interval_ms=0, vacuum_interval_ms=0)


def service_of(bed: Bed, config: CompactorServiceConfig = CONFIG, **named: Any) -> CompactorService:
    return CompactorService(
        bed.store,
        bed.coordinator,
        clock=bed.clock,
        ids=bed.ids,
        randomness=bed.random,
        config=config,
        **named,
    )


def value(service: CompactorService, name: str, *labels: object) -> float:
    [family] = [family for family in service.metrics.families() if family.name == name]
    series: dict[tuple[str, ...], Any] = dict(family.series())
    return float(series[tuple(str(label) for label in labels)].value)


async def stopped(service: CompactorService) -> None:
    await service.stop()


async def test_a_topic_that_cannot_be_read_degrades_the_service_and_stops_no_other() -> None:
    bed = Bed()
    await bed.append(2, 2)
    await bed.coordinator.put(topic_key("torn"), b"torn", partition_key=CATALOG_PARTITION_KEY)
    service = service_of(bed)
    assert [each.outcome for each in await service.run_pass() if each.progressed] == ["compacted"]
    await service.start()
    health = service.health()
    assert health.status is HealthStatus.DEGRADED and topic_key("torn") in health.reasons[0]
    await stopped(service)


async def test_a_pass_compacts_every_partition_of_the_catalog() -> None:
    bed = Bed()
    await bed.append(2, 2, partitions=[0, 1, 2])
    service = service_of(bed)
    results = await service.run_pass()
    assert sorted((each.partition, each.outcome) for each in results if each.progressed) == [
        (0, "compacted"),
        (1, "compacted"),
        (2, "compacted"),
    ]
    assert await service.run_pass() == []
    await stopped(service)


async def test_an_idle_partition_costs_one_request_and_no_claim() -> None:
    bed = Bed()
    await bed.append(2, 2)
    service = service_of(bed)
    await service.run_pass()
    asked: list[str] = []
    write, scan = bed.coordinator.write, bed.coordinator.range_scan

    async def count_write(*arguments: Any, **named: Any) -> Any:
        asked.append("write")
        return await write(*arguments, **named)

    async def count_scan(*arguments: Any, **named: Any) -> Any:
        asked.append("scan")
        return await scan(*arguments, **named)

    bed.coordinator.write, bed.coordinator.range_scan = count_write, count_scan  # type: ignore[method-assign]
    await service.run_pass()
    assert asked == ["scan", "scan"]  # The catalog, and the partition.
    await stopped(service)


async def test_new_topics_are_found_and_deleted_ones_forgotten() -> None:
    bed = Bed()
    await bed.append(2)
    service = service_of(bed)
    await service.run_pass()
    assert service.targets.known == {PartitionKeys("t", 0)}
    await bed.writer.append_shared([AppendGroup.of("u", 3, [b"x"])])
    await service.run_pass()
    assert len(service.targets) == 5
    assert value(service, "log.compaction.lag_records", "u", 3) == 0
    await bed.writer.catalog.delete("u")
    await service.run_pass()
    assert service.targets.known == {PartitionKeys("t", 0)}
    assert value(service, "log.compaction.targets") == 1
    with pytest.raises(KeyError):
        value(service, "log.compaction.lag_records", "u", 3)
    await stopped(service)


async def test_a_topic_without_compaction_is_left_alone_and_its_settings_are_kept_to() -> None:
    bed = Bed()
    catalog = bed.writer.catalog
    await catalog.create("off", settings=TopicSettings(compaction=False))
    await catalog.create("old", settings=TopicSettings(compact_min_age_ms=60_000))
    await catalog.create("small", settings=TopicSettings(target_bytes=1))
    for topic in ("off", "old", "small"):
        for _ in range(3):
            await bed.writer.append_shared([AppendGroup.of(topic, 0, [b"x"])])
    service = service_of(bed, replace(CONFIG, seed=(("off", 0),)))
    assert PartitionKeys("off", 0) in service.targets.known
    service = service_of(bed)
    results = await service.run_pass()
    assert {each.topic for each in results} == {"old", "small"}
    assert [each.outcome for each in results if each.topic == "old"] == ["idle"]
    assert [each.records for each in results if each.topic == "small"] == [1, 1, 1, 0]
    await stopped(service)


async def test_seed_partitions_are_looked_after_whatever_the_catalog_says() -> None:
    bed = Bed()
    await bed.append(2, 2)
    await bed.coordinator.delete(topic_key("t"), partition_key=CATALOG_PARTITION_KEY)
    assert await service_of(bed).run_pass() == []
    service = service_of(bed, replace(CONFIG, seed=(("t", 0),)))
    assert (await service.run_pass())[0].outcome == "compacted"
    await stopped(service)


async def test_passes_are_shuffled() -> None:
    bed = Bed()
    await bed.append(2, 2, partitions=list(range(8)))
    orders = set()
    for seed in range(4):
        bed.random = random.Random(seed)
        service = service_of(bed, replace(CONFIG, workers=1, compaction=replace(EAGER, min_age_ms=10**9)))
        seen: list[int] = []
        attend = service._attend

        async def note(keys: PartitionKeys, seen: list[int] = seen, attend: Any = attend) -> Any:
            seen.append(keys.partition)
            return await attend(keys)

        service._attend = note  # type: ignore[method-assign]
        await service.run_pass()
        assert sorted(seen) == list(range(8))
        orders.add(tuple(seen))
        await stopped(service)
    assert len(orders) > 1


async def test_a_claimed_partition_is_left_to_its_holder_and_given_back_after_work() -> None:
    bed = Bed()
    await bed.append(2, 2)
    other = Claims(bed.coordinator, "other", clock=bed.clock, max_age_ms=10_000, session_timeout_ms=15_000)
    claim = await other.acquire(bed.keys)
    assert claim is not None
    service = service_of(bed)
    assert await service.run_pass() == []
    assert value(service, "log.compaction.claims", "busy") == 1
    await other.release(bed.keys, claim)
    assert (await service.run_pass())[0].outcome == "compacted"
    found = await bed.coordinator.get(bed.keys.claim, partition_key=bed.keys.partition_key)
    assert found is None
    await other.close()
    await stopped(service)


async def test_a_forgotten_claim_is_broken_by_its_age() -> None:
    bed = Bed()
    await bed.append(2, 2)
    old = Claim(compactor_id="dead", claimed_at_ms=bed.clock.now_ms())
    await bed.coordinator.put(
        bed.keys.claim, encode_record(old), partition_key=bed.keys.partition_key
    )  # Not ephemeral: as a server leaves it that lost track of the session.
    service = service_of(bed, replace(CONFIG, claim_age_ms=60_000))
    assert await service.run_pass() == []
    await bed.clock.sleep(61)
    assert (await service.run_pass())[0].outcome == "compacted"
    assert value(service, "log.compaction.claims", "broken") == 1
    await stopped(service)


async def test_a_claim_from_the_far_future_is_broken_too() -> None:
    bed = Bed()
    await bed.append(2, 2)
    ahead = Claim(compactor_id="dead", claimed_at_ms=bed.clock.now_ms() + 10**12)
    await bed.coordinator.put(bed.keys.claim, encode_record(ahead), partition_key=bed.keys.partition_key)
    service = service_of(bed)
    assert (await service.run_pass())[0].outcome == "compacted"
    await stopped(service)


async def test_claims_survive_an_expired_session_and_a_lost_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    bed = Bed()
    claims = Claims(bed.coordinator, "me", clock=bed.clock, max_age_ms=1_000, session_timeout_ms=15_000)
    put, calls = bed.coordinator.put, 0

    async def fail_twice(*arguments: Any, **named: Any) -> int:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise SessionExpired("it is over")
        version = await put(*arguments, **named)
        if calls == 2:
            raise OutcomeUnknown("put")
        return version

    monkeypatch.setattr(bed.coordinator, "put", fail_twice)
    # The session is opened again; then the reply is lost, and the claim counts as not ours.
    assert await claims.acquire(bed.keys) is None
    found = await bed.coordinator.get(bed.keys.claim, partition_key=bed.keys.partition_key)
    assert found is not None and decode_record(Claim, found.key, found.value).compactor_id == "me"
    # It is recognised at the next call.
    assert await claims.acquire(bed.keys) is not None
    await claims.close()
    assert await bed.coordinator.get(bed.keys.claim, partition_key=bed.keys.partition_key) is None


async def test_a_defect_in_one_partition_does_not_hold_up_the_others_and_gives_its_claim_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bed = Bed()
    await bed.append(2, 2, partitions=[0, 1])
    service = service_of(bed)
    work = service.compactor.compact_all

    async def fails_for_one(topic: str, partition: int, **options: Any) -> Any:
        if partition == 0:
            raise ZeroDivisionError("of ours")
        return await work(topic, partition, **options)

    monkeypatch.setattr(service.compactor, "compact_all", fails_for_one)
    results = await service.run_pass()
    assert (results[0].partition, results[0].outcome) == (1, "compacted")
    assert "of ours" in str(service.health().details["failing"])
    assert await bed.coordinator.get(bed.keys.claim, partition_key=bed.keys.partition_key) is None
    monkeypatch.undo()
    assert (await service.run_pass())[0].outcome == "compacted"
    assert service.health().details["failing"] == {}
    await stopped(service)


async def test_a_failing_partition_is_reported_and_does_not_hold_up_the_others() -> None:
    bed = Bed()
    await bed.append(2, 2, partitions=[0, 1])
    await bed.writer.append_shared([AppendGroup.of("t", 0, [b"x"])])
    await bed.writer.close()
    await bed.append(2, partitions=[1])
    victim = (await bed.index())[-1]
    await bed.store.delete([key_of(bed.store, victim.entry.data_key)])
    service = service_of(bed)
    results = await service.run_pass()
    assert [(each.partition, each.outcome) for each in results if each.progressed] == [(1, "compacted")]
    health = service.health()
    assert "t:0" in health.details["failing"] and value(service, "log.compaction.runs", "failed") == 1
    await service.start()
    assert service.health().status in (HealthStatus.DEGRADED, HealthStatus.FAILED)
    assert any("t:0" in reason for reason in service.health().reasons)
    await stopped(service)
    assert service.health().status is HealthStatus.STOPPED


async def test_every_family_of_metrics_is_there() -> None:
    bed = Bed()
    await bed.append(2, 2, 2)
    service = service_of(bed)
    await service.run_pass()
    assert value(service, "log.compaction.runs", "compacted") == 1
    assert value(service, "log.compaction.records") == 6
    assert value(service, "log.compaction.entries") == 3
    assert value(service, "log.compaction.read_bytes") > 0 < value(service, "log.compaction.written_bytes")
    assert value(service, "log.compaction.lag_records", "t", 0) == 0
    assert value(service, "log.compaction.pending_appends", "t", 0) == 1
    assert value(service, "log.compaction.candidate_entries", "t", 0) == 0
    assert value(service, "log.store_requests", "put") == 1
    assert value(service, "log.store_request_cost_dollars") > 0
    [stages] = [
        family
        for family in service.metrics.families()
        if family.name == "log.compaction.stage_duration_seconds"
    ]
    assert {labels[0] for labels, _ in stages.series()} == {
        "select",
        "read",
        "encode",
        "write",
        "index",
        "delete",
        "cursor",
    }
    assert "log_compaction_runs_total" in prometheus_text(service.metrics)
    assert as_json(service.metrics)
    await stopped(service)


async def test_what_waits_is_shown_as_candidates() -> None:
    bed = Bed()
    await bed.append(2, 2)
    service = service_of(bed, replace(CONFIG, compaction=replace(EAGER, wait_for_full_ms=10**9)))
    [result] = await service.run_pass()
    assert result.outcome == "waiting"
    assert value(service, "log.compaction.candidate_entries", "t", 0) == 2
    assert value(service, "log.compaction.candidate_bytes", "t", 0) == result.candidate_bytes
    assert value(service, "log.compaction.lag_records", "t", 0) == 4
    await stopped(service)


async def test_a_partition_with_too_little_to_do_is_asked_less_and_less_often() -> None:
    bed = Bed()
    await bed.append(2, 2)
    patient = replace(CONFIG, compaction=replace(EAGER, wait_for_full_ms=60_000), rest_ms_max=20_000)
    service = service_of(bed, patient)
    asked = []
    for _ in range(60):
        asked.append(len(await service.run_pass()))
        await bed.clock.sleep(1)
    # After 5, 10 and 20 seconds, then every 20.
    assert [second for second, results in enumerate(asked) if results] == [0, 5, 15, 35, 55]
    await bed.clock.sleep(20)
    assert [result.outcome for result in await service.run_pass()] == ["compacted", "idle"]
    await stopped(service)


async def test_recoveries_are_counted_by_the_state_that_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    bed = Bed()
    await bed.append(2, 2)

    async def crash(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(CompactionSteps, "_delete_old", crash)
        with pytest.raises(KeyboardInterrupt):
            await bed.compact()
    service = service_of(bed)
    await service.run_pass()
    assert value(service, "log.compaction.recoveries", "DELETING_OLD") == 1
    await stopped(service)


async def test_a_long_backlog_gives_others_their_turn() -> None:
    bed = Bed()
    await bed.append(*[1] * 10)
    config = replace(CONFIG, runs_per_claim=3, compaction=replace(EAGER, entries_max=1))
    service = service_of(bed, config)
    assert [len(await service.run_pass()) for _ in range(4)] == [3, 3, 3, 2]
    await stopped(service)


async def test_vacuum_runs_beside_compaction() -> None:
    bed = Bed()
    await bed.append(2, 2)
    service = service_of(bed)
    await service.run_pass()
    report = await service.run_vacuum()
    assert service.last_vacuum is report and report.objects == 3
    await stopped(service)


def test_services_of_two_processes_share_the_work_and_one_may_die() -> None:
    async def serve(me: Actor, stop: list[bool]) -> None:
        config = replace(CONFIG, interval_ms=200, session_timeout_ms=2_000)
        service = CompactorService(
            me.store, me.coordinator, clock=me.clock, ids=me.ids, randomness=me.random, config=config
        )
        async with service:
            while not stop:
                await me.clock.sleep(0.2)
            assert service.health().status is HealthStatus.HEALTHY

    async def main(world: World) -> None:
        async def write(me: Actor) -> None:
            writer = writer_in(me)
            for number in range(5):
                await writer.append_shared([group("t", p, b"%d" % number) for p in range(6)])

        await world.join(world.spawn("writer", write))
        stop: list[bool] = []
        ann, bob = (world.spawn(name, serve, stop) for name in ("ann", "bob"))
        await world.clock().sleep(0.5)
        ann.crash()
        await world.clock().sleep(20)
        stop.append(True)
        await world.join(bob)
        metas = [await read_meta(world.keys, PartitionKeys("t", number)) for number in range(6)]
        assert [(meta.lag, meta.compaction) for meta in metas] == [(0, None)] * 6

    for seed in range(5):
        World(seed).run(main)


async def test_a_store_is_counted_and_priced() -> None:
    metrics = MetricsRegistry()
    async with CountingStore(Bed().store, metrics) as store:
        await store.put("a", b"123")
        await store.put_parts("b/c", [b"1", b"2"])
        assert (await store.get("a")).data == b"123"
        assert await store.get_range("a", 0, 2) == b"12"
        assert await store.get_if_changed("a", "other") is not None
        assert (await store.head("a")).size == 3
        assert [info.key async for info in store.list()] == ["a", "b/c"]
        await store.delete(["a"])
    sent = metrics.counter("log.store_bytes", "Bytes to and from the store", labels=("direction",)).labels(
        "sent"
    )
    assert sent.value == 5
    bill = estimate(metrics)
    assert bill["requests"] == {"put": 2, "get": 2, "range_get": 1, "head": 1, "list": 1, "delete": 1}
    expected = (2 * PRICES_PER_1000["put"] + 4 * PRICES_PER_1000["get"] + PRICES_PER_1000["list"]) / 1000
    assert bill["request_dollars"] == pytest.approx(expected)


@pytest.mark.parametrize(
    "wrong",
    [
        {"workers": 0},
        {"interval_ms": 0},
        {"vacuum_interval_ms": -1},
        {"rest_ms_max": -1},
        {"vacuum": VacuumConfig(grace_ms=1_000_000)},
    ],
)
def test_a_configuration_out_of_range_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        CompactorServiceConfig(**wrong)


async def test_the_service_starts_stops_and_starts_again() -> None:
    bed = Bed()
    await bed.append(2, 2)
    service = service_of(bed)
    for _ in range(2):
        async with service:
            await asyncio.sleep(0)
            assert service.health().details["services"].keys() == {"compaction"}
        assert service.health().status is HealthStatus.STOPPED
