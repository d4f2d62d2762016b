"""Writes on their way to one shard: the operations of one caller, and the request that carries many callers'.

A request is one entry in the server's log: puts, then deletes, then range deletes, each answered by itself.
The operations of one caller on one shard are never divided, so they stay one atomic step. Others may travel
in the same request only where the result is the one of sending them one after the other: a put may not join
a request that already deletes something, because it would be applied before that delete.

Encodings of requests can be concatenated, which is how they are joined here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from forebay.coordination._api import Delete, DeleteRange, Operation, Put, WriteResult
from forebay.coordination._oxia import oxia_pb2 as pb
from forebay.coordination._oxia._deadline import Deadline
from forebay.coordination._oxia._reads import session_identity
from forebay.coordination._oxia._sessions import OxiaSession
from forebay.errors import ForebayError, LimitExceeded, PreconditionFailed, SessionExpired
from forebay.kit.conditions import ABSENT, ANY

__all__ = ["Batch", "Unit"]

ABSENT_VERSION = -1
"""The expectation that means: must not exist. Versions begin at 0."""
VERSION_MAX = 2**63 - 1
"""Highest version the protocol can name: a higher one is expected in vain and is never sent."""
REQUEST_BYTES_MAX = 56 * 1024 * 1024
"""Largest request. From 64 MiB on a server refuses it and then every other write until it restarts."""
JOIN_OPERATIONS_MAX = 1_000
JOIN_BYTES_MAX = 1024 * 1024
"""A request that carries several callers' operations ends at these sizes; larger ones gain little and make
everybody in them wait."""


class Unit:
    """Operations of one `write` that live on one shard, with the replies in the order given."""

    __slots__ = (
        "_indexes",
        "_operations",
        "counts",
        "data",
        "deadline",
        "done",
        "has_session",
        "replies",
        "sent",
    )

    def __init__(self, shard: int, operations: Sequence[Operation], deadline: Deadline) -> None:
        self._operations = operations
        self._indexes: tuple[list[int], list[int], list[int]] = [], [], []
        self.deadline = deadline
        self.replies: list[WriteResult | None] = [None] * len(operations)
        """What became of each operation on this shard."""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.sent = False
        """Whether a server may have seen it."""
        self.has_session = False
        """Whether any of them is ephemeral."""
        self.encode(shard)
        if len(self.data) > REQUEST_BYTES_MAX:
            raise LimitExceeded(
                "REQUEST_BYTES_MAX", limit=REQUEST_BYTES_MAX, actual=len(self.data), hint="write in parts"
            )

    def encode(self, shard: int) -> None:
        """Build the request of what may be sent now; what may not gets its reply.

        Called again just before sending, since a session may have ended in the queue.
        """
        request = pb.WriteRequest()
        puts, deletes, ranges = self._indexes = [], [], []
        add_put = request.puts.add
        for index, operation in enumerate(self._operations):
            # The common case without a call: a commit of the log is some hundred of these.
            if (
                type(operation) is Put
                and operation.session is None
                and ((when := operation.when) is ABSENT or when is ANY or when <= VERSION_MAX)
            ):
                # Made in its place: a message of its own would be copied there.
                add_put(
                    key=operation.key,
                    value=operation.value,
                    expected_version_id=ABSENT_VERSION if when is ABSENT else None if when is ANY else when,
                    partition_key=operation.partition_key,
                )
                puts.append(index)
            elif (refusal := _refusal(operation, shard)) is not None:
                self.replies[index] = WriteResult(error=refusal)
            elif isinstance(operation, Put):
                _add_put(request, operation, shard)
                self.has_session = True
                puts.append(index)
            elif isinstance(operation, Delete):
                request.deletes.add(key=operation.key, expected_version_id=_expected(operation.when))
                deletes.append(index)
            else:
                request.delete_ranges.add(start_inclusive=operation.start, end_exclusive=operation.end)
                ranges.append(index)
        self.counts = len(puts), len(deletes), len(ranges)
        self.data = request.SerializeToString()

    @property
    def operations(self) -> int:
        """How many operations travel."""
        return sum(self.counts)

    def answer(
        self,
        puts: Sequence[pb.PutResponse],
        deletes: Sequence[pb.DeleteResponse],
        ranges: Sequence[pb.DeleteResponse],
    ) -> None:
        """Take the server's answers, one per operation that travelled. Too late ones are dropped."""
        if self.done.done():
            return
        replies, operations = self.replies, self._operations
        for index, put in zip(self._indexes[0], puts, strict=True):
            replies[index] = (
                WriteResult(put.version.version_id)
                if put.status == pb.OK
                else _put_refusal(operations[index], put)
            )
        for index, delete in zip(self._indexes[1], deletes, strict=True):
            self.replies[index] = _delete_reply(self._operations[index], delete)
        for index, _ in zip(self._indexes[2], ranges, strict=True):
            self.replies[index] = WriteResult()
        self._finish()

    def fail(self, error: ForebayError) -> None:
        """Give every operation without a reply this one, also where the caller stopped waiting."""
        self.replies = [WriteResult(error=error) if reply is None else reply for reply in self.replies]
        self._finish()

    def results(self) -> list[WriteResult]:
        """The replies, once all are there."""
        results = [reply for reply in self.replies if reply is not None]
        assert len(results) == len(self.replies), "an operation was left without a reply"
        return results

    def describe(self) -> str:
        """For messages: the first operation, and how many there are."""
        first = self._operations[0]
        name = first.start if isinstance(first, DeleteRange) else first.key
        more = len(self._operations) - 1
        return f"writing {name!r}" + (f" and {more} more" if more else "")

    def _finish(self) -> None:
        if not self.done.done():
            self.done.set_result(None)


