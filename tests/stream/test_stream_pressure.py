"""Lag: measured, told, alarmed about, and in the end a reason to refuse."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from tests.stream.logs import HandClock, expected, read_all, reader_of, tier_of, write_log

from forebay.errors import Backpressure, Unavailable, UsageError
from forebay.kit.metrics import MetricsRegistry
from forebay.kit.metrics_views import as_json
from forebay.storage import MemoryStore
from forebay.stream import LagGate, LagLimits, OffsetOutOfRange, Spec, StreamWriter

LIMITS = LagLimits(bytes_slow=1000, bytes_max=2000, wait_ms_max=800)


async def test_a_writer_too_far_ahead_is_refused_until_the_tier_has_caught_up(tmp_path: Path) -> None:
    clock, store = HandClock(), MemoryStore()
    gate = LagGate(LIMITS, clock=clock)
    with StreamWriter(tmp_path, epoch=1, clock=clock, gate=gate) as writer:
        tier = tier_of(tmp_path, store, clock=clock, committed=lambda: writer.commit_offset, gate=gate)
        written = 0
        with pytest.raises(Backpressure, match="not in the bucket"):
            while True:
                writer.append([f"r{written}".encode()])
                written += 1
        assert 2000 <= gate.bytes < 2100
        assert (writer.next_offset, gate.refused) == (written, 1)
        with pytest.raises(Backpressure):
            await writer.admit()
        # What is not committed is not tiered, and so it still counts.
        await tier.run_once()
        with pytest.raises(Backpressure):
            writer.append([b"x"])
        writer.commit()
        await tier.run_once()
        assert gate.bytes == 0
        writer.append([f"r{written}".encode()])
        writer.commit()
        await tier.run_once()
    assert await read_all(reader_of(store)) == expected(0, written + 1)


async def test_a_writer_on_its_way_to_the_bound_is_slowed_down_more_and_more(tmp_path: Path) -> None:
    clock = HandClock()
    gate = LagGate(LIMITS, clock=clock)
    waits = []
    with StreamWriter(tmp_path, epoch=1, clock=clock, gate=gate) as writer:
        while gate.bytes < LIMITS.bytes_max:
            begin = clock.ms
            await writer.admit()
            waits.append(clock.ms - begin)
            writer.append([b"x" * 100])
    slowed = [wait for wait in waits if wait]
    assert waits[: len(waits) - len(slowed)] == [0] * (len(waits) - len(slowed))
    assert slowed == sorted(slowed)
    assert len(set(slowed)) > 3
    assert max(slowed) <= LIMITS.wait_ms_max


async def test_what_a_restart_finds_counts_until_the_tier_says_otherwise(tmp_path: Path) -> None:
    clock = HandClock()
    write_log(tmp_path, 40, clock=clock)
    gate = LagGate(LagLimits(bytes_slow=100, bytes_max=200), clock=clock)
    with StreamWriter(tmp_path, epoch=1, clock=clock, gate=gate) as writer:
        with pytest.raises(Backpressure):
            writer.append([b"x"])
        await tier_of(tmp_path, MemoryStore(), clock=clock, gate=gate).run_once()
        writer.append([b"x"])


async def test_age_alone_refuses_where_it_is_bounded(tmp_path: Path) -> None:
    clock = HandClock()
    gate = LagGate(LagLimits(age_ms_max=5000), clock=clock)
    with StreamWriter(tmp_path, epoch=1, clock=clock, gate=gate) as writer:
        writer.append([b"x"])
        clock.ms += 4999
        writer.append([b"x"])
        clock.ms += 1
        with pytest.raises(Backpressure, match="5,000 ms"):
            writer.append([b"x"])


def test_the_lag_of_many_chunks_is_held_in_few_runs_and_never_told_too_small() -> None:
    clock = HandClock()
    gate = LagGate(LagLimits(bytes_slow=1, bytes_max=64_000), clock=clock)
    for number in range(1, 60_000):
        gate.wrote(number, 1, clock.ms)
    assert len(gate._runs) <= 65
    gate.tiered(30_000)
    assert 29_999 <= gate.bytes < 31_000 + 1000
    gate.tiered(59_999)
    assert (gate.bytes, gate.age_ms) == (0, 0)
    gate.wrote(59_000, 5, clock.ms)  # A late word about what is in the bucket already.
    assert gate.bytes == 0


@pytest.mark.parametrize(
    "wrong", [{"bytes_slow": 0}, {"bytes_slow": 3, "bytes_max": 2}, {"age_ms_max": 0}, {"wait_ms_max": -1}]
)
def test_limits_out_of_range_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        LagLimits(**wrong)


async def test_an_alarm_is_logged_once_when_it_begins_and_once_when_it_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock, registry = HandClock(), MetricsRegistry()
    write_log(tmp_path, 20, clock=clock)

    class Broken(MemoryStore):
        works = False

        async def put(self, *parts: object, **named: object) -> str:
            if not self.works:
                raise Unavailable("no answer")
            return await super().put(*parts, **named)  # type: ignore[arg-type]

    store = Broken()
    tier = tier_of(tmp_path, store, clock=clock, metrics=registry, config={"lag_bytes_alarm": 500})
    caplog.set_level(logging.INFO, "forebay.stream")
    for _ in range(3):
        with pytest.raises(Unavailable):
            await tier.run_once()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "bytes are not in the bucket yet" in caplog.text
    assert alarm(registry) == 1
    store.works = True
    await tier.run_once()
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert alarm(registry) == 0


def alarm(registry: MetricsRegistry) -> float:
    text = str(as_json(registry))
    return float(text.split("'stream.lag_alarm'")[1].split("'value':")[1].split("}", maxsplit=1)[0])


async def test_an_absolute_offset_is_there_or_refused_with_the_range(tmp_path: Path) -> None:
    write_log(tmp_path, 10)
    store = MemoryStore()
    tier = tier_of(tmp_path, store)
    await tier.run_once()
    end = tier.log.next_offset
    for local in (None, tmp_path):
        reader = reader_of(store, local)
        for offset in range(end):
            wanted = await reader.attach(Spec("offset", offset))
            assert await reader.attach(Spec("abs", offset)) == wanted
        with pytest.raises(OffsetOutOfRange) as told:
            await reader.attach(Spec.parse(f"abs:{end}"))
        assert (told.value.first_offset, told.value.next_offset, told.value.offset) == (0, end, end)
    with pytest.raises(UsageError):
        Spec.parse("abs:-1")


async def test_an_absolute_offset_in_an_empty_stream_is_refused(tmp_path: Path) -> None:
    write_log(tmp_path, 0)
    store = MemoryStore()
    await tier_of(tmp_path, store).run_once()
    with pytest.raises(OffsetOutOfRange):
        await reader_of(store).attach(Spec("abs", 0))
