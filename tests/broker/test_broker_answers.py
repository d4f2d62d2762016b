"""Large answers: made in pieces, so that nobody is held up, and within the room there is for them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from tests.broker.bed import serving, until

from forebay.broker._answer_room import AnswerRoom
from forebay.broker._consume import Consume, _in_pieces
from forebay.broker._consume_forms import (
    PIECE_BYTES,
    PIECE_RECORDS,
    is_large,
    json_results,
    large_json,
    large_packed,
    packed_results,
)
from forebay.broker._limits import HttpLimits
from forebay.errors import Backpressure, ForebayError
from forebay.formats import bytes_batch
from forebay.formats.http_messages import (
    JSON,
    MSGPACK,
    ConsumePartition,
    ConsumeRequest,
    ConsumeResponse,
    ConsumeResponsePacked,
)
from forebay.log import Fetched, FetchedBatch, UnknownTopic

SHAPES: dict[str, list[list[int]]] = {
    "many small records": [[PIECE_RECORDS * 2 + 1]],
    "many batches": [[1] * (PIECE_RECORDS + 5)],
    "batches across pieces": [[PIECE_RECORDS // 3] * 7],
    "partitions that are small by themselves": [[PIECE_RECORDS // 4]] * 9,
    "an empty partition between others": [[PIECE_RECORDS], [], [PIECE_RECORDS]],
    "a whole piece": [[PIECE_RECORDS], [PIECE_RECORDS]],
}


def fetched(partition: int, sizes: Sequence[int], value: bytes = b"\xff\x00") -> Fetched:
    """A batch per size, of so many records; text and bytes in turn."""
    batches, offset = [], 1
    for size in sizes:
        values = [value if number % 2 else b'"%d"' % number for number in range(size)]
        batch = bytes_batch.decode(bytes_batch.encode(values, keys=[b"k"] * size))
        batches.append(FetchedBatch("t", partition, offset, batch, 5))
        offset += size
    return Fetched("t", partition, batches, offset, 1, offset)


def wanted(answers: Sequence[Any]) -> list[ConsumePartition]:
    return [ConsumePartition(topic="t", partition=number, fetch_offset=1) for number in range(len(answers))]


@pytest.mark.parametrize("failed", [False, True], ids=["sound", "one failed"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
async def test_an_answer_in_pieces_is_the_same_to_the_byte(shape: list[list[int]], failed: bool) -> None:
    answers: list[Fetched | ForebayError] = [fetched(number, sizes) for number, sizes in enumerate(shape)]
    if failed:
        answers.append(UnknownTopic("t"))
    assert is_large(answers)
    places, errors = wanted(answers), int(failed)
    counts = len(answers) - errors, errors
    plain = msgspec.json.encode(ConsumeResponse(json_results(places, answers), *counts))
    assert await large_json(places, answers, errors) == plain
    packed = ConsumeResponsePacked(packed_results(places, answers, frames=False), *counts)
    assert await large_packed(places, answers, errors) == msgspec.msgpack.encode(packed)


def test_a_small_answer_is_made_at_once() -> None:
    assert not is_large([fetched(0, [10, 20]), UnknownTopic("t"), fetched(2, [PIECE_RECORDS - 30])])
    assert is_large([fetched(0, [2], b"x" * PIECE_BYTES)])


@pytest.mark.parametrize("form", [JSON, MSGPACK])
async def test_others_have_their_turn_while_a_large_answer_is_made(form: str) -> None:
    answers = [fetched(0, [PIECE_RECORDS * 20])]
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counter = asyncio.ensure_future(count())
    response = await _in_pieces(ConsumeRequest(topic_partitions=wanted(answers)), answers, form)
    counter.cancel()
    assert response.status == 200 and turns >= 19


# -- room


async def _started(room: AnswerRoom, size: int) -> asyncio.Task[None]:
    task = asyncio.ensure_future(room.take(size))
    await asyncio.sleep(0)
    return task


async def test_answers_that_are_made_wait_for_each_other_in_their_order() -> None:
    room = AnswerRoom(100, lambda: 0)
    await room.take(60)
    large, small = await _started(room, 50), await _started(room, 10)
    assert not large.done() and not small.done(), "the small one came later"
    room.give(60)
    await asyncio.gather(large, small)
    assert room.making == 60


async def test_one_answer_is_always_made_however_large() -> None:
    room = AnswerRoom(100, lambda: 0)
    await room.take(1_000)
    other = await _started(room, 1)
    assert not other.done()
    room.give(1_000)
    await other


async def test_room_that_clients_hold_is_not_waited_for() -> None:
    room = AnswerRoom(100, lambda: 90)
    with pytest.raises(Backpressure):
        await room.take(20)
    await room.take(0)


async def test_who_waits_is_refused_once_clients_hold_the_room() -> None:
    untaken = 0
    room = AnswerRoom(100, lambda: untaken)
    await room.take(60)
    waiting = await _started(room, 50)
    untaken = 60
    room.give(60)
    with pytest.raises(Backpressure):
        await waiting
    assert room.making == 0


async def test_who_gives_up_waiting_holds_nothing() -> None:
    room = AnswerRoom(100, lambda: 0)
    await room.take(100)
    first, second = await _started(room, 100), await _started(room, 10)
    first.cancel()
    await asyncio.sleep(0)
    room.give(50)
    await second
    assert first.cancelled() and room.making == 60
    late = await _started(room, 100)
    room.give(60)
    room._admit()
    late.cancel()  # It was let in already, and does not know yet.
    await asyncio.gather(late, return_exceptions=True)
    assert room.making == 0


async def test_a_share_is_given_back_at_the_end_and_before_it_waits() -> None:
    room = AnswerRoom(100, lambda: 0)
    with room.share() as one, room.share() as other:
        await one.take(60)
        await other.take(40)
        one.hold(70)
        assert room.making == 110, "what is in memory already waits for nothing"
        more = asyncio.ensure_future(other.take(80))
        await asyncio.sleep(0)
        assert room.making == 70 and not more.done()
        one.hold(0)
        await more
        assert room.making == 80
    assert room.making == 0


async def test_a_share_cannot_be_held_where_clients_hold_the_room() -> None:
    room = AnswerRoom(100, lambda: 90)
    with room.share() as share, pytest.raises(Backpressure):
        share.hold(20)
    assert room.making == 0


async def test_records_are_not_fetched_before_there_is_room_for_them() -> None:
    """Cold reads of many clients had been under way at once, whatever they took."""
    limits = HttpLimits(answers_max_bytes=1_500_000)
    async with serving(limits=limits) as (broker, client):
        for partition in range(4):
            await client.produce("t", partition, ["x" * 1_000_000])
        broker.engines.tail.forget("t")
        fetcher = broker.engines.reader._fetcher
        inner, gate = fetcher.fetch, asyncio.Event()
        under_way: list[int] = []

        async def held(located: Any) -> Any:
            under_way.append(len(under_way))
            await gate.wait()
            return await inner(located)

        fetcher.fetch = held  # type: ignore[method-assign,assignment]
        polls = [asyncio.ensure_future(client.consume("t", number, 1)) for number in range(4)]
        [consume] = [route.act for route in broker.router.routes if isinstance(route.act, Consume)]
        room = consume._room
        await until(lambda: under_way and len(room._waiting) == 3)
        assert len(under_way) == 1
        gate.set()
        # A client may not have taken its answer when the next one asks for room: that one is told to wait.
        statuses = [answer.status for answer in await asyncio.gather(*polls)]
        assert 200 in statuses and set(statuses) <= {200, 503}
        assert room.making == 0


async def test_an_answer_has_no_more_records_than_the_limit() -> None:
    async with serving(limits=HttpLimits(records_max=10)) as (_, client):
        for partition in (0, 1):
            for _ in range(2):
                await client.produce("t", partition, [""] * 8)
        places = [{"topic": "t", "partition": number, "fetch_offset": 1} for number in (0, 1)]
        answer = (await client.post("/consume", {"topic_partitions": places, "min_bytes": 0})).json()
        assert [len(each["records"]) for each in answer["results"]] == [10, 0]
        assert [each["next_offset"] for each in answer["results"]] == [11, 1]
