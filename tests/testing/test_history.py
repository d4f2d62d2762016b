from __future__ import annotations

import pytest

from forebay.errors import NotDone, OutcomeUnknown, PreconditionFailed
from forebay.testing import Actor, History, Status, World


def test_calls_and_returns_have_one_total_order() -> None:
    history = History()
    first = history.append("s", ["a"])
    second = history.append("s", ["b"])
    second.ok(offset=0)
    first.ok(offset=1)
    assert first.called < second.called < second.returned < first.returned
    assert [call.status for call in history.calls] == [Status.OK, Status.OK]


def test_not_done_means_failed() -> None:
    history = History()
    with pytest.raises(NotDone), history.append("s", ["a"]):
        raise PreconditionFailed("k", expected="1")
    assert history.calls[0].status is Status.FAILED


@pytest.mark.parametrize("error", [OutcomeUnknown("append"), TimeoutError(), KeyboardInterrupt()])
def test_any_other_end_means_unknown(error: BaseException) -> None:
    history = History()
    with pytest.raises(type(error)), history.append("s", ["a"]):
        raise error
    [call] = history.calls
    assert call.status is Status.UNKNOWN


def test_block_left_without_a_word_means_unknown() -> None:
    history = History()
    with history.append("s", ["a"]):
        pass
    assert history.calls[0].status is Status.UNKNOWN


def test_the_first_word_counts() -> None:
    history = History()
    with pytest.raises(NotDone), history.append("s", ["a"]) as call:
        call.ok(offset=3)
        raise NotDone("later trouble")
    assert (call.status, call.offset) == (Status.OK, 3)
    call.failed()
    assert call.status is Status.OK


def test_read_keeps_what_it_saw() -> None:
    history = History()
    with history.read("s") as call:
        call.ok(offset=2, values=["c", "d"], tail=4)
    assert (call.offset, call.values, call.tail) == (2, ("c", "d"), 4)


def test_actors_and_virtual_times_come_from_the_world() -> None:
    async def work(me: Actor) -> None:
        await me.clock.sleep(2)
        with me.world.history.ack("s", 7, epoch=1, group="g") as call:
            await me.clock.sleep(1)
            call.ok()

    async def main(world: World) -> None:
        world.spawn("a", work)
        await world.join()

    world = World(1)
    world.run(main)
    [call] = world.history.calls
    assert (call.actor, call.kind, call.offset, call.epoch, call.group) == ("a", "ack", 7, 1, "g")
    assert (call.called_at, call.returned_at) == (2.0, 3.0)
    assert "a ack s at 7 epoch 1: ok" in repr(call)


def test_crashed_caller_leaves_an_unknown_call_that_never_returns() -> None:
    async def work(me: Actor) -> None:
        with me.world.history.append("s", ["a"]) as call:
            await me.clock.sleep(10)
            call.ok(offset=0)

    async def main(world: World) -> None:
        actor = world.spawn("a", work)
        await world.clock().sleep(5)
        actor.crash()
        await world.clock().sleep(50)

    world = World(1)
    world.run(main)
    [call] = world.history.calls
    assert call.status is Status.UNKNOWN
    assert call.returned_at == float("inf")


def test_final_content_needs_as_many_offsets_as_values() -> None:
    history = History()
    history.final("s", "abc", start=5)
    assert history.finals["s"].offsets == (5, 6, 7)
    with pytest.raises(ValueError, match="2 offsets for 3 values"):
        history.final("s", "abc", offsets=[1, 2])


def test_streams_are_those_called_and_those_read() -> None:
    history = History()
    history.append("b", ["x"])
    history.final("a", [])
    assert history.streams == ["a", "b"]
