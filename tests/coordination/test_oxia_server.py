"""What a real Oxia server does, and what our client makes of it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator

import pytest

from forebay.coordination._api import Delete, DeleteRange, Put, Session, children, directory_of
from forebay.coordination._oxia import OxiaCoordinator, open_oxia
from forebay.errors import InvalidKey, PreconditionFailed, SessionExpired, Unavailable
from forebay.kit.conditions import ABSENT
from forebay.testing.pytest_plugin import cannot_be_had
from forebay.testing.servers import OxiaServer, ServerUnavailable

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("oxia"), pytest.mark.real_server("oxia")]

_numbers = itertools.count()


@pytest.fixture
async def client(oxia: OxiaServer) -> AsyncIterator[OxiaCoordinator]:
    async with open_oxia(oxia.url() + "?timeout_ms=60000") as coordinator:
        yield coordinator


@pytest.fixture(scope="module")
def four_shards() -> Iterator[OxiaServer]:
    try:
        server = OxiaServer(shards=4)
    except ServerUnavailable as error:
        cannot_be_had(error)
    with server:
        yield server


@pytest.fixture
async def spread(four_shards: OxiaServer) -> AsyncIterator[OxiaCoordinator]:
    async with open_oxia(four_shards.url() + "?timeout_ms=60000") as coordinator:
        yield coordinator


@pytest.fixture
def root() -> str:
    """A directory of this test's own, between others."""
    return f"t{next(_numbers):04d}/dir"


async def test_first_version_and_first_session_are_zero_and_count() -> None:
    try:
        server = OxiaServer()
    except ServerUnavailable as error:
        cannot_be_had(error)
    with server:
        async with open_oxia(server.url()) as client:
            session = await client.open_session()
            assert session.id == 0
            await client.put("a/claim", b"", session=session)
            record = await client.get("a/claim")
            assert record is not None
            assert record.session_id == 0
            await session.close()
            assert await client.get("a/claim") is None
    with OxiaServer() as server:
        async with open_oxia(server.url()) as client:
            assert await client.put("a/b", b"1", ABSENT) == 0
            assert await client.put("a/b", b"2", 0) == 1
            with pytest.raises(PreconditionFailed):
                await client.put("a/b", b"3", 0)


async def test_empty_value_and_missing_key_are_different(client: OxiaCoordinator, root: str) -> None:
    await client.put(f"{root}/empty", b"")
    record = await client.get(f"{root}/empty")
    assert record is not None
    assert (record.key, record.value) == (f"{root}/empty", b"")
    assert await client.get(f"{root}/missing") is None


async def test_each_operation_of_a_write_has_its_own_outcome(client: OxiaCoordinator, root: str) -> None:
    await client.put(f"{root}/there", b"")
    results = await client.write(
        [
            DeleteRange(f"{root}/x", f"{root}/y"),
            Delete(f"{root}/never", 3),
            Put(f"{root}/there", b"", ABSENT),
            Put(f"{root}/new", b"", ABSENT),
            Put(f"{root}/new", b"", ABSENT),
            Put(f"{root}/x1", b""),
            Delete(f"{root}/never"),
        ]
    )
    failed = [isinstance(result.error, PreconditionFailed) for result in results]
    assert failed == [False, True, True, False, True, False, False]
    assert await client.list(*children(root)) == [f"{root}/new", f"{root}/there"]


async def test_versions_grow_over_delete_and_create(client: OxiaCoordinator, root: str) -> None:
    first = await client.put(f"{root}/k", b"")
    await client.delete(f"{root}/k", first)
    assert await client.put(f"{root}/k", b"", ABSENT) > first
    with pytest.raises(PreconditionFailed):
        await client.delete(f"{root}/k", first)


async def test_empty_and_reversed_range_deletes_remove_nothing(client: OxiaCoordinator, root: str) -> None:
    await client.put(f"{root}/k", b"")
    await client.delete_range(f"{root}/k", f"{root}/k")
    await client.delete_range(f"{root}/z", f"{root}/a")
    assert await client.get(f"{root}/k") is not None


