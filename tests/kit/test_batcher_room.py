"""The Batcher at its bounds: who waits, in which order, and who is let in when somebody gives up."""

from __future__ import annotations

import asyncio

import pytest
from tests.kit.batcher_engine import Engine, settle

from forebay.errors import Backpressure, Closed, LimitExceeded
from forebay.kit.batcher import Ticket


async def test_at_the_bound_callers_wait_in_line_and_the_open_batch_leaves_early() -> None:
    engine = Engine(hold_commits=True)
    batcher = engine.batcher(pending_items_max=2)
    await batcher.add("a", 1)
    await batcher.add("b", 1)
    waiting = [asyncio.ensure_future(batcher.add(name, 1)) for name in ("c", "d")]
    await settle()
    assert not any(wait.done() for wait in waiting)
    assert batcher.pending_items == 2
    assert batcher.stats.closed == {"pressure": 1}
    with pytest.raises(Backpressure):
        batcher.add_nowait("e", 1)
    engine.hold_commits = False
    engine.commit_gates[0].set_result(None)
    tickets: list[Ticket[str]] = [await wait for wait in waiting]
    await batcher.close()
    assert [await ticket for ticket in tickets] == ["durable c", "durable d"]


async def test_bytes_are_bounded_and_an_item_that_can_never_fit_is_refused() -> None:
    engine = Engine(hold_commits=True)
    batcher = engine.batcher(pending_bytes_max=100)
    with pytest.raises(LimitExceeded):
        await batcher.add("huge", 101)
    await batcher.add("a", 60)
    with pytest.raises(Backpressure):
        batcher.add_nowait("b", 60)
    engine.hold_commits = False
    await settle()
    engine.commit_gates[0].set_result(None)
    ticket = await batcher.add("b", 60)
    await batcher.close()
    assert await ticket == "durable b"


async def test_a_cancelled_wait_leaves_its_room_to_the_next() -> None:
    engine = Engine(hold_commits=True)
    batcher = engine.batcher(pending_items_max=1)
    await batcher.add("a", 1)
    cancelled = asyncio.ensure_future(batcher.add("gone", 1))
    patient = asyncio.ensure_future(batcher.add("b", 1))
    await settle()
    cancelled.cancel()
    engine.hold_commits = False
    engine.commit_gates[0].set_result(None)
    ticket = await patient
    await batcher.flush()
    assert await ticket == "durable b"
    assert (batcher.pending_items, batcher.pending_bytes) == (0, 0)
    assert engine.uploads == [["a"], ["b"]]
    await batcher.close()


async def test_a_wait_cancelled_in_the_moment_it_is_granted_gives_its_room_back() -> None:
    engine = Engine(hold_commits=True)
    batcher = engine.batcher(pending_items_max=1)
    ticket = await batcher.add("a", 1)
    waiting = asyncio.ensure_future(batcher.add("gone", 1))
    await settle()
    ticket.add_done_callback(lambda _: waiting.cancel())
    engine.hold_commits = False
    engine.commit_gates[0].set_result(None)
    await batcher.flush()
    await settle()
    assert waiting.cancelled()
    assert batcher.pending_items == 0
    await batcher.close()


async def test_nobody_overtakes_a_caller_that_was_given_room_and_has_not_run_yet() -> None:
    engine = Engine(hold_commits=True)
    batcher = engine.batcher(pending_items_max=2, batch_items=2)
    await batcher.add("a", 1), await batcher.add("b", 1)
    first = asyncio.ensure_future(batcher.add("first", 1))
    await settle()
    engine.hold_commits = False
    # The commit's step and the second caller's are in the same turn of the loop, the commit's comes first.
    engine.commit_gates[0].set_result(None)
    second = asyncio.ensure_future(batcher.add("second", 1))
    await asyncio.gather(first, second)
    await batcher.close()
    assert engine.uploads == [["a", "b"], ["first", "second"]]


async def test_those_behind_a_large_item_that_gave_up_do_not_wait_for_it() -> None:
    engine = Engine(hold_commits=True)
    batcher = engine.batcher(pending_bytes_max=10)
    await batcher.add("a", 6)
    large = asyncio.ensure_future(batcher.add("large", 10))
    await settle()
    small = asyncio.ensure_future(batcher.add("small", 1))
    await settle()
    assert not small.done(), "it overtook"
    large.cancel()
    await settle()
    assert small.done()
    engine.hold_commits = False
    engine.commit_gates[0].set_result(None)
    await batcher.close()


async def test_a_long_line_of_callers_never_waits_for_the_age() -> None:
    batcher = Engine().batcher(pending_items_max=2)
    tickets = await asyncio.wait_for(asyncio.gather(*(batcher.add(str(n), 1) for n in range(20))), 60)
    await batcher.flush()
    assert [ticket.result() for ticket in tickets] == [f"durable {n}" for n in range(20)]
    await batcher.close()


async def test_bounds_hold_while_callers_that_wait_are_sent_away() -> None:
    engine = Engine(hold_commits=True)
    batcher = engine.batcher(pending_items_max=1)
    await batcher.add("a", 1)
    waiting = asyncio.ensure_future(batcher.add("b", 1))
    await settle()
    closing = asyncio.ensure_future(batcher.close())
    seen = []
    while not waiting.done():
        seen.append(batcher.pending_items)
        await asyncio.sleep(0)
    assert max(seen) == 1
    engine.commit_gates[0].set_result(None)
    await closing
    with pytest.raises(Closed):
        await waiting
