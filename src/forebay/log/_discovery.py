"""Which partitions there are to look after.

The catalog is one directory: a scan of it names every topic with its partitions and settings, so nothing has
to be searched for. Targets are added as they appear and pruned as they go, so a service that runs for months
does not knock at partitions of topics that were deleted long ago.
"""

from __future__ import annotations

from collections.abc import Iterable

from forebay.errors import StorageDamaged
from forebay.log._keys import PartitionKeys
from forebay.log._topics import Catalog, Topic, TopicSettings

__all__ = ["Targets", "catalog_partitions", "partitions_of"]


async def catalog_partitions(catalog: Catalog) -> list[PartitionKeys]:
    """Every partition the catalog knows, of topics under deletion as well; raises where it is not whole."""
    return partitions_of((await catalog.survey()).whole())


def partitions_of(topics: Iterable[Topic]) -> list[PartitionKeys]:
    """Every partition of these topics."""
    return [
        PartitionKeys(topic.topic, partition) for topic in topics for partition in range(topic.partitions)
    ]


class Targets:
    """Partitions to compact, with the settings of their topics."""

    def __init__(self, catalog: Catalog, seed: Iterable[tuple[str, int]] = ()) -> None:
        """`seed` partitions are targets from the start, and stay so whatever the catalog says."""
        self._catalog = catalog
        self._seed = {PartitionKeys(topic, partition) for topic, partition in seed}
        self._settings: dict[PartitionKeys, TopicSettings] = {}
        self.known: set[PartitionKeys] = set(self._seed)
        """The targets now."""
        self.damaged: list[StorageDamaged] = []
        """Entries of the catalog that cannot be read: their partitions are nobody's targets."""

    def settings(self, keys: PartitionKeys) -> TopicSettings:
        """How the topic is kept; the defaults where the catalog does not know it."""
        return self._settings.get(keys, TopicSettings())

    async def refresh(self) -> tuple[set[PartitionKeys], set[PartitionKeys]]:
        """Ask the catalog: which targets are new, and which are gone."""
        survey = await self._catalog.survey()
        found = {
            PartitionKeys(topic.topic, partition): topic.settings
            for topic in survey.topics
            if _is_compacted(topic)
            for partition in range(topic.partitions)
        }
        now = self._seed | found.keys()
        added, gone = now - self.known, self.known - now
        self.known, self._settings, self.damaged = now, found, survey.damaged
        return added, gone

    def __len__(self) -> int:
        return len(self.known)


def _is_compacted(topic: Topic) -> bool:
    return topic.state == "ACTIVE" and topic.settings.compaction