@pytest.mark.parametrize(
    ("start", "end"),
    [("A/", "z/"), ("__oxia/", "__oxia//"), ("__oxia/a", "__oxia/b"), ("a", "z"), ("", "z/"), ("a/", "")],
)
async def test_range_delete_that_could_reach_the_servers_own_keys_is_never_sent(
    client: OxiaCoordinator, start: str, end: str
) -> None:
    """It would be in the log for ever, and the server would not start again."""
    with pytest.raises(InvalidKey):
        await client.delete_range(start, end)


@pytest.mark.parametrize("key", ["__oxia/session/0", "dir/a.4"])
async def test_keys_that_hurt_a_server_are_never_sent(client: OxiaCoordinator, key: str) -> None:
    with pytest.raises(InvalidKey):
        await client.put(key, b"")


async def test_lookups_stay_in_their_directory(client: OxiaCoordinator, root: str) -> None:
    """The server's order goes on into neighbours, sub-directories and its own records."""
    parent = directory_of(root)
    for key in (
        f"{parent}/aaa/k",
        f"{root}/b",
        f"{root}/d",
        f"{root}/sub/c",
        f"{parent}/zzz/k",
        f"{parent}/k",
    ):
        await client.put(key, b"")
    b, d = f"{root}/b", f"{root}/d"
    found = {
        "ceiling": [await client.ceiling(f"{root}/{leaf}") for leaf in "abcde"],
        "floor": [await client.floor(f"{root}/{leaf}") for leaf in "abcde"],
        "higher": [await client.higher(f"{root}/{leaf}") for leaf in "abcde"],
        "lower": [await client.lower(f"{root}/{leaf}") for leaf in "abcde"],
    }
    assert {name: [record and record.key for record in records] for name, records in found.items()} == {
        "ceiling": [b, b, d, d, None],
        "floor": [None, b, b, d, d],
        "higher": [b, d, d, None, None],
        "lower": [None, None, b, b, d],
    }
    assert await client.list(*children(root)) == [b, d]


async def test_lookups_at_the_very_top_do_not_show_the_servers_own_records(client: OxiaCoordinator) -> None:
    for lookup in (client.ceiling, client.floor, client.higher, client.lower):
        record = await lookup("top-level-key-that-nobody-wrote")
        assert record is None or "/" not in record.key
    assert await client.floor("A/first/a") is None
    assert await client.lower("A/first/a") is None


async def test_scan_longer_than_a_servers_message_is_whole_and_ordered(
    client: OxiaCoordinator, root: str
) -> None:
    keys = [f"{root}/{n:05d}" for n in range(2_500)]
    for part in _parts(keys, 500):
        assert all(result.error is None for result in await client.write([Put(key, b"v") for key in part]))
    assert [record.key async for record in client.scan_all(*children(root))] == keys
    assert await client.list(f"{root}/00010", f"{root}/00020", limit=3) == keys[10:13]


async def test_values_of_a_mebibyte_come_back_from_a_scan(client: OxiaCoordinator, root: str) -> None:
    value = bytes(range(256)) * 4096
    for n in range(6):
        await client.put(f"{root}/{n}", value)
    records = await client.range_scan(*children(root))
    assert [record.value == value for record in records] == [True] * 6


async def test_plain_put_makes_an_ephemeral_key_permanent(client: OxiaCoordinator, root: str) -> None:
    async with await client.open_session(10_000) as session:
        await client.put(f"{root}/mine", b"", ABSENT, session=session)
        await client.put(f"{root}/kept", b"", ABSENT, session=session)
        with pytest.raises(PreconditionFailed):
            await client.put(f"{root}/mine", b"", ABSENT)
        await client.put(f"{root}/kept", b"")
    assert await client.list(*children(root)) == [f"{root}/kept"]
    record = await client.get(f"{root}/kept")
    assert record is not None
    assert record.session_id is None


async def test_session_outlives_its_timeout_by_renewing(client: OxiaCoordinator, root: str) -> None:
    async with await client.open_session(2_000) as renewed, client.watch(root) as watch:
        await client.put(f"{root}/renewed", b"", session=renewed)
        abandoned = await client.open_session(2_000)
        await client.put(f"{root}/abandoned", b"", session=abandoned)
        await _stop_renewing(abandoned)
        while await client.get(f"{root}/abandoned") is not None:
            await watch.changed()
        with pytest.raises(SessionExpired):
            await client.put(f"{root}/abandoned", b"", session=abandoned)
        record = await client.get(f"{root}/renewed")
        assert record is not None
        assert record.session_id == renewed.id


