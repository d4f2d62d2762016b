"""The accumulate-and-flush loop: what it promises to callers and to the engine behind it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kit.batcher_engine import NEVER_MS, Engine, settle

from forebay.errors import Backpressure, Closed, OutcomeUnknown, Unavailable, UsageError
from forebay.kit.batcher import Batcher, BatcherConfig, Outcome
from forebay.kit.clock import SystemClock


async def test_an_item_is_answered_with_its_own_result_after_the_commit() -> None:
    engine = Engine(hold_commits=True)
    batcher = engine.batcher()
    first, second = await batcher.add("a", 1), await batcher.add("b", 1)
    flush = asyncio.ensure_future(batcher.flush())
    await settle()
    assert engine.commits == [[["a", "b"]]]
    assert not first.done(), "answered before the commit returned"
    engine.commit_gates[0].set_result(None)
    await flush
    assert (await first, await second) == ("durable a", "durable b")
    await batcher.close()


async def test_whoever_wants_to_be_told_is_told_once_in_the_step_of_the_answer() -> None:
    engine = Engine(hold_commits=True)
    batcher = engine.batcher(batch_items=3)
    told: list[str | Exception] = []
    batcher.add_told("a", 1, told.append)
    ticket = batcher.add_nowait("b", 1)
    batcher.add_told("c", 1, told.append)
    await settle()
    assert told == [] and not ticket.done()
    engine.commit_gates[0].set_result(None)
    await settle()
    assert told == ["durable a", "durable c"] and ticket.result() == "durable b"
    assert batcher.pending_items == 0


async def test_whoever_is_told_learns_of_failures_and_of_a_lack_of_room() -> None:
    engine = Engine(hold_uploads=True)
    batcher = engine.batcher(batch_items=1, pending_items_max=1)
    told: list[str | Exception] = []
    batcher.add_told("bad upload", 1, told.append)
    with pytest.raises(Backpressure):
        batcher.add_told("b", 1, told.append)
    await settle()
    engine.upload_gates[0].set_result(None)
    await settle()
    assert [type(answer) for answer in told] == [Unavailable]
    with pytest.raises(Unavailable):
        await batcher.flush()


async def test_one_that_cannot_be_told_does_not_disturb_the_others() -> None:
    engine = Engine()
    batcher = engine.batcher(batch_items=2)

    def fails(answer: str | Exception) -> None:
        raise RuntimeError("nobody home")

    batcher.add_told("a", 1, fails)
    ticket = batcher.add_nowait("b", 1)
    assert await ticket == "durable b"
    await batcher.flush()
    assert batcher.pending_items == batcher.pending_bytes == 0


async def test_an_item_that_would_pass_the_side_bound_begins_a_new_batch() -> None:
    engine = Engine()
    batcher = engine.batcher(batch_side_bytes=10)
    for name, side in (("a", 6), ("b", 4), ("c", 1), ("large", 50), ("d", 0), ("e", 1)):
        await batcher.add(name, 1, side)
    await batcher.close()
    assert engine.uploads == [["a", "b"], ["c"], ["large", "d"], ["e"]]
    assert batcher.stats.closed["side bytes"] == 3


async def test_the_state_of_a_batcher_can_be_seen() -> None:
    engine = Engine(hold_uploads=True)
    batcher = engine.batcher(uploads_max=1, batch_items=1)
    assert batcher.oldest_age_s() == 0
    for name in "abc":
        await batcher.add(name, 1)
    await settle()
    assert (batcher.uploading, batcher.batches_waiting, batcher.batches_unanswered) == (1, 2, 3)
    assert batcher.oldest_age_s() > 0
    closing = asyncio.ensure_future(batcher.close())
    while not closing.done():
        for gate in engine.upload_gates:
            if not gate.done():
                gate.set_result(None)
        await asyncio.sleep(0)
    assert (batcher.uploading, batcher.batches_waiting, batcher.batches_unanswered) == (0, 0, 0)
    assert batcher.oldest_age_s() == 0


@pytest.mark.parametrize(
    ("config", "reason"),
    [({"batch_bytes": 30}, "bytes"), ({"batch_items": 3}, "items"), ({"age_ms": 1}, "age")],
)
async def test_a_batch_is_closed_by_bytes_count_and_age(config: dict[str, int], reason: str) -> None:
    engine = Engine()
    batcher = engine.batcher(**config)
    tickets = [await batcher.add(name, 10) for name in ("a", "b", "c")]
    assert [await ticket for ticket in tickets] == ["durable a", "durable b", "durable c"]
    assert batcher.stats.closed[reason] >= 1
    assert sum(batcher.stats.closed.values()) == len(engine.uploads)
    await batcher.close()


async def test_the_age_limit_holds_while_callers_never_pause() -> None:
    batcher = Engine().batcher(age_ms=2, pending_items_max=10_000_000)
    first = await batcher.add("first", 1)
    added = 0
    while not first.done() and added < 5_000_000:
        for _ in range(100):
            batcher.add_nowait("more", 1)
        added += 100
        await asyncio.sleep(0)
    assert first.done(), "the first item starved"
    await batcher.close()


async def test_the_age_limit_holds_even_if_the_timer_never_gets_to_run() -> None:
    engine = Engine()
    batcher = engine.batcher(age_ms=2, pending_items_max=10_000_000)
    batcher.add_nowait("first", 1)
    added = 0
    while not batcher.stats.closed and added < 5_000_000:
        batcher.add_nowait("more", 1)  # no await: timers cannot run
        added += 1
    assert batcher.stats.closed == {"age": 1}
    await batcher.close()


async def test_uploads_run_in_parallel_and_commits_keep_the_order_of_closing() -> None:
    engine = Engine(hold_uploads=True)
    batcher = engine.batcher(batch_items=1, uploads_max=3)
    tickets = [await batcher.add(name, 1) for name in ("a", "b", "c", "d")]
    await settle()
    assert engine.uploads == [["a"], ["b"], ["c"]], "three at once, the fourth waits"
    for index in (2, 1):
        engine.upload_gates[index].set_result(None)
        await settle()
    assert engine.commits == [], "b and c are ready, but a was closed first"
    engine.upload_gates[0].set_result(None)
    await settle()
    assert engine.commits == [[["a"], ["b"], ["c"]]], "all that is ready goes into one commit"
    engine.upload_gates[3].set_result(None)
    assert [await ticket for ticket in tickets] == [f"durable {name}" for name in "abcd"]
    assert engine.uploads_running_max == 3
    await batcher.close()


async def test_batches_that_become_ready_during_a_commit_share_the_next_one() -> None:
    engine = Engine(hold_commits=True)
    batcher = engine.batcher(batch_items=1, uploads_max=10, commit_batches_max=3)
    for name in "abcdef":
        await batcher.add(name, 1)
    await settle()
    engine.hold_commits = False
    engine.commit_gates[0].set_result(None)
    await batcher.close()
    flat = [upload for commit in engine.commits for upload in commit]
    assert flat == [[name] for name in "abcdef"]
    assert max(len(commit) for commit in engine.commits) == 3


async def test_while_all_slots_are_busy_the_open_batch_grows_and_leaves_when_one_is_free() -> None:
    engine = Engine(hold_uploads=True)
    batcher = engine.batcher(age_ms=0, uploads_max=1)
    await batcher.add("a", 1)
    await settle()
    assert engine.uploads == [["a"]]
    for name in "bcd":
        await batcher.add(name, 1)
        await settle()
    assert engine.uploads == [["a"]], "due, but there is no slot"
    engine.hold_uploads = False
    engine.upload_gates[0].set_result(None)
    await settle()
    assert engine.uploads == [["a"], ["b", "c", "d"]]
    await batcher.close()


async def test_a_failed_upload_tells_its_waiters_and_holds_up_nobody() -> None:
    engine = Engine()
    batcher = engine.batcher(batch_items=1)
    tickets = [await batcher.add(name, 1) for name in ("a", "bad upload", "c")]
    with pytest.raises(Unavailable):
        await batcher.flush()
    assert await tickets[0] == "durable a"
    with pytest.raises(Unavailable):
        await tickets[1]
    assert await tickets[2] == "durable c"
    assert [upload for commit in engine.commits for upload in commit] == [["a"], ["c"]]
    await batcher.close()


async def test_a_failed_commit_tells_every_waiter_of_its_batches() -> None:
    engine = Engine()

    async def commit(uploads: Sequence[list[str]]) -> Sequence[Outcome[str]]:
        raise OutcomeUnknown("commit")

    batcher: Batcher[str, list[str], str] = Batcher(
        engine.upload, commit, config=BatcherConfig(batch_items=2, age_ms=NEVER_MS), clock=SystemClock()
    )
    tickets = [await batcher.add(name, 1) for name in "abcd"]
    with pytest.raises(OutcomeUnknown):
        await batcher.close()
    for ticket in tickets:
        with pytest.raises(OutcomeUnknown):
            await ticket
    assert batcher.pending_items == batcher.pending_bytes == 0


async def test_a_commit_may_answer_items_one_by_one() -> None:
    engine = Engine()

    async def commit(uploads: Sequence[list[str]]) -> Sequence[Outcome[str]]:
        return [[Unavailable(item) if item == "b" else item for item in upload] for upload in uploads]

    batcher: Batcher[str, list[str], str] = Batcher(
        engine.upload, commit, config=BatcherConfig(age_ms=NEVER_MS), clock=SystemClock()
    )
    tickets = [await batcher.add(name, 1) for name in "abc"]
    with pytest.raises(Unavailable):
        await batcher.flush()
    assert (await tickets[0], await tickets[2]) == ("a", "c")
    with pytest.raises(Unavailable):
        await tickets[1]
    await batcher.close()


@pytest.mark.parametrize("answers", [[], [["only one"]], [["1", "2"], ["extra"]]])
async def test_a_commit_with_the_wrong_number_of_answers_leaves_the_outcome_unknown(answers: Any) -> None:
    engine = Engine()

    async def commit(uploads: Sequence[list[str]]) -> Sequence[Outcome[str]]:
        outcomes: Sequence[Outcome[str]] = answers
        return outcomes

    batcher: Batcher[str, list[str], str] = Batcher(
        engine.upload, commit, config=BatcherConfig(age_ms=NEVER_MS), clock=SystemClock()
    )
    tickets = [await batcher.add(name, 1) for name in "ab"]
    with pytest.raises(OutcomeUnknown):
        await batcher.close()
    assert all(isinstance(ticket.exception(), OutcomeUnknown) for ticket in tickets)


async def test_flush_reports_failures_nobody_looked_at_once() -> None:
    engine = Engine()
    batcher = engine.batcher(batch_items=1)
    await batcher.add("bad upload", 1)
    await settle()
    with pytest.raises(Unavailable):
        await batcher.flush()
    await batcher.flush()
    await batcher.close()


async def test_flush_does_not_wait_for_items_added_after_it() -> None:
    engine = Engine(hold_commits=True)
    batcher = engine.batcher()
    await batcher.add("a", 1)
    flush = asyncio.ensure_future(batcher.flush())
    await settle()
    late = await batcher.add("late", 1)
    engine.commit_gates[0].set_result(None)
    await flush
    assert not late.done()
    engine.hold_commits = False
    await batcher.close()
    assert await late == "durable late"


async def test_every_flush_waits_for_what_was_there_and_one_that_is_cancelled_disturbs_no_other() -> None:
    engine = Engine(hold_commits=True)
    batcher = engine.batcher(batch_items=1, commit_batches_max=1)
    batcher.add_nowait("a", 1)
    flushes = [asyncio.ensure_future(batcher.flush()) for _ in range(2)]
    await settle()
    batcher.add_nowait("b", 1)
    second = asyncio.ensure_future(batcher.flush())
    await settle()
    flushes[0].cancel()
    engine.commit_gates[0].set_result(None)
    await flushes[1]
    assert not second.done() and batcher.batches_unanswered == 1
    await settle()
    engine.commit_gates[1].set_result(None)
    await second
    assert flushes[0].cancelled() and batcher.batches_unanswered == 0


async def test_uploads_that_never_have_to_wait_let_others_run_in_between() -> None:
    engine = Engine()
    batcher = engine.batcher(batch_items=1, uploads_max=1)
    tickets = [batcher.add_nowait(str(number), 1) for number in range(10)]
    seen = []
    while not all(ticket.done() for ticket in tickets):
        seen.append(len(engine.uploads))
        await asyncio.sleep(0)
    assert sorted(set(seen)) == list(range(11))


async def test_a_slot_that_is_cancelled_between_two_uploads_leaves_nothing_unanswered() -> None:
    engine = Engine()
    batcher = engine.batcher(batch_items=1, uploads_max=1)
    before = asyncio.all_tasks()
    tickets = [batcher.add_nowait(str(number), 1) for number in range(3)]
    [slot] = asyncio.all_tasks() - before
    await asyncio.sleep(0)
    assert engine.uploads == [["0"]]
    slot.cancel()
    await settle()
    assert all(ticket.done() for ticket in tickets) and engine.uploads == [["0"]]
    assert [type(ticket.exception()) for ticket in tickets[1:]] == [Closed, Closed]
    assert batcher.batches_unanswered == 0 and batcher.aborted


async def test_an_item_that_fills_a_batch_starts_no_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    timers: list[float] = []
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(loop, "call_later", lambda delay, *_: timers.append(delay))
    batcher = Engine().batcher(batch_items=1)
    assert await batcher.add_nowait("a", 1) == "durable a"
    assert timers == []
    batcher = Engine().batcher(batch_items=2)
    tickets = [batcher.add_nowait("a", 1), batcher.add_nowait("b", 1)]
    monkeypatch.undo()
    assert await asyncio.gather(*tickets) == ["durable a", "durable b"]
    assert timers == [NEVER_MS / 1000]


async def test_close_flushes_and_then_refuses() -> None:
    engine = Engine()
    batcher = engine.batcher()
    ticket = await batcher.add("a", 1)
    await batcher.close()
    assert await ticket == "durable a"
    with pytest.raises(Closed):
        await batcher.add("b", 1)
    with pytest.raises(Closed):
        batcher.add_nowait("b", 1)
    await batcher.close()


async def test_callers_that_wait_for_room_are_told_when_it_closes() -> None:
    engine = Engine(hold_commits=True)
    batcher = engine.batcher(pending_items_max=1)
    await batcher.add("a", 1)
    waiting = asyncio.ensure_future(batcher.add("b", 1))
    await settle()
    closing = asyncio.ensure_future(batcher.close())
    await settle()
    engine.commit_gates[0].set_result(None)
    await closing
    with pytest.raises(Closed):
        await waiting
    assert engine.uploads == [["a"]]


async def test_leaving_the_block_makes_everything_durable() -> None:
    engine = Engine()
    async with engine.batcher() as batcher:
        ticket = await batcher.add("a", 1)
    assert await ticket == "durable a"


async def test_a_cancelled_upload_is_certainly_not_done_and_a_cancelled_commit_is_unknown() -> None:
    for hold, expected in (({"hold_uploads": True}, Closed), ({"hold_commits": True}, OutcomeUnknown)):
        engine = Engine(**hold)
        batcher = engine.batcher(batch_items=1)
        sent = await batcher.add("a", 1)
        await settle()
        still_open = await batcher.add("b", 1)
        for task in list(batcher._tasks):
            task.cancel()
        await settle()
        assert isinstance(sent.exception(), expected)
        assert isinstance(still_open.exception(), (Closed, OutcomeUnknown))
        with pytest.raises((Closed, OutcomeUnknown)):
            await batcher.close()


async def test_a_ticket_given_up_by_its_caller_does_not_disturb_the_others() -> None:
    batcher = Engine().batcher()
    given_up, kept = await batcher.add("a", 1), await batcher.add("b", 1)
    given_up.cancel()
    await batcher.close()
    assert await kept == "durable b"


@pytest.mark.parametrize(
    "config", [{"batch_bytes": 0}, {"age_ms": -1}, {"uploads_max": 0}, {"pending_items_max": 0}]
)
def test_a_config_out_of_range_is_refused(config: dict[str, int]) -> None:
    with pytest.raises(UsageError, match=next(iter(config))):
        BatcherConfig(**config)


@given(
    sizes=st.lists(st.integers(0, 40), max_size=60),
    batch_bytes=st.integers(1, 60),
    batch_items=st.integers(1, 8),
    uploads_max=st.integers(1, 4),
    commit_batches_max=st.integers(1, 4),
    pending_items_max=st.integers(1, 10),
    fail_every=st.integers(0, 5),
)
def test_every_item_is_answered_once_and_in_order_whatever_the_limits(
    sizes: list[int],
    batch_bytes: int,
    batch_items: int,
    uploads_max: int,
    commit_batches_max: int,
    pending_items_max: int,
    fail_every: int,
) -> None:
    committed: list[int] = []
    uploads = 0

    async def upload(items: Sequence[int]) -> list[int]:
        nonlocal uploads
        uploads += 1
        mine = uploads
        await asyncio.sleep(0)
        if fail_every and mine % fail_every == 0:
            raise Unavailable("no")
        return list(items)

    async def commit(batches: Sequence[list[int]]) -> Sequence[Outcome[int]]:
        assert 1 <= len(batches) <= commit_batches_max
        await asyncio.sleep(0)
        for batch in batches:
            assert len(batch) <= batch_items
            committed.extend(batch)
        return list(batches)

    async def run() -> None:
        config = BatcherConfig(
            batch_bytes=batch_bytes,
            batch_items=batch_items,
            age_ms=0,
            uploads_max=uploads_max,
            commit_batches_max=commit_batches_max,
            pending_items_max=pending_items_max,
            pending_bytes_max=50,
        )
        batcher = Batcher(upload, commit, config=config, clock=SystemClock())
        tickets = []
        for number, size in enumerate(sizes):
            tickets.append(await batcher.add(number, size))
            assert batcher.pending_items <= pending_items_max
            assert batcher.pending_bytes <= 50
        try:
            await batcher.close()
        except Unavailable:
            assert fail_every
        answers = await asyncio.gather(*tickets, return_exceptions=True)
        assert [answer for answer in answers if isinstance(answer, int)] == committed
        assert all(isinstance(answer, (int, Unavailable)) for answer in answers)
        assert (batcher.pending_items, batcher.pending_bytes) == (0, 0)

    asyncio.run(run())
    assert committed == sorted(committed)
