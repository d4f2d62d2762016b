"""Queues under every kind of fault, many seeds each: nothing lost, doubled, reordered or made up."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.buffer.queue_world import CONFIG, Plan, QueueWorld

from forebay.buffer import ManifestCommitter
from forebay.buffer._committer import _Group
from forebay.testing import FAULT_KINDS, Faults, run_seeds, seeds

STORMY = Faults.all(0.03)


def keeps_its_promises(seed: int, plan: Plan) -> QueueWorld:
    run = QueueWorld(seed, plan)
    problems = run.run()
    assert not problems, "\n".join(problems)
    return run


SHARES = 4
"""Parts that the small seeds are dealt out to, so that workers can share them."""


@pytest.mark.parametrize("share", range(SHARES))
def test_small_queues_keep_their_promises_under_any_faults(share: int) -> None:
    def scenario(seed: int) -> QueueWorld:
        plan = Plan(
            producers=1 + seed % 3,
            calls=1 + seed % 2,
            consumers=1 + (seed % 5 == 0),
            faults=STORMY,
            crash_rate=0.003 if seed % 2 else 0.0,
            skew_ms=3_000 if seed % 7 == 0 else 0,
        )
        return keeps_its_promises(seed, plan)

    chosen = seeds(2_000)[share::SHARES]
    runs = list(run_seeds(scenario, chosen))
    assert sum(told.status == "ok" for run in runs for told in run.told) > len(runs)


@pytest.mark.parametrize("kind", FAULT_KINDS)
def test_one_kind_of_fault_at_a_high_rate(kind: str) -> None:
    plan = Plan(producers=2, calls=2, faults=Faults.all(0.3).only(kind), rotate_s=0.5)
    for _ in run_seeds(lambda seed: keeps_its_promises(seed, plan), seeds(15)):
        pass


def test_sixteen_producers_share_one_manifest() -> None:
    plan = Plan(producers=16, calls=3, faults=Faults.all(0.01), crash_rate=0.001)
    for _ in run_seeds(lambda seed: keeps_its_promises(seed, plan), seeds(4)):
        pass


def test_producers_that_commit_together_keep_their_promises_under_any_faults() -> None:
    def scenario(seed: int) -> QueueWorld:
        plan = Plan(
            producers=1 + seed % 2,
            together=2 + seed % 3,
            calls=1 + seed % 3,
            faults=STORMY,
            crash_rate=0.002 if seed % 2 else 0.0,
        )
        return keeps_its_promises(seed, plan)

    for _ in run_seeds(scenario, seeds(150)):
        pass


def test_consumers_that_take_over_from_each_other_store_every_batch_once() -> None:
    plan = Plan(producers=2, calls=4, consumers=3, faults=STORMY)
    runs = list(run_seeds(lambda seed: keeps_its_promises(seed, plan), seeds(30)))
    assert sum(run.fenced for run in runs) > 0


def test_extensions_and_compression_change_nothing_of_this() -> None:
    config = replace(CONFIG, entry_extension=True, batch_compression="zstd", merge_metadata=True)
    plan = Plan(producers=2, calls=3, faults=STORMY, crash_rate=0.002, config=config)
    for _ in run_seeds(lambda seed: keeps_its_promises(seed, plan), seeds(20)):
        pass


@pytest.mark.parametrize("in_flight", [True, False])
@pytest.mark.parametrize("actor", ["producer-0", "consumer-0"])
def test_a_crash_after_any_step_breaks_no_promise(actor: str, in_flight: bool) -> None:
    crashes = 0
    for step in range(0, 120, 2 if actor == "consumer-0" else 1):
        plan = Plan(producers=1, calls=2, crash=(actor, step, in_flight))
        crashes += keeps_its_promises(7, plan).crashes
    assert crashes > 15


def test_the_scenario_would_see_a_committer_that_repeats_without_looking(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def blind(self: ManifestCommitter, group: _Group) -> None:
        await self._file.load()
        group.settle()

    monkeypatch.setattr(ManifestCommitter, "_load", blind)
    plan = Plan(producers=2, calls=3, faults=STORMY)
    problems = [problem for seed in range(40) for problem in QueueWorld(seed, plan).run()]
    assert any("times" in problem for problem in problems)


def test_the_same_seed_gives_the_same_run() -> None:
    plan = Plan(faults=STORMY, crash_rate=0.002)
    assert keeps_its_promises(5, plan).world.trace_hash() == keeps_its_promises(5, plan).world.trace_hash()


@pytest.mark.nightly
@pytest.mark.timeout(7_200)
def test_many_seeds_of_larger_queues() -> None:
    def scenario(seed: int) -> QueueWorld:
        plan = Plan(
            producers=1 + seed % 16,
            calls=1 + seed % 6,
            together=1 + seed % 3,
            consumers=1 + seed % 3,
            faults=Faults.all((seed % 5) * 0.015),
            crash_rate=0.002,
            skew_ms=5_000,
        )
        return keeps_its_promises(seed, plan)

    for _ in run_seeds(scenario, seeds(2_000)):
        pass