async def test_watch_wakes_for_put_delete_and_range_delete(client: OxiaCoordinator, root: str) -> None:
    async with client.watch(root) as watch, open_oxia(client.url) as other:
        await other.put(f"{root}/a", b"")
        await watch.changed()
        await other.delete(f"{root}/a")
        await watch.changed()
        await other.put(f"{root}/b", b"")
        await watch.changed()
        await other.delete_range(*children(root))
        await watch.changed()


async def test_unknown_namespace_is_reported_with_its_remedy(oxia: OxiaServer) -> None:
    async with open_oxia(oxia.url("nowhere") + "?timeout_ms=60000") as client:
        with pytest.raises(Unavailable) as raised:
            await client.get("a/b")
        assert "namespace" in raised.value.message
        assert "default" in raised.value.hint


async def test_hundred_writers_with_sessions_beside_them_do_not_disturb_the_server(
    client: OxiaCoordinator, root: str
) -> None:
    async def writer(number: int) -> None:
        for n in range(20):
            await client.put(f"{root}/{number:03d}-{n:03d}", b"")

    async def sessions() -> None:
        for n in range(10):
            async with await client.open_session(5_000) as session:
                await client.put(f"{root}/zz-{n}", b"", session=session)

    await asyncio.gather(*[writer(number) for number in range(100)], sessions())
    assert len([key async for key in client.scan_all(*children(root))]) == 2_000


# -- several shards


async def test_keys_spread_over_shards_are_found_by_every_read(spread: OxiaCoordinator, root: str) -> None:
    keys = [f"{root}/{n:03d}" for n in range(60)]
    results = await spread.write([Put(key, key.encode()) for key in keys])
    assert all(result.error is None for result in results)
    for key in keys:
        record = await spread.get(key)
        assert record is not None
        assert record.value == key.encode()
    assert await spread.list(*children(root)) == keys
    assert [record.key for record in await spread.range_scan(*children(root), limit=7)] == keys[:7]
    higher, lower = await spread.higher(keys[10]), await spread.lower(keys[10])
    assert higher is not None
    assert lower is not None
    assert (higher.key, lower.key) == (keys[11], keys[9])
    await spread.delete_range(keys[5], keys[55])
    assert await spread.list(*children(root)) == keys[:5] + keys[55:]


async def test_partition_key_decides_where_a_key_is_found(spread: OxiaCoordinator, root: str) -> None:
    for n in range(20):
        await spread.put(f"{root}/{n:02d}", b"", partition_key="together")
    assert len(await spread.list(*children(root), partition_key="together")) == 20
    alone = [await spread.get(f"{root}/{n:02d}") for n in range(20)]
    assert None in alone
    record = await spread.ceiling(f"{root}/05", partition_key="together")
    assert record is not None
    assert record.key == f"{root}/05"
    await spread.delete_range(*children(root), partition_key="together")
    assert await spread.list(*children(root)) == []


async def test_one_session_holds_keys_on_all_shards(spread: OxiaCoordinator, root: str) -> None:
    keys = [f"{root}/{n:02d}" for n in range(30)]
    async with await spread.open_session() as session:
        await spread.write([Put(key, b"", ABSENT, session=session) for key in keys])
        assert {record.session_id for record in await spread.range_scan(*children(root))} == {session.id}
    assert await spread.list(*children(root)) == []


async def test_watch_hears_of_changes_on_all_shards(spread: OxiaCoordinator, root: str) -> None:
    async with spread.watch(root) as watch:
        for n in range(12):
            await spread.put(f"{root}/{n}", b"")
            await watch.changed()


async def _stop_renewing(session: Session) -> None:
    """As if the process had died: the server hears nothing more of the session."""
    for task in asyncio.all_tasks():
        if task.get_name().startswith(f"oxia session {session.id} "):
            task.cancel()


def _parts(keys: list[str], size: int) -> list[list[str]]:
    return [keys[start : start + size] for start in range(0, len(keys), size)]
