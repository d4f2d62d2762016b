"""Owner sets and the choice inside them."""

from __future__ import annotations

import collections

import pytest

from forebay.loadtest._routing import Router, owner_sets, routing_manifest

BROKERS = [f"broker-{number}" for number in range(1, 6)]


class Clock:
    """A clock that stands until it is moved."""

    now = 0.0

    def now_ms(self) -> int:
        return int(self.now * 1000)

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_owner_sets_are_the_same_for_everybody_whatever_the_order_of_brokers() -> None:
    first = owner_sets("t", 50, BROKERS, 2, seed=7)
    assert first == owner_sets("t", 50, list(reversed(BROKERS)), 2, seed=7)
    assert first != owner_sets("t", 50, BROKERS, 2, seed=8)
    assert all(len(set(owners)) == 2 for owners in first)


def test_a_broker_that_leaves_moves_only_its_own_partitions() -> None:
    before = owner_sets("t", 300, BROKERS, 1, seed=1)
    after = owner_sets("t", 300, BROKERS[:-1], 1, seed=1)
    moved = [old for old, new in zip(before, after, strict=True) if old != new]
    assert moved and all(old == ["broker-5"] for old in moved)


def test_every_broker_gets_a_fair_share() -> None:
    counts = collections.Counter(owners[0] for owners in owner_sets("t", 1000, BROKERS, 1, seed=3))
    assert min(counts.values()) > 120 and max(counts.values()) < 280


def test_round_robin_takes_the_owners_in_turn_and_never_leaves_the_set() -> None:
    router = Router([["a", "b"], ["c"]], "round_robin", Clock())
    assert [router.choose(0)[0] for _ in range(4)] == ["a", "b", "a", "b"]
    assert {router.choose(1)[0] for _ in range(4)} == {"c"}


def test_least_inflight_takes_the_one_with_the_fewest_requests() -> None:
    router = Router([["a", "b"]], "least_inflight", Clock())
    assert [router.choose(0)[0] for _ in range(3)] == ["a", "b", "a"]
    router.done("a", reached=True)
    router.done("a", reached=True)
    assert router.choose(0)[0] == "a"


@pytest.mark.parametrize("selection", ["round_robin", "least_inflight"])
def test_a_dead_broker_is_passed_over_inside_the_set_and_tried_again_later(selection: str) -> None:
    clock = Clock()
    router = Router([["a", "b"]], selection, clock)
    chosen, remap = router.choose(0)
    assert (chosen, remap) == ("a", None)
    router.done("a", reached=False)
    found = [router.choose(0, avoid="a") for _ in range(4)]
    assert {broker for broker, _ in found} == {"b"}
    assert any(remap is not None and (remap.away_from, remap.to) == ("a", "b") for _, remap in found)
    clock.now += 10
    assert "a" in {router.choose(0)[0] for _ in range(4)}


def test_where_all_owners_are_dead_they_are_tried_all_the_same() -> None:
    router = Router([["a", "b"]], "round_robin", Clock())
    for broker in ("a", "b"):
        router.choose(0)
        router.done(broker, reached=False)
    assert router.choose(0, avoid="a")[0] == "b"


def test_the_manifest_names_every_owner_and_what_it_was_made_from() -> None:
    sets = owner_sets("t", 3, BROKERS, 2, seed=9)
    manifest = routing_manifest("t", sets, BROKERS, 9, "round_robin")
    assert [each["owners"] for each in manifest["partitions"]] == sets
    assert (manifest["seed"], manifest["brokers"]) == (9, BROKERS)
