"""Producers that share one manifest, in virtual time: the figures that were promised."""

from __future__ import annotations

import random

import pytest
from benchmarks.figures.buffer_contention import contention, manifest_reads
from tests.buffer.scripted_store import ManualClock

from forebay.buffer._pace import CROWD_MIN, PERIOD_S_MAX, Pace
from forebay.errors import PreconditionFailed, Unavailable
from forebay.kit import RetryPolicy

LOST = PreconditionFailed("ingest/manifest", expected="1")
POLICY = RetryPolicy(base_ms=100, cap_ms=100)


def test_one_producer_needs_two_requests_per_batch_and_never_waits_for_others() -> None:
    found = contention(1)
    assert found.requests_per_batch <= 2.1 and found.p99_ms <= 300


def test_sixteen_producers_neither_hammer_the_manifest_nor_starve() -> None:
    found = contention(16)
    assert found.requests_per_batch <= 6 and found.p99_ms <= 3_000


def test_a_consumer_that_keeps_up_reads_no_version_of_the_manifest_twice() -> None:
    assert 0.1 < manifest_reads(2) <= 1


async def test_a_lone_producer_is_not_slowed_down() -> None:
    clock = ManualClock()
    pace = Pace(clock, random.Random(1))
    for number in range(5):
        pace.saw(number, 1)
        pace.succeeded(number, 1)
        before = clock.monotonic()
        await pace.turn()
        assert clock.monotonic() == before and not pace.is_shared
    assert not pace.is_stale(clock.monotonic() - 60)


async def test_the_manifest_tells_how_many_share_it() -> None:
    clock = ManualClock()
    pace = Pace(clock, random.Random(1))
    pace.saw(0, 1)
    for number in range(0, 400, 8):
        pace.succeeded(number, 1)  # seven entries of others between two of ours
    assert pace.crowd == pytest.approx(8, rel=0.05)
    before = clock.monotonic()
    await pace.turn()
    assert 0.3 < clock.monotonic() - before < 1
    pace.saw(100_000, 1)
    pace.succeeded(200_000, 1)
    before = clock.monotonic()
    await pace.turn()
    assert clock.monotonic() - before <= PERIOD_S_MAX, "however many there are"


def test_two_producers_do_not_starve_each_other() -> None:
    found = [contention(2, seed) for seed in range(1, 5)]
    assert max(run.p99_ms for run in found) <= 600
    assert sum(run.requests_per_batch for run in found) / len(found) <= 2.4


async def test_a_producer_that_loses_for_a_while_is_not_forgotten() -> None:
    pace = Pace(ManualClock(), random.Random(1))
    pace.saw(0, 1)
    for number in range(0, 40, 2):
        pace.succeeded(number, 1)  # two take turns
    for number in range(40, 45):
        pace.succeeded(number, 1)  # and now one of them only loses
    assert pace.is_shared


async def test_what_others_did_while_there_was_nothing_to_enqueue_is_no_reason_to_wait() -> None:
    clock = ManualClock()
    pace = Pace(clock, random.Random(1))
    pace.saw(0, 1)
    pace.succeeded(0, 1)
    clock.advance(60)
    await pace.turn()
    pace.saw(100_000, 1)
    pace.succeeded(100_000, 1)
    before = clock.monotonic()
    await pace.turn()
    assert clock.monotonic() - before < 0.2


async def test_a_store_that_stalls_now_and_then_teaches_no_long_pauses() -> None:
    clock = ManualClock()
    pace = Pace(clock, random.Random(1))
    pace.saw(0, 1)
    for number in range(0, 80, 4):
        pace.read_took(0.005)
        pace.write_took(5.0 if number % 16 == 0 else 0.01)
        pace.succeeded(number, 1)
    before = clock.monotonic()
    await pace.turn()
    assert clock.monotonic() - before < 0.1
    assert all(pace.wait_after(LOST, 1, before, POLICY) < 0.1 for _ in range(100))


def test_whoever_has_waited_longest_tries_first() -> None:
    clock = ManualClock()
    pace = Pace(clock, random.Random(1))
    pace.crowd = 10.0
    assert pace.crowd > CROWD_MIN

    def longest(age_s: float) -> float:
        since = clock.monotonic() - age_s
        return max(pace.wait_after(LOST, 1, since, POLICY) for _ in range(200))

    assert longest(0.0) > 3 * longest(10.0)


def test_errors_wait_as_the_policy_says() -> None:
    pace = Pace(ManualClock(), random.Random(1))
    waits = [pace.wait_after(Unavailable("down"), 1, 0.0, POLICY) for _ in range(200)]
    assert 0.05 < max(waits) <= 0.1
