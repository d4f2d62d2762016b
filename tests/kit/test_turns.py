"""Turns: a caller that never waits gives way now and then, one that waits anyway never has to."""

from __future__ import annotations

import asyncio

from forebay.kit.turns import TURN_S_MAX, Turns


class Reading:
    """A clock that stands where it is put."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now_ms(self) -> int:
        return int(self.seconds * 1000)

    def monotonic(self) -> float:
        return self.seconds

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


async def test_a_caller_that_never_waits_is_told_to_give_way() -> None:
    clock = Reading()
    turns = Turns(clock)
    assert not turns.overdue()
    clock.seconds += TURN_S_MAX / 2
    assert not turns.overdue()
    clock.seconds += TURN_S_MAX / 2
    assert turns.overdue() and turns.overdue()


async def test_a_turn_of_the_loop_begins_the_time_anew() -> None:
    clock = Reading()
    turns = Turns(clock)
    for _ in range(3):
        assert not turns.overdue()
        clock.seconds += 2 * TURN_S_MAX
        assert turns.overdue()
        await clock.sleep(0)


async def test_calls_in_turns_of_their_own_never_give_way() -> None:
    clock = Reading()
    turns = Turns(clock)
    for _ in range(3):
        assert not turns.overdue()
        clock.seconds += 2 * TURN_S_MAX
        await clock.sleep(0)
