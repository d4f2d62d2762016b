"""When a refused turn is kept."""

from __future__ import annotations

from forebay.kit.second_tries import SKIPS_MAX, UNUSED_MAX, SecondTries


def kept_of(tries: SecondTries, refusals: int) -> int:
    """How many of so many refusals keep their turn, where nobody ever comes back."""
    kept = 0
    for _ in range(refusals):
        if tries.is_due():
            kept += 1
            tries.unused()
    return kept


def test_callers_who_come_back_are_always_waited_for() -> None:
    tries = SecondTries()
    for _ in range(100):
        assert tries.is_due()
        tries.used()


def test_callers_who_never_come_back_are_waited_for_ever_more_rarely() -> None:
    assert kept_of(SecondTries(), 1_000) < 16


def test_the_offer_never_ends_for_good() -> None:
    tries = SecondTries()
    kept_of(tries, 10_000)
    assert kept_of(tries, 2 * (SKIPS_MAX + 1)) == 2


def test_one_who_came_back_makes_good_for_all_before() -> None:
    tries = SecondTries()
    kept_of(tries, 10_000)
    while not tries.is_due():
        pass
    tries.used()
    for _ in range(UNUSED_MAX):
        assert tries.is_due()
        tries.unused()
    assert [tries.is_due(), tries.is_due()] == [False, True]


def test_one_who_comes_too_late_now_and_then_is_always_waited_for() -> None:
    tries = SecondTries()
    for _ in range(50):
        for _ in range(UNUSED_MAX - 1):
            assert tries.is_due()
            tries.unused()
        assert tries.is_due()
        tries.used()
