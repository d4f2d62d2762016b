"""Which deployment a job works on: plain text that travels to the executors."""

from __future__ import annotations

from dataclasses import dataclass

from forebay._connect import Parts, check_there
from forebay.log import Catalog
from forebay.log._references import LogObjects
from forebay.spark.export._clients import Clients, clients

__all__ = ["Place", "partitions_of"]


@dataclass(frozen=True, slots=True)
class Place:
    """A store and a coordinator by their addresses."""

    store: str
    """Directory or URL of the store."""
    coordinator: str | None = None
    """URL of the coordinator; None: the embedded one of the directory."""

    def opened(self) -> tuple[Clients, Parts]:
        """The clients of this process, and the deployment as they have it open. Raises `UsageError` where
        there is none."""
        check_there(self.store, self.coordinator)
        mine = clients()
        return mine, mine.parts(self.store, self.coordinator)

    def catalog(self) -> Catalog:
        """The topics."""
        _, parts = self.opened()
        return Catalog(
            parts.store, parts.coordinator, clock=parts.clock, ids=parts.ids, randomness=parts.randomness
        )

    def objects(self) -> LogObjects:
        """The objects of the log and who names them."""
        _, parts = self.opened()
        return LogObjects(parts.store, parts.coordinator, clock=parts.clock, randomness=parts.randomness)


def partitions_of(place: Place, topic: str | None) -> list[tuple[str, int]]:
    """The partitions to compact: of a topic, or of all that are not left out of compaction."""
    mine, _ = place.opened()
    catalog = place.catalog()

    async def look() -> list[tuple[str, int]]:
        topics = await catalog.list() if topic is None else [await catalog.describe(topic)]
        return [
            (each.topic, number)
            for each in topics
            if topic is not None or each.settings.compaction
            for number in range(each.partitions)
        ]

    return mine.run(look())
