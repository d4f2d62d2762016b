"""The simulation on a real problem: writers that append to one object, through faults and crashes.

FOREBAY_SEEDS says how many seeds to try.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from forebay.errors import NotFound
from forebay.testing import Actor, Constant, Faults, Latencies, World, check, run_seeds, seeds
from forebay.testing.scenarios import CasLog, CasLogScenario, run_cas_log

DECISIONS = [0.0, 0.5, 1.0]


def test_careful_writers_keep_every_promise_under_faults_and_crashes() -> None:
    crashes = appended = 0
    for result in run_seeds(run_cas_log):
        assert not result.problems, "\n".join(map(str, result.problems))
        crashes += result.crashes
        appended += result.appended
    assert crashes
    assert appended > 60 * len(seeds())


def test_careful_writers_survive_a_storm() -> None:
    storm = CasLogScenario(writers=3, appends=6, faults=Faults.all(0.1), rotate_s=0.0, crash_rate=0.01)
    for result in run_seeds(lambda seed: run_cas_log(seed, storm), range(len(seeds()) // 4 + 1)):
        assert not result.problems, "\n".join(map(str, result.problems))


def test_blind_retry_is_caught_duplicating() -> None:
    blind = CasLogScenario(blind=True)
    found = {problem.kind for seed in range(10) for problem in run_cas_log(seed, blind).problems}
    assert "duplicated" in found


def test_without_faults_and_rivals_an_append_costs_one_request() -> None:
    calm = CasLogScenario(writers=1, appends=20, read_every=0, faults=Faults(), crash_rate=0.0)
    result = run_cas_log(1, calm)
    assert result.requests == 21
    assert result.appended == 20
    assert not result.problems


def _append_once(crash_step: int | None, in_flight: bool, decides_at: float) -> tuple[bool, int]:
    """One append, crashed after so many steps; the next life tries again. Returns crashed, and the steps."""

    async def append(me: Actor) -> None:
        log = CasLog(me)
        with me.world.history.append("log", [f"life {me.lives}"]) as call:
            call.ok(offset=await log.append(f"life {me.lives}"))

    async def retry(me: Actor) -> None:
        await CasLog(me).append("life 1")

    async def main(world: World) -> tuple[bool, int]:
        await world.bucket.put("log", b"life 0")
        with world.history.append("log", ["life 0"]) as call:
            call.ok(offset=0)
        writer = world.spawn("writer", append)
        if crash_step is not None:
            writer.crash_at(crash_step, in_flight)
        await world.join()
        crashed, steps = writer.crashed, writer.steps
        if crashed:
            writer.restart(retry)
            await world.join()
        await world.clock().sleep(60)
        lines = (await world.bucket.get("log")).data.decode().split("\n")
        assert lines == ["life 0", "life 1"]
        if not (crashed and crash_step == 0):
            world.history.final("log", lines)
            assert check(world.history) == []
        return crashed, steps

    latencies = Latencies(Constant(10), decides_at=decides_at)
    return World(1, store_latencies=latencies).run(main)


@pytest.mark.parametrize("decides_at", DECISIONS)
@pytest.mark.parametrize("in_flight", [True, False])
def test_append_survives_a_crash_after_every_step(decides_at: float, in_flight: bool) -> None:
    crashed, steps = _append_once(None, in_flight, decides_at)
    assert not crashed
    assert steps >= 3
    outcomes = [_append_once(step, in_flight, decides_at) for step in range(steps)]
    assert outcomes == [(True, step) for step in range(steps)]
    assert _append_once(steps, in_flight, decides_at) == (False, steps)


def test_crash_matrix_meets_the_append_done_and_not_done() -> None:
    """The matrix is worth something only if it cuts on both sides of the effect."""

    def there(step: int, in_flight: bool) -> bool:
        async def put(me: Actor) -> None:
            await me.store.put("k", b"v")

        async def main(world: World) -> bool:
            world.spawn("a", put).crash_at(step, in_flight)
            await world.clock().sleep(10)
            try:
                await world.bucket.get("k")
            except NotFound:
                return False
            return True

        return World(1).run(main)

    assert [there(0, True), there(1, False), there(1, True)] == [False, False, True]


_FINGERPRINTS = """
from forebay.testing.scenarios import run_cas_log
print(*(run_cas_log(seed).trace_hash for seed in range(4)))
"""


def test_same_seed_same_trace_across_processes_and_hash_seeds() -> None:
    told = []
    for hash_seed in ("0", "1", "4711"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(
            [sys.executable, "-c", _FINGERPRINTS], env=environment, capture_output=True, text=True, check=True
        )
        told.append(done.stdout.split())
    assert told[0] == told[1] == told[2]
    assert told[0] == [run_cas_log(seed).trace_hash for seed in range(4)]
    assert len(set(told[0])) == 4


def test_ten_replays_of_one_seed_are_identical() -> None:
    assert len({run_cas_log(7).trace_hash for _ in range(10)}) == 1


def test_different_seeds_are_different_runs() -> None:
    results = [run_cas_log(seed) for seed in range(10)]
    assert len({result.trace_hash for result in results}) == 10
    assert len({result.requests for result in results}) > 3
