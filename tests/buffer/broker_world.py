"""A commit broker in the simulated world: an actor behind a mailbox, as a local socket would be."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from dataclasses import dataclass, field

from forebay.buffer import BufferConfig, Producer
from forebay.buffer._commit_broker import CommitBroker, CommitReply, CommitRequest
from forebay.buffer._commit_broker_client import BrokeredCommitter
from forebay.errors import ForebayError, NotDone
from forebay.formats import buffer_batch, buffer_manifest
from forebay.testing import World
from forebay.testing.actor import Actor

CONFIG = BufferConfig(manifest_path="q/manifest", data_path_prefix="q/data")


@dataclass
class Mailbox:
    """What producers sent and the broker has not taken yet. A dead broker leaves it as it is."""

    waiting: deque[tuple[CommitRequest, asyncio.Future[CommitReply]]] = field(default_factory=deque)
    wake: asyncio.Future[None] | None = None

    async def request(self, request: CommitRequest) -> CommitReply:
        reply: asyncio.Future[CommitReply] = asyncio.get_running_loop().create_future()
        self.waiting.append((request, reply))
        if self.wake is not None and not self.wake.done():
            self.wake.set_result(None)
        return await reply

    async def close(self) -> None:
        """The mailbox stays for the others."""


async def broker(me: Actor, mailbox: Mailbox, config: BufferConfig = CONFIG) -> None:
    """Serves until it crashes, or until the world ends."""
    serving = CommitBroker(me.store, config, clock=me.clock, randomness=me.random, ids=me.ids)
    mailbox.waiting.clear()  # a new process has a new socket
    tasks: set[asyncio.Task[None]] = set()
    while True:
        while mailbox.waiting:
            request, reply = mailbox.waiting.popleft()
            task = asyncio.get_running_loop().create_task(_serve(serving, request, reply))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        mailbox.wake = asyncio.get_running_loop().create_future()
        await mailbox.wake


async def _serve(serving: CommitBroker, request: CommitRequest, reply: asyncio.Future[CommitReply]) -> None:
    answer = await serving.commit(request)
    if not reply.done():
        reply.set_result(answer)


@dataclass
class Told:
    """What producers were told, for the test alone."""

    durable: set[str] = field(default_factory=set)
    unknown: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    latencies_s: list[float] = field(default_factory=list)
    committers: list[BrokeredCommitter] = field(default_factory=list)


async def produce(
    me: Actor, mailbox: Mailbox, told: Told, count: int, every_s: float, config: BufferConfig = CONFIG
) -> None:
    committer = BrokeredCommitter(
        mailbox, me.store, config, clock=me.clock, randomness=me.random, permission_ms=1_000
    )
    told.committers.append(committer)
    out = Producer(config, me.clock, store=me.store, ids=me.ids, randomness=me.random, committer=committer)
    waiting = []
    for number in range(count):
        name = f"{me.name}/{number}"
        handle = await out.produce([name.encode()])
        waiting.append(asyncio.get_running_loop().create_task(_watch(me, handle, name, told)))
        await me.clock.sleep(every_s)
    await asyncio.wait(waiting)
    with contextlib.suppress(ForebayError):
        await out.close()


async def _watch(me, handle, name: str, told: Told) -> None:  # type: ignore[no-untyped-def]
    began = me.clock.monotonic()
    try:
        await handle.watcher.await_durable()
    except NotDone:
        told.failed.add(name)
    except ForebayError:
        told.unknown.add(name)
    else:
        told.durable.add(name)
        told.latencies_s.append(me.clock.monotonic() - began)


async def queued(world: World) -> list[str]:
    """Every record in the queue, in order."""
    manifest = buffer_manifest.decode((await world.bucket.get(CONFIG.manifest_path)).data)
    found: list[str] = []
    for entry in manifest.entries:
        batch = buffer_batch.decode((await world.bucket.get(entry.location)).data)
        found.extend(record.decode() for record in batch.records())
    return found


def check(records: list[str], told: Told) -> None:
    """Nothing lost, nothing twice, order kept, and every certain answer true."""
    assert len(records) == len(set(records)), "a record is there twice"
    assert told.durable <= set(records), "a durable record is lost"
    assert not told.failed & set(records), "a record is there although its producer was told it is not"
    for name in {record.partition("/")[0] for record in records}:
        numbers = [int(record.partition("/")[2]) for record in records if record.startswith(name + "/")]
        assert numbers == sorted(numbers), f"{name} is out of order"
