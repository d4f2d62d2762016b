"""What a sender over HTTP gets back. Named as in `forebay.connect`."""

from __future__ import annotations

from dataclasses import dataclass

from forebay._receipts import DeliveryOf, PartlyDeliveredOf, ReceiptFor
from forebay.errors import ForebayError

__all__ = ["Delivered", "Delivery", "PartlyDelivered", "Receipt"]


@dataclass(frozen=True, slots=True)
class Delivered:
    """What became of the records for one partition."""

    topic: str
    partition: int
    start_offset: int | None
    """Offset of the first record, or None where they were not taken."""
    end_offset: int | None
    """Offset of the last record."""
    count: int
    error: ForebayError | None = None
    """What went wrong. An `OutcomeUnknown` may have been appended; everything else certainly was not."""

    @property
    def ok(self) -> bool:
        """Whether the records are durable, at these offsets."""
        return self.error is None


@dataclass(frozen=True, slots=True)
class Delivery(DeliveryOf[Delivered]):
    """Records that are durable, and where they are."""


class PartlyDelivered(PartlyDeliveredOf[Delivered]):
    """Some of the partitions that records were sent to took them, others did not."""


class Receipt(ReceiptFor[Delivery]):
    """Becomes a `Delivery` once the records are durable. Await it, or `result(timeout)`."""
