"""What a sender gets back, by either door: a receipt now, a delivery or an error later.

The embedded producer and the one over HTTP know different things about the records of one partition. So what
is here asks of them only what is in `Part`, and each door names its own kinds: its `Delivery` is a
`DeliveryOf` its parts, its `Receipt` one for its `Delivery`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from forebay.errors import ForebayError, OutcomeUnknown, UsageError

__all__ = ["DeliveryOf", "Part", "PartlyDeliveredOf", "ReceiptFor", "not_yet", "settled"]


class Part(Protocol):
    """What became of the records for one partition."""

    @property
    def partition(self) -> int:
        """The partition."""

    @property
    def start_offset(self) -> int | None:
        """Offset of the first record, or None where they were not taken."""

    @property
    def end_offset(self) -> int | None:
        """Offset of the last record."""

    @property
    def count(self) -> int:
        """Records for the partition, taken or not."""

    @property
    def error(self) -> ForebayError | None:
        """What went wrong."""


P = TypeVar("P", bound=Part)
D = TypeVar("D")


@dataclass(frozen=True, slots=True)
class DeliveryOf(Generic[P]):
    """Records that are durable, and where they are."""

    topic: str
    parts: tuple[P, ...]
    """One per partition that the records went to."""

    @property
    def count(self) -> int:
        """Records in all."""
        return sum(part.count for part in self.parts)

    @property
    def partition(self) -> int:
        """The partition, where there is one."""
        return self._only().partition

    @property
    def start_offset(self) -> int:
        """Offset of the first record, where all went to one partition."""
        offset = self._only().start_offset
        assert offset is not None
        return offset

    @property
    def end_offset(self) -> int:
        """Offset of the last record, where all went to one partition."""
        offset = self._only().end_offset
        assert offset is not None
        return offset

    def _only(self) -> P:
        if len(self.parts) != 1:
            raise UsageError(
                f"the records went to {len(self.parts)} partitions", hint="look at each of `parts`"
            )
        return self.parts[0]


class PartlyDeliveredOf(ForebayError, Generic[P]):
    """Some of the partitions that records were sent to took them, others did not."""

    def __init__(self, topic: str, parts: Sequence[P]) -> None:
        failed = [part for part in parts if part.error is not None]
        super().__init__(
            f"{len(failed)} of {len(parts)} partitions of {topic!r} did not take their records: "
            f"{failed[0].error}",
            hint="`parts` says which; send those records again",
        )
        self.topic = topic
        self.parts = tuple(parts)


def settled(
    topic: str,
    parts: Sequence[P],
    delivery: Callable[[str, tuple[P, ...]], D],
    partly: Callable[[str, Sequence[P]], ForebayError],
) -> D | ForebayError:
    """What a sender learns in the end, in the kinds of its door."""
    errors = [part.error for part in parts if part.error is not None]
    if not errors:
        return delivery(topic, tuple(parts))
    return errors[0] if len(parts) == 1 else partly(topic, parts)


class ReceiptFor(Generic[D]):
    """Becomes a `Delivery` once the records are durable. Await it, or `result(timeout)`."""

    def __init__(self, seen: Callable[[object], None]) -> None:
        self._future: asyncio.Future[D] = asyncio.get_running_loop().create_future()
        self._seen = seen

    def __await__(self) -> Generator[object, None, D]:
        return self.result().__await__()

    async def result(self, timeout: float | None = None) -> D:
        """The delivery; raises what went wrong, or `OutcomeUnknown` where the time is up."""
        try:
            return await asyncio.wait_for(asyncio.shield(self._future), timeout)
        except TimeoutError:
            raise not_yet(timeout) from None
        except ForebayError:
            self._seen(self)
            raise

    def done(self) -> bool:
        """Whether the outcome is known."""
        return self._future.done()

    def settle(self, outcome: D | ForebayError) -> None:
        """Tell the sender."""
        if self._future.done():
            return
        if isinstance(outcome, ForebayError):
            self._future.set_exception(outcome)
            self._future.exception()  # Nobody is obliged to look: the producer's close raises it then.
        else:
            self._future.set_result(outcome)


def not_yet(timeout: float | None) -> OutcomeUnknown:
    """The error of a receipt that was asked too early."""
    return OutcomeUnknown(
        "send", reason=f"not durable after {timeout} s", hint="ask the receipt again, it goes on"
    )
