"""The commit broker over a real Unix socket."""

from __future__ import annotations

import asyncio
import random
import socket as sockets
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from forebay.buffer import BufferConfig, Producer, _commit_broker_socket
from forebay.buffer._commit_broker import CommitBroker, CommitRequest, ReplyKind
from forebay.buffer._commit_broker_client import BrokeredCommitter, BrokerGone
from forebay.buffer._commit_broker_socket import FRAME_BYTES_MAX, BrokerServer, BrokerSocket
from forebay.errors import OutcomeUnknown, UsageError
from forebay.formats import buffer_manifest
from forebay.kit.clock import SystemClock
from forebay.storage import MemoryStore, open_store

CONFIG = BufferConfig(manifest_path="q/manifest", data_path_prefix="q/data", flush_interval_ms=1)


def server(store: MemoryStore, path: Path, manifest_path: str = "q/manifest", url: str = "") -> BrokerServer:
    return BrokerServer(
        CommitBroker(store, CONFIG), path, manifest_path=manifest_path, store=url or store.url
    )


def socket(store: MemoryStore, path: Path) -> BrokerSocket:
    return BrokerSocket(path, manifest_path=CONFIG.manifest_path, store=store.url)


def producer(store: MemoryStore, path: Path, permission_ms: int = 500) -> tuple[Producer, BrokeredCommitter]:
    committer = BrokeredCommitter(
        socket(store, path),
        store,
        CONFIG,
        clock=SystemClock(),
        randomness=random.Random(1),
        permission_ms=permission_ms,
    )
    return Producer(CONFIG, store=store, committer=committer), committer


def request(number: int = 1) -> CommitRequest:
    return CommitRequest(number, SystemClock().monotonic() + 60, (("q/data/a", ((0, -5, b"m"),), b"tail"),))


async def test_an_entry_arrives_as_it_was_sent(tmp_path: Path) -> None:
    store = MemoryStore()
    async with server(store, tmp_path / "s"):
        link = socket(store, tmp_path / "s")
        reply = await link.request(request())
        await link.close()
    assert (reply.kind, reply.sequence) == (ReplyKind.COMMITTED, 0)
    [entry] = buffer_manifest.decode((await store.get("q/manifest")).data).entries
    assert (entry.location, entry.tail) == ("q/data/a", b"tail")
    assert entry.metadata == (buffer_manifest.Metadata(0, -5, b"m"),)


async def test_producers_share_a_broker_and_go_on_without_it(tmp_path: Path) -> None:
    store = MemoryStore()
    serving = server(store, tmp_path / "s")
    await serving.start()
    pairs = [producer(store, tmp_path / "s") for _ in range(3)]
    for out, _ in pairs:
        await (await out.produce([b"with"])).watcher.await_durable()
    await serving.stop()
    for out, _ in pairs:
        await (await out.produce([b"without"])).watcher.await_durable()
        await out.close()
    assert [(committer.brokered, committer.alone) for _, committer in pairs] == [(1, 1)] * 3
    assert buffer_manifest.decode((await store.get("q/manifest")).data).next_sequence == 6


async def test_a_producer_finds_the_broker_by_its_configuration(tmp_path: Path) -> None:
    config = replace(CONFIG, url=str(tmp_path / "queue"), broker_socket=str(tmp_path / "s"))
    async with open_store(config.url) as store, Producer(config) as out:
        serving = CommitBroker(store, config)
        async with BrokerServer(serving, tmp_path / "s", manifest_path="q/manifest", store=store.url):
            first = await (await out.produce([b"with"])).watcher.await_durable()
        second = await (await out.produce([b"without"])).watcher.await_durable()
    assert (first.sequence, second.sequence, serving.batches) == (0, 1, 1)


async def test_without_a_broker_nothing_is_sent(tmp_path: Path) -> None:
    link = socket(MemoryStore(), tmp_path / "none")
    for _ in range(2):
        with pytest.raises(BrokerGone):
            await link.request(request())
    await link.close()


