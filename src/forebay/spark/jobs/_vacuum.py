"""Vacuum of a whole deployment: marks are found by a join on Spark, everything else is `forebay vacuum`.

The join leaves the few objects without a name; the pass of the local vacuum takes it from there: candidates
older than the grace, a second look through names and headers, two marks, deletion. It skips what the join has
done, visits to the partitions of the catalog. A killed executor costs a task; a killed driver nothing, since
marks are replaced by compare-and-set at the end, and what was deleted was due.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from forebay.log import Vacuum, VacuumConfig, VacuumReport
from forebay.log._discovery import catalog_partitions
from forebay.log._keys import PartitionKeys
from forebay.log._vacuum import _Pass
from forebay.spark.jobs._join import Names, unnamed_objects
from forebay.spark.jobs._place import Place
from forebay.storage import ObjectInfo

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["vacuum"]


def vacuum(
    place: Place,
    *,
    config: VacuumConfig | None = None,
    dry_run: bool = False,
    spark: SparkSession | None = None,
) -> VacuumReport:
    """One pass: delete what an earlier one marked, mark what is new. Without `spark` in this process."""
    mine, parts = place.opened()
    local = Vacuum(
        parts.store,
        parts.coordinator,
        clock=parts.clock,
        randomness=parts.randomness,
        ids=parts.ids,
        config=config,
    )
    if spark is None:
        return mine.run(local.run_once(dry_run=dry_run))
    partitions = mine.run(catalog_partitions(local._catalog))
    # The clock of the pass is read before the listing: an object counts by its age at the beginning.
    sweep = mine.run(_begin(local, VacuumReport(dry_run), set(partitions)))
    names = unnamed_objects(spark, place, partitions, sweep=not dry_run)
    if names.damaged:
        raise names.damaged[0]
    mine.run(sweep.finish(names))
    return sweep.report


async def _begin(local: Vacuum, report: VacuumReport, visited: set[PartitionKeys]) -> _JoinedPass:
    marks = await local._objects.patiently(local._marks.load)
    return _JoinedPass(local, report, marks, visited)


class _JoinedPass(_Pass):
    """A pass whose first look at the partitions was a join."""

    def __init__(
        self, local: Vacuum, report: VacuumReport, marks: object, visited: set[PartitionKeys]
    ) -> None:
        super().__init__(local, report, marks)  # type: ignore[arg-type]
        self._visited = visited

    async def finish(self, names: Names) -> None:
        """Go on where the join ended."""
        self.report.objects = names.objects
        self.report.keep("in use", names.objects - len(names.unnamed))
        self.report.partitions = len(self._visited)
        for visit in names.visits:
            since = visit.compaction_since_ms
            if since is not None and since < self._now_ms - self._config.mark_gap_ms // 2:
                self.report.stalled.append(str(visit.keys))
            self.report.swept_index_keys += len(visit.stale)
        portion = [info for info in names.unnamed if self._is_candidate(info)]
        for first in range(0, len(portion), self._config.candidates_max):
            await self._take(portion[first : first + self._config.candidates_max])
        await self._save()

    async def _visit(
        self, partitions: Sequence[PartitionKeys], asked: set[PartitionKeys], left: dict[str, ObjectInfo]
    ) -> None:
        await super()._visit([keys for keys in partitions if keys not in self._visited], asked, left)
