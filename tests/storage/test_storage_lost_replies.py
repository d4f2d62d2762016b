"""What a bucket store says when replies are lost: done, refused or unknown, and never a guess."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Iterator

import pytest

from forebay.errors import AccessDenied, NotDone, NotFound, OutcomeUnknown, PreconditionFailed, Unavailable
from forebay.kit.retry import RetryPolicy
from forebay.storage import ABSENT, BucketMissing, BucketStore
from forebay.storage._bucket import open_bucket
from forebay.storage._bucket._put import TOKEN_ATTRIBUTE
from forebay.testing.s3_faults import Fault, S3FaultServer, answer, drop, overwritten, truncated

QUICK = RetryPolicy(attempts_max=3, base_ms=1, cap_ms=2, deadline_ms=20_000)
LOST = [answer(500), answer(503), answer(429), drop()]
LOST_AFTER_COMMIT = [
    answer(500, after=True),
    answer(503, after=True),
    drop(after=True),
    answer(409, after=True),
]


def name_of(fault: Fault) -> str:
    return f"{fault.status or 'drop'}-{'committed' if fault.effect else 'nothing'}"


@pytest.fixture
def server() -> Iterator[S3FaultServer]:
    with S3FaultServer() as running:
        yield running


@pytest.fixture
async def store(server: S3FaultServer) -> AsyncIterator[BucketStore]:
    async with open_bucket(server.url("p"), policy=QUICK, randomness=random.Random(1)) as opened:
        yield opened


@pytest.mark.parametrize("fault", [*LOST, answer(409)], ids=name_of)
async def test_create_that_did_not_commit_is_sent_again(
    server: S3FaultServer, store: BucketStore, fault: Fault
) -> None:
    server.fail_next("PUT", fault)
    version = await store.put("k", b"mine", ABSENT)
    assert (await store.get("k")).version == version
    assert server.requests["PUT"] == 2


@pytest.mark.parametrize("fault", LOST_AFTER_COMMIT, ids=name_of)
async def test_create_that_committed_before_the_reply_was_lost_is_done(
    server: S3FaultServer, store: BucketStore, fault: Fault
) -> None:
    server.fail_next("PUT", fault)
    version = await store.put("k", b"mine", ABSENT)
    assert (await store.get("k")).version == version
    assert server.requests["PUT"] == 1


@pytest.mark.parametrize("fault", [*LOST, answer(409)], ids=name_of)
async def test_update_that_did_not_commit_is_sent_again(
    server: S3FaultServer, store: BucketStore, fault: Fault
) -> None:
    first = await store.put("k", b"old")
    server.fail_next("PUT", fault)
    version = await store.put("k", b"mine", first)
    found = await store.get("k")
    assert (found.data, found.version) == (b"mine", version)


@pytest.mark.parametrize("fault", LOST_AFTER_COMMIT, ids=name_of)
async def test_update_that_committed_before_the_reply_was_lost_is_done(
    server: S3FaultServer, store: BucketStore, fault: Fault
) -> None:
    first = await store.put("k", b"old")
    server.fail_next("PUT", fault)
    version = await store.put("k", b"mine", first)
    assert (await store.get("k")).version == version
    assert server.requests["PUT"] == 2


@pytest.mark.parametrize("fault", LOST, ids=name_of)
async def test_equal_bodies_do_not_pass_for_our_own_write(
    server: S3FaultServer, store: BucketStore, fault: Fault
) -> None:
    """Somebody else stored the very same bytes: the token tells, the content would not."""
    async with open_bucket(server.url("p"), policy=QUICK) as other:
        await other.put("claim", b"taken", ABSENT)
    server.fail_next("PUT", fault)
    with pytest.raises(OutcomeUnknown):
        await store.put("claim", b"taken", ABSENT)


async def test_committed_and_overwritten_is_unknown(server: S3FaultServer, store: BucketStore) -> None:
    first = await store.put("k", b"old")
    for when in (first, ABSENT):
        if when is ABSENT:
            await store.delete(["k"])
        server.fail_next("PUT", overwritten(b"theirs"))
        with pytest.raises(OutcomeUnknown) as unknown:
            await store.put("k", b"mine", when)
        assert "another write lies there" in unknown.value.message
        assert unknown.value.hint


async def test_deleted_after_a_lost_reply_to_an_update_is_unknown(
    server: S3FaultServer, store: BucketStore
) -> None:
    first = await store.put("k", b"old")
    await store.delete(["k"])
    server.fail_next("PUT", drop())
    with pytest.raises(OutcomeUnknown):
        await store.put("k", b"mine", first)


async def test_a_clean_refusal_costs_one_request(server: S3FaultServer, store: BucketStore) -> None:
    first = await store.put("k", b"1")
    await store.put("k", b"2", first)
    before = server.requests.total()
    for when in (ABSENT, first):
        with pytest.raises(PreconditionFailed):
            await store.put("k", b"3", when)
    assert server.requests.total() == before + 2


async def test_a_conflict_that_somebody_else_won_is_refused(
    server: S3FaultServer, store: BucketStore
) -> None:
    first = await store.put("k", b"1")
    server.put("p/k", b"theirs")
    server.fail_next("PUT", answer(409))
    with pytest.raises(PreconditionFailed):
        await store.put("k", b"mine", first)


@pytest.mark.parametrize("fault", LOST, ids=name_of)
async def test_a_server_that_keeps_failing_leaves_it_unknown(
    server: S3FaultServer, store: BucketStore, fault: Fault
) -> None:
    first = await store.put("k", b"old")
    server.fail_next("PUT", fault, times=50)
    for when in (first, ABSENT):
        with pytest.raises(OutcomeUnknown):
            await store.put("k" if when is first else "new", b"mine", when)
    with pytest.raises(OutcomeUnknown):
        await store.put("any", b"mine")
    assert server.requests["PUT"] == 1 + 3 * QUICK.attempts_max


async def test_a_read_back_that_fails_once_is_made_again(server: S3FaultServer, store: BucketStore) -> None:
    server.fail_next("PUT", drop(after=True))
    server.fail_next("HEAD", answer(500))
    version = await store.put("k", b"mine", ABSENT)
    assert (await store.get("k")).version == version


@pytest.mark.parametrize("status", [403, 500])
async def test_a_read_back_that_never_works_leaves_it_unknown(
    server: S3FaultServer, store: BucketStore, status: int
) -> None:
    """Also where reading is forbidden: that says nothing of the write."""
    server.fail_next("PUT", drop(after=True))
    server.fail_next("HEAD", answer(status), times=QUICK.attempts_max)
    with pytest.raises(OutcomeUnknown):
        await store.put("k", b"mine", ABSENT)
    assert server.get("p/k") == b"mine"


@pytest.mark.parametrize("fault", [*LOST, *LOST_AFTER_COMMIT[:3]], ids=name_of)
async def test_an_unconditional_put_is_sent_until_it_is_answered(
    server: S3FaultServer, store: BucketStore, fault: Fault
) -> None:
    server.fail_next("PUT", fault)
    version = await store.put("k", b"mine")
    assert (await store.get("k")).version == version


async def test_every_write_carries_its_own_token(server: S3FaultServer, store: BucketStore) -> None:
    tokens = set()
    version = await store.put("k", b"same")
    for _ in range(3):
        tokens.add(server.metadata("p/k")[f"x-amz-meta-{TOKEN_ATTRIBUTE}"])
        version = await store.put("k", b"same", version)
    assert len(tokens) == 3


async def test_a_store_without_metadata_is_settled_by_content(
    server: S3FaultServer, store: BucketStore
) -> None:
    """The server's own `put` keeps none, so what lies there after the lost reply has no token."""
    server.fail_next("PUT", overwritten(lambda body: body))
    version = await store.put("k", b"mine, and unique", ABSENT)
    assert (await store.get("k")).version == version