@pytest.mark.parametrize("changes", [{"manifest_path": "other/manifest"}, {"url": "s3://elsewhere"}])
async def test_a_broker_of_another_queue_is_refused(tmp_path: Path, changes: dict[str, str]) -> None:
    store = MemoryStore()
    async with server(store, tmp_path / "s", **changes):
        link = socket(store, tmp_path / "s")
        with pytest.raises(BrokerGone, match="serves"):
            await link.request(request())
        await link.close()
    assert [info.key async for info in store.list()] == []


async def test_a_hang_up_before_the_answer_is_an_unknown_outcome(tmp_path: Path) -> None:
    async def rude(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello = await reader.readexactly(4)
        writer.write(
            hello + await reader.readexactly(struct.unpack("<I", hello)[0])
        )  # the client's own words
        await reader.readexactly(4)
        writer.close()

    listening = await asyncio.start_unix_server(rude, str(tmp_path / "s"))
    link = socket(MemoryStore(), tmp_path / "s")
    with pytest.raises(OutcomeUnknown):
        await link.request(request())
    await link.close()
    listening.close()


@pytest.mark.parametrize(
    "junk", [b"GET / HTTP/1.1\r\n\r\n", struct.pack("<I", FRAME_BYTES_MAX + 1), b"\x03\0\0\0abc"]
)
async def test_junk_ends_its_connection_and_nothing_else(tmp_path: Path, junk: bytes) -> None:
    store = MemoryStore()
    async with server(store, tmp_path / "s"):
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "s"))
        writer.write(junk)
        writer.write_eof()
        assert await reader.read() == b""
        writer.close()
        link = socket(store, tmp_path / "s")
        assert (await link.request(request())).kind == ReplyKind.COMMITTED
        await link.close()


async def test_one_broker_per_socket(tmp_path: Path) -> None:
    store = MemoryStore()
    async with server(store, tmp_path / "s"):
        with pytest.raises(UsageError, match="in use"):
            await server(store, tmp_path / "s").start()


async def test_a_socket_left_by_a_killed_broker_is_taken_over(tmp_path: Path) -> None:
    with sockets.socket(sockets.AF_UNIX) as left:
        left.bind(str(tmp_path / "s"))
    async with server(MemoryStore(), tmp_path / "s"):
        pass
    assert not (tmp_path / "s").exists()


async def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("mine")
    with pytest.raises(UsageError):
        await server(MemoryStore(), path).start()
    assert path.read_text() == "mine"


@pytest.mark.parametrize("item", [(-1, 0, b""), (1 << 32, 0, b""), (0, 1 << 63, b"")])
async def test_numbers_that_do_not_fit_end_only_the_connection_they_came_on(
    tmp_path: Path, item: tuple[int, int, bytes]
) -> None:
    store = MemoryStore()
    deadline = SystemClock().monotonic() + 60
    async with server(store, tmp_path / "s"):
        bad, good = socket(store, tmp_path / "s"), socket(store, tmp_path / "s")
        with pytest.raises(OutcomeUnknown):
            await bad.request(CommitRequest(1, deadline, (("q/data/bad", (item,), b""),)))
        reply = await good.request(request())
        await bad.close()
        await good.close()
    assert reply.kind == ReplyKind.COMMITTED


async def test_the_socket_is_for_its_owner_alone(tmp_path: Path) -> None:
    async with server(MemoryStore(), tmp_path / "s"):
        assert (tmp_path / "s").stat().st_mode & 0o777 == 0o600


async def test_whoever_says_nothing_is_hung_up_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_commit_broker_socket, "GREETING_S_MAX", 0.05)
    async with server(MemoryStore(), tmp_path / "s"):
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "s"))
        assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()


async def test_a_broker_that_says_nothing_is_no_broker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_commit_broker_socket, "GREETING_S_MAX", 0.05)
    silent = sockets.socket(sockets.AF_UNIX)
    silent.bind(str(tmp_path / "s"))
    silent.listen()
    store = MemoryStore()
    out, committer = producer(store, tmp_path / "s")
    async with out:
        await (await out.produce([b"x"])).watcher.await_durable()
    silent.close()
    assert committer.alone == 1