class Batch:
    """Units that travel in one request."""

    __slots__ = ("_kind", "bytes", "operations", "units")

    def __init__(self) -> None:
        self.units: list[Unit] = []
        self.operations = 0
        self.bytes = 0
        self._kind = 0

    def takes(self, unit: Unit) -> bool:
        """Whether the unit may travel here too."""
        if not self.units:
            return True
        return (
            self.operations + unit.operations <= JOIN_OPERATIONS_MAX
            and self.bytes + len(unit.data) <= JOIN_BYTES_MAX
            and _kinds(unit)[0] >= self._kind
        )

    def add(self, unit: Unit) -> None:
        """Let it travel here."""
        self.units.append(unit)
        self.operations += unit.operations
        self.bytes += len(unit.data)
        self._kind = max(self._kind, _kinds(unit)[1])

    def encode(self, shard: int) -> bytes:
        """The request. The shard is always named: a server dies of a request that does not."""
        return b"".join(
            [pb.WriteRequest(shard=shard).SerializeToString(), *[unit.data for unit in self.units]]
        )

    def answer(self, response: pb.WriteResponse) -> bool:
        """Hand the answers to the units; False, and nothing handed out, where their numbers do not match."""
        totals = [sum(column) for column in zip(*[unit.counts for unit in self.units], strict=True)]
        answers = response.puts, response.deletes, response.delete_ranges
        if totals != [len(answer) for answer in answers]:
            return False
        puts, deletes, ranges = list(response.puts), list(response.deletes), list(response.delete_ranges)
        at = [0, 0, 0]
        for unit in self.units:
            to = [start + count for start, count in zip(at, unit.counts, strict=True)]
            unit.answer(puts[at[0] : to[0]], deletes[at[1] : to[1]], ranges[at[2] : to[2]])
            at = to
        return True


def _kinds(unit: Unit) -> tuple[int, int]:
    """The first and the last kind of operation in it: 0 puts, 1 deletes, 2 range deletes."""
    present = [kind for kind, count in enumerate(unit.counts) if count]
    return (present[0], present[-1]) if present else (2, 0)


def _refusal(operation: Operation, shard: int) -> ForebayError | None:
    """The reason why an operation must not reach the server, or None."""
    if isinstance(operation, DeleteRange):
        return None
    if type(operation.when) is int and operation.when > VERSION_MAX:
        return PreconditionFailed(operation.key, expected=operation.when)
    session = operation.session if isinstance(operation, Put) else None
    if session is not None and isinstance(session, OxiaSession) and not session.alive_on(shard):
        # Sent anyway it could meet the expiry on the server, and 0.14 then keeps the record for ever.
        return SessionExpired(
            f"session {session.id} is over or in doubt, {operation.key!r} was not written",
            hint="open a new session and claim again",
        )
    return None


def _add_put(request: pb.WriteRequest, put: Put, shard: int) -> None:
    added = request.puts.add(
        key=put.key,
        value=put.value,
        expected_version_id=_expected(put.when),
        partition_key=put.partition_key,
    )
    if put.session is not None and isinstance(put.session, OxiaSession):
        added.session_id = put.session.id_on(shard)
        added.client_identity = session_identity(put.session.id)


def _expected(when: object) -> int | None:
    if when is ANY:
        return None
    if when is ABSENT:
        return ABSENT_VERSION
    assert isinstance(when, int)
    return when


def _put_refusal(operation: Operation, answer: pb.PutResponse) -> WriteResult:
    assert isinstance(operation, Put)
    if answer.status == pb.SESSION_DOES_NOT_EXIST:
        error: ForebayError = SessionExpired(
            f"the session is over, {operation.key!r} was not written",
            hint="open a new session and claim again",
        )
        return WriteResult(error=error)
    return WriteResult(error=PreconditionFailed(operation.key, expected=operation.when))


def _delete_reply(operation: Operation, answer: pb.DeleteResponse) -> WriteResult:
    assert isinstance(operation, Delete)
    if answer.status == pb.OK or (answer.status == pb.KEY_NOT_FOUND and not isinstance(operation.when, int)):
        return WriteResult()
    return WriteResult(error=PreconditionFailed(operation.key, expected=operation.when))