async def test_random_faults_never_lose_or_invent_an_update(
    server: S3FaultServer, store: BucketStore
) -> None:
    server.fail_randomly(0.4, [("PUT", fault) for fault in [*LOST, *LOST_AFTER_COMMIT, answer(409)]])
    acknowledged: list[bytes] = []
    unknown: list[bytes] = []
    version = await _reliably(server, store, b"start")
    history = [b"start"]
    for turn in range(60):
        body = b"turn %d" % turn
        try:
            version = await store.put("k", body, version)
            acknowledged.append(body)
            history.append(body)
        except OutcomeUnknown:
            found = await store.get("k")
            assert found.data in (history[-1], body)
            if found.data == body:
                unknown.append(body)
                history.append(body)
            version = found.version
    server.heal()
    assert (await store.get("k")).data == history[-1]
    assert len(acknowledged) > 30
    assert len(acknowledged) + len(unknown) == len(history) - 1


async def _reliably(server: S3FaultServer, store: BucketStore, body: bytes) -> str:
    server.put("p/k", body)
    return (await store.get("k")).version


@pytest.mark.parametrize("fault", [*LOST, truncated(3)], ids=name_of)
async def test_reads_survive_a_passing_fault(server: S3FaultServer, store: BucketStore, fault: Fault) -> None:
    await store.put("k", b"0123456789")
    server.fail_next("GET", fault)
    assert (await store.get("k")).data == b"0123456789"
    server.fail_next("GET", fault)
    assert await store.get_ranges("k", [(0, 5), (5, 5)]) == [b"01234", b"56789"]
    server.fail_next("LIST", fault)
    assert [info.key async for info in store.list()] == ["k"]
    server.fail_next("HEAD", answer(503))
    assert (await store.head("k")).size == 10


