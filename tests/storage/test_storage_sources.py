"""Bodies that are read while they are stored: the same contract as `put`, on every tenant and way."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.storage.sources import Pieces
from tests.storage.tenants import Site, behaviour

from forebay.errors import AccessDenied, InvalidKey, NotFound, OutcomeUnknown, PreconditionFailed, UsageError
from forebay.formats import Corrupt
from forebay.kit.retry import RetryPolicy
from forebay.storage import ABSENT, ANY, BucketMissing, BucketStore, ObjectStore, SourceFailed, open_store
from forebay.storage._api import When
from forebay.storage._bucket import _put, _upload, open_bucket
from forebay.storage._source import Room, pieces_of, whole
from forebay.testing.s3_faults import Fault, S3FaultServer, answer, drop, overwritten

LARGE = random.Random(7).randbytes(_put.STREAMED_BYTES_MIN + 12_345)
OTHER = LARGE[:-1] + bytes([LARGE[-1] ^ 1])
QUICK = RetryPolicy(attempts_max=3, base_ms=1, cap_ms=2, deadline_ms=20_000)


@behaviour
async def test_a_source_is_put_as_one_object(site: Site, store: ObjectStore) -> None:
    for key, body in (("small", LARGE[:100_000]), ("a/large", LARGE), ("empty", b"")):
        source = Pieces(body)
        version = await store.put_source(key, source, ABSENT)
        found = await store.get(key)
        assert (found.data, found.version) == (body, version)
        assert source.reads == source.closed >= 1


@behaviour
async def test_the_condition_of_a_source_holds(site: Site, store: ObjectStore) -> None:
    first = await store.put_source("k", Pieces(LARGE), ABSENT)
    with pytest.raises(PreconditionFailed):
        await store.put_source("k", Pieces(OTHER), ABSENT)
    second = await store.put_source("k", Pieces(OTHER), first)
    with pytest.raises(PreconditionFailed):
        await store.put_source("k", Pieces(LARGE), first)
    with pytest.raises(PreconditionFailed):
        await store.put_source("missing", Pieces(LARGE), first)
    assert (await store.get("k")).version == second
    third = await store.put_source("k", Pieces(LARGE), ANY)
    assert (await store.get("k")).data == LARGE
    assert third != second


@behaviour
async def test_of_racing_sources_one_wins(site: Site, store: ObjectStore) -> None:
    bodies = [LARGE + bytes([number]) for number in range(4)]
    puts = [site.open().put_source("k", Pieces(body), ABSENT) for body in bodies]
    results = await asyncio.gather(*puts, return_exceptions=True)
    won = [body for body, result in zip(bodies, results, strict=True) if isinstance(result, str)]
    assert len(won) == 1
    assert sum(isinstance(result, PreconditionFailed) for result in results) == 3
    assert (await store.get("k")).data == won[0]


@behaviour
async def test_a_source_that_fails_leaves_nothing_and_is_heard(site: Site, store: ObjectStore) -> None:
    for at in (0, len(LARGE) // 2, len(LARGE) - 1):
        for error in (Corrupt("chunk", at, "wrong"), FileNotFoundError("gone"), OSError("broken")):
            source = Pieces(LARGE)

            def fail(position: int, at: int = at, error: Exception = error) -> None:
                if position <= at < position + 64 * 1024:
                    raise error

            source.on_piece = fail
            with pytest.raises(Corrupt if isinstance(error, Corrupt) else SourceFailed):
                await store.put_source("k", source, ABSENT)
            assert source.closed == source.reads
    with pytest.raises(NotFound):
        await store.head("k")
    assert await store.put_source("k", Pieces(LARGE), ABSENT)


@behaviour
async def test_a_source_of_another_size_than_it_said_leaves_nothing(site: Site, store: ObjectStore) -> None:
    for size in (len(LARGE) - 1, len(LARGE) + 1, 2 * len(LARGE), 10):
        with pytest.raises(SourceFailed):
            await store.put_source("k", Pieces(LARGE, size=size), ABSENT)
    assert [info async for info in store.list()] == []


@behaviour
async def test_wrong_usage_is_refused_before_a_source_is_read(site: Site, store: ObjectStore) -> None:
    source = Pieces(b"x")
    with pytest.raises(InvalidKey):
        await store.put_source("a//b", source)
    with pytest.raises(UsageError):
        await store.put_source("k", source, "")
    assert [info async for info in store.list()] == []


async def test_local_files_hold_a_piece_of_a_source_at_a_time(tmp_path: Path) -> None:
    """When a piece is asked for, all before it are in the file: nothing is gathered first."""
    async with open_store(tmp_path) as store:
        source, asked, written = Pieces(LARGE), [], []

        def look(at: int) -> None:
            asked.append(at)
            written.append(max(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()))

        source.on_piece = look
        await store.put_source("k", source, ABSENT)
        assert len(asked) > 50
        assert written == asked


@pytest.fixture
def server() -> Iterator[S3FaultServer]:
    with S3FaultServer() as running:
        yield running


@pytest.fixture
async def store(server: S3FaultServer) -> AsyncIterator[BucketStore]:
    async with open_bucket(server.url("p"), policy=QUICK, randomness=random.Random(1)) as opened:
        # Whether conditions are minded is asked before the first one; the tests count what comes after.
        await opened.put_source("warm", Pieces(LARGE), ABSENT)
        await opened.delete(["warm"])
        assert server.keys() == []
        server.requests.clear()
        yield opened


@pytest.mark.parametrize(
    ("fault", "when"),
    [
        *[(fault, when) for fault in (answer(500), answer(503), drop()) for when in (ABSENT, ANY)],
        (answer(409), ABSENT),
    ],
)
async def test_a_streamed_put_without_effect_is_sent_again(
    server: S3FaultServer, store: BucketStore, fault: Fault, when: When
) -> None:
    server.fail_next("PUT", fault)
    source = Pieces(LARGE)
    version = await store.put_source("k", source, when)
    assert (await store.get("k")).version == version
    assert server.requests["PUT"] == 2
    assert source.reads == 4  # Twice for the digest, twice to be sent.
    assert not server.metadata("p/k")


@pytest.mark.parametrize(
    "fault", [answer(500, after=True), drop(after=True), answer(409, after=True)], ids=str
)
async def test_a_streamed_put_whose_reply_was_lost_is_done_if_its_bytes_lie_there(
    server: S3FaultServer, store: BucketStore, fault: Fault
) -> None:
    server.fail_next("PUT", fault)
    version = await store.put_source("k", Pieces(LARGE), ABSENT)
    assert (await store.head("k")).version == version
    assert server.requests["PUT"] == 1


@pytest.mark.parametrize("theirs", [OTHER, LARGE[:-1], LARGE + b"x", b"short"], ids=len)
async def test_a_streamed_put_that_was_overwritten_is_unknown(
    server: S3FaultServer, store: BucketStore, theirs: bytes
) -> None:
    server.fail_next("PUT", overwritten(theirs))
    with pytest.raises(OutcomeUnknown, match="another write lies there"):
        await store.put_source("k", Pieces(LARGE), ABSENT)


@pytest.mark.parametrize("when", [ABSENT, ANY])
async def test_a_source_that_fails_after_a_lost_reply_is_unknown(
    server: S3FaultServer, store: BucketStore, when: When
) -> None:
    """It may have been stored by the first try, and nothing can be compared any more."""
    server.fail_next("PUT", drop())
    source = Pieces(LARGE)

    def fail(_: int) -> None:
        if source.reads > 2:
            raise Corrupt("chunk", 0, "changed")

    source.on_piece = fail
    with pytest.raises(OutcomeUnknown):
        await store.put_source("k", source, when)


async def test_what_a_signed_url_is_refused_for_goes_through_the_client(
    server: S3FaultServer, store: BucketStore
) -> None:
    server.fail_next("PUT", answer(403))
    assert await store.put_source("k", Pieces(LARGE), ABSENT)
    assert server.requests["PUT"] == 2
    assert server.metadata("p/k"), "the client's own put bears a token"
    server.fail_next("PUT", answer(403), times=2)
    with pytest.raises(AccessDenied):
        await store.put_source("k2", Pieces(LARGE), ABSENT)


async def test_a_server_that_does_not_mind_conditions_of_signed_urls_gets_none(
    server: S3FaultServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_upload, "_conditions", lambda when: {})
    async with open_bucket(server.url("p"), policy=QUICK) as store:
        source = Pieces(LARGE)
        await store.put_source("k", source, ABSENT)
        assert source.reads == 1, "it was held and sent by the client"
        with pytest.raises(PreconditionFailed):
            await store.put_source("k", Pieces(OTHER), ABSENT)
        assert server.get("p/k") == LARGE
        assert server.keys() == ["p/k"]


async def test_a_question_that_is_not_answered_is_asked_again(server: S3FaultServer) -> None:
    async with open_bucket(server.url("p"), policy=QUICK) as store:
        server.fail_next("PUT", answer(503), times=4)
        await store.put_source("k", Pieces(LARGE), ABSENT)
        server.heal()
        source = Pieces(LARGE)
        await store.put_source("k2", source, ABSENT)
        assert source.reads == 2, "it was streamed"
        assert server.keys() == ["p/k", "p/k2"]


async def test_a_missing_bucket_is_named_for_sources_too(server: S3FaultServer) -> None:
    url = server.url("p").replace("forebay/", "nothing/", 1)
    async with open_bucket(url, policy=QUICK) as store:
        with pytest.raises(BucketMissing):
            await store.put_source("k", Pieces(LARGE), ABSENT)


@pytest.mark.parametrize("variable", ["AWS_SSE_KMS_KEY_ID", "AWS_SERVER_SIDE_ENCRYPTION", "http_proxy"])
async def test_a_client_that_needs_more_than_a_signed_url_holds_the_body(
    server: S3FaultServer, store: BucketStore, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "http://127.0.0.1:1")
    source = Pieces(LARGE)
    assert await store.put_source("k", source, ABSENT)
    assert source.reads == 1
    assert server.metadata("p/k")


async def test_a_cancelled_upload_ends_and_stores_nothing(server: S3FaultServer, store: BucketStore) -> None:
    source = Pieces(LARGE)
    loop, half, ended = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

    def tell(at: int) -> None:
        if source.reads == 2 and at > len(LARGE) // 2:
            loop.call_soon_threadsafe(half.set)
            ended.wait(20)

    source.on_piece = tell
    put = asyncio.create_task(store.put_source("k", source, ABSENT))
    await half.wait()
    put.cancel()
    with pytest.raises(asyncio.CancelledError):
        await put
    ended.set()
    await store.close()
    while source.closed < source.reads:  # noqa: ASYNC110 - it is a thread that ends
        await asyncio.sleep(0.001)
    assert server.keys() == []


async def test_bodies_that_must_be_held_share_one_room() -> None:
    room, most, order = Room(100), 0, []

    async def hold(number: int, size: int) -> None:
        nonlocal most
        async with room.hold(size):
            order.append(number)
            most = max(most, room.held)
            await asyncio.sleep(0)

    sizes = [60, 60, 30, 500, 10, 100, 1]
    await asyncio.gather(*[hold(number, size) for number, size in enumerate(sizes)])
    assert (most, room.held, order) == (100, 0, list(range(len(sizes))))


async def test_who_gives_up_waiting_for_room_takes_none() -> None:
    room = Room(10)
    async with room.hold(10):
        waiting = [asyncio.create_task(_held(room, 6)) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        await asyncio.sleep(0)
    waiting[1].cancel()  # At the very moment in which it is let in.
    await asyncio.gather(*waiting, return_exceptions=True)
    assert [task.cancelled() for task in waiting] == [True, True, False]
    assert room.held == 0


async def _held(room: Room, size: int) -> None:
    async with room.hold(size):
        await asyncio.sleep(0)


def test_pieces_are_counted_and_a_whole_is_their_sum() -> None:
    assert whole("k", Pieces(LARGE)) == LARGE
    source = Pieces(LARGE)
    pieces = pieces_of("k", source)
    next(pieces)
    pieces.close()
    assert source.closed == 1