async def test_reads_give_up_as_unavailable(server: S3FaultServer, store: BucketStore) -> None:
    await store.put("k", b"1")
    server.fail_next("GET", answer(500), times=QUICK.attempts_max)
    with pytest.raises(Unavailable) as failed:
        await store.get("k")
    assert "500 InternalError" in failed.value.message
    assert "\n" not in failed.value.message
    assert failed.value.hint
    assert failed.value.__cause__ is not None


async def test_a_failed_bulk_delete_is_answered_key_by_key(server: S3FaultServer, store: BucketStore) -> None:
    for key in ("a", "b", "c"):
        await store.put(key, b"1")
    server.fail_next("BULK_DELETE", answer(400))
    server.fail_next("BULK_DELETE", answer(403), key=None)
    results = await store.delete(["a", "b", "c"])
    refused = [result for result in results if result.error is not None]
    assert len(refused) == 1
    assert isinstance(refused[0].error, AccessDenied)
    assert [info.key async for info in store.list()] == [refused[0].key]


async def test_a_delete_without_an_answer_is_unknown(server: S3FaultServer, store: BucketStore) -> None:
    await store.put("a", b"1")
    server.fail_next("BULK_DELETE", drop(after=True), times=50)
    server.fail_next("DELETE", drop(after=True), times=50)
    [result] = await store.delete(["a"])
    assert isinstance(result.error, OutcomeUnknown)


async def test_a_missing_bucket_is_not_a_missing_key(server: S3FaultServer) -> None:
    url = server.url("p").replace(f"s3://{server.bucket}/", "s3://no-such-bucket/")
    async with open_bucket(url, policy=QUICK) as store:
        for call in (store.get("k"), store.head("k"), store.put("k", b""), store.put("k", b"", ABSENT)):
            with pytest.raises(BucketMissing) as missing:
                await call
            assert "no-such-bucket" in missing.value.message
        with pytest.raises(BucketMissing):
            [info async for info in store.list()]
        [result] = await store.delete(["k"])
        assert isinstance(result.error, BucketMissing)


async def test_wrong_credentials_are_named_and_not_shown(server: S3FaultServer) -> None:
    url = server.url("p").replace(server.access_key, "somebody").replace(server.secret_key, "hidden")
    async with open_bucket(url, policy=QUICK) as store:
        for call in (store.get("k"), store.put("k", b""), store.put("k", b"", ABSENT), store.head("k")):
            with pytest.raises(AccessDenied) as denied:
                await call
            assert "credentials" in denied.value.hint
            assert "\n" not in str(denied.value)
            assert "hidden" not in str(denied.value)
        [result] = await store.delete(["k"])
        assert isinstance(result.error, AccessDenied)
    assert server.keys() == []


async def test_an_unreachable_endpoint_is_unavailable_and_certain() -> None:
    with S3FaultServer() as gone:
        url = gone.url("p")
    async with open_bucket(url, policy=QUICK) as store:
        for call in (store.get("k"), store.put("k", b""), store.put("k", b"", ABSENT), store.head("k")):
            with pytest.raises(Unavailable) as failed:
                await call
            assert "cannot connect" in failed.value.message
            assert "endpoint" in failed.value.hint
        [result] = await store.delete(["k"])
        assert isinstance(result.error, Unavailable)


async def test_head_of_a_missing_key_is_not_found_in_a_bucket_that_is_there(store: BucketStore) -> None:
    with pytest.raises(NotFound):
        await store.head("k")


async def test_a_bucket_of_another_region_is_named(server: S3FaultServer, store: BucketStore) -> None:
    server.fail_next("*", answer(301), times=4)
    for call in (store.get("k"), store.put("k", b""), store.put("k", b"", ABSENT), store.head("k")):
        with pytest.raises(NotDone, match="another region") as refused:
            await call
        assert "AWS_REGION" in refused.value.hint
