"""Objects that nobody needs any more are deleted: after two marks, and not before their time.

    list candidates, older than the grace -> collect what partitions name -> mark the rest
    a later run: still named by nobody, and marked `mark_gap_ms` ago or earlier -> delete

Invariant: an object that any partition names, or may still come to name, is not deleted.

* *May still come to name*: a writer or compactor commits an object within its deadline or uploads it again,
  so nothing older than the grace is committed for the first time. The grace must be well above both.
* *Names*: see `_references`. The order, candidates before references, is what makes it hold without a lock.
* *Named a moment ago*: a reader that resolved an offset before the range was compacted asks for the old
  object a little later. Between the two marks it still finds it.
* *Named again*: a late index put may name an object below the compaction cursor, which readers then step
  over. While a compaction stalls before it moves the cursor they cannot; so as long as one stalls longer than
  half the gap between marks, no write-ahead object is deleted, and the report says whose fault it is.

* *Named elsewhere*: objects are judged by what one coordinator knows. One that knows no topic, no deleted one
  and no partition in any object's header has never been this log's, or has lost everything: then nothing is
  deleted. Neither is anything in a store that has the name of another log (`_identity`).

Crash points: anywhere. The marks are one object, replaced by compare-and-set; whatever is lost of them is
marked again. Two vacuums at once delete the same things.

Memory is bounded by `candidates_max`: candidates are taken in portions, and for each portion the index is
walked once. What is over `marks_max` waits for a later run.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from forebay.coordination import Coordinator
from forebay.errors import ForebayError, UsageError
from forebay.kit.clock import Clock
from forebay.kit.ids import IdSource
from forebay.log._discovery import partitions_of
from forebay.log._identity import LogPair
from forebay.log._keys import PartitionKeys
from forebay.log._references import LogObjects, Visit, is_shared, is_write_ahead, owner_of
from forebay.log._topics import Catalog
from forebay.log._vacuum_marks import Marks, MarksStore
from forebay.storage import ObjectInfo, ObjectStore

__all__ = ["Vacuum", "VacuumConfig", "VacuumReport"]

DELETES_PER_CALL: Final = 1_000
"""Objects deleted by one request."""
REPORT_KEYS_MAX: Final = 1_000
"""Most keys named in a report; totals count all of them."""

STRANGERS_ASKED_MAX: Final = 1_000
"""Objects whose headers are read to find a partition that exists, where the catalog names no topic at all."""


@dataclass(frozen=True, slots=True)
class VacuumConfig:
    """How cautious."""

    grace_ms: int = 3_600_000
    """Milliseconds an object must be old. Well above the commit deadlines of writers and compactors."""
    mark_gap_ms: int = 600_000
    """Milliseconds from the first mark to the deletion: longer than a reader may take for one request."""
    candidates_max: int = 200_000
    """Objects looked at in one portion. At least 1."""
    marks_max: int = 100_000
    """Most objects marked at a time. At least 1."""

    def __post_init__(self) -> None:
        if min(self.grace_ms, self.mark_gap_ms) < 0 or min(self.candidates_max, self.marks_max) < 1:
            raise UsageError(f"not a usable configuration: {self}", hint="see the range under each field")


@dataclass(slots=True)
class VacuumReport:
    """What went, what stayed and why."""

    dry_run: bool
    objects: int = 0
    """Objects of the log."""
    deleted: int = 0
    """Objects deleted, or with `dry_run` those that would have been."""
    deleted_bytes: int = 0
    deleted_keys: list[str] = field(default_factory=list)
    """The first of them."""
    kept: dict[str, int] = field(default_factory=dict)
    """How many stayed, by reason."""
    marked_bytes: int = 0
    """Bytes of the objects that wait for their second mark."""
    swept_index_keys: int = 0
    """Stale index keys removed on the way."""
    partitions: int = 0
    failed: list[str] = field(default_factory=list)
    """Deletions that were refused or whose outcome is unknown; the next run tries again."""
    stalled: list[str] = field(default_factory=list)
    """Partitions with a compaction that does not end."""

    def keep(self, reason: str, count: int = 1) -> None:
        """Count objects that stay."""
        if count:
            self.kept[reason] = self.kept.get(reason, 0) + count

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {name: getattr(self, name) for name in self.__slots__}


class Vacuum:
    """Deletes orphans of a whole deployment."""

    def __init__(
        self,
        store: ObjectStore,
        coordinator: Coordinator,
        *,
        clock: Clock,
        randomness: random.Random,
        ids: IdSource | None = None,
        config: VacuumConfig | None = None,
    ) -> None:
        self.config = config or VacuumConfig()
        self._store = store
        self._clock = clock
        self._objects = LogObjects(store, coordinator, clock=clock, randomness=randomness)
        ids = ids or IdSource(clock, randomness)
        self._catalog = Catalog(store, coordinator, clock=clock, ids=ids, randomness=randomness)
        self._marks = MarksStore(store, ids, LogPair(store, coordinator, ids))
        self.progress: Callable[[str, int], None] = lambda what, count: None
        """Hears what is being done, and to how many so far."""

    async def run_once(self, *, dry_run: bool = False) -> VacuumReport:
        """One pass: delete what an earlier pass marked, mark what is new."""
        sweep = _Pass(self, VacuumReport(dry_run), await self._objects.patiently(self._marks.load))
        await sweep.run()
        return sweep.report


class _Pass:
    """One run."""

    def __init__(self, vacuum: Vacuum, report: VacuumReport, marks: Marks) -> None:
        self.report = report
        self._config = vacuum.config
        self._store = vacuum._store
        self._objects = vacuum._objects
        self._catalog = vacuum._catalog
        self._marks_store = vacuum._marks
        self._progress = vacuum.progress
        self._marks = marks
        self._now_ms = vacuum._clock.now_ms()
        self._still_marked: dict[str, int] = {}
        self._knows_the_log = False

    async def run(self) -> None:
        portion: list[ObjectInfo] = []
        async for info in self._objects.listed():
            self.report.objects += 1
            if self._is_candidate(info):
                portion.append(info)
            if len(portion) >= self._config.candidates_max:
                await self._take(portion)
                portion = []
        await self._take(portion)
        await self._save()

    def _is_candidate(self, info: ObjectInfo) -> bool:
        if not (is_shared(info.key) or owner_of(info.key)):
            self.report.keep("not an object of the log")
        elif info.last_modified_ms > self._now_ms - self._config.grace_ms:
            self.report.keep("younger than the grace")
        else:
            return True
        return False

    async def _take(self, portion: Sequence[ObjectInfo]) -> None:
        if not portion:
            return
        unnamed = await self._unnamed(portion)
        doomed = [info for info in unnamed if self._is_due(info)]
        if self.report.stalled:
            held = [info for info in doomed if is_write_ahead(info.key)]
            self._hold(held, "a compaction stalls")
            doomed = [info for info in doomed if not is_write_ahead(info.key)]
        await self._delete(doomed)

    async def _unnamed(self, portion: Sequence[ObjectInfo]) -> list[ObjectInfo]:
        """Those that no partition names: of the catalog, of the objects' names, of their headers."""
        left = {info.key: info for info in portion}
        unreadable = 0
        own = {owner_of(key) for key in left} - {None}
        asked: set[PartitionKeys] = set()
        survey = await self._catalog.survey()
        self._knows_the_log |= bool(survey.topics or survey.deleted)
        await self._visit(partitions_of(survey.whole()), asked, left)
        await self._visit([keys for keys in sorted(own, key=str) if keys], asked, left)
        due = [info for info in left.values() if self._is_marked(info)]
        if not self._knows_the_log:
            due = list(left.values())[:STRANGERS_ASKED_MAX]
        for key, owners in (await self._objects.owners(due)).items():
            if key not in left:
                continue  # An owner of one before it names this one too.
            if owners is None:
                unreadable += 1
                self._hold([left.pop(key)], "its header cannot be read")
            else:
                await self._visit(owners, asked, left)
        self.report.keep("in use", len(portion) - len(left) - unreadable)
        if not self._knows_the_log:
            self.report.keep("the coordinator knows nothing of this log", len(left))
            return []
        return list(left.values())

    async def _visit(
        self, partitions: Sequence[PartitionKeys], asked: set[PartitionKeys], left: dict[str, ObjectInfo]
    ) -> None:
        def named(key: str) -> None:
            left.pop(key, None)

        for keys in partitions:
            if keys in asked:
                continue
            asked.add(keys)
            visit = await self._objects.visit(keys, named)
            self._knows_the_log |= visit.exists
            self._progress("looking at partitions", len(asked))
            await self._note(visit)
        self.report.partitions = max(self.report.partitions, len(asked))

    async def _note(self, visit: Visit) -> None:
        since = visit.compaction_since_ms
        if since is not None and since < self._now_ms - self._config.mark_gap_ms // 2:
            self.report.stalled.append(str(visit.keys))
        if not self.report.dry_run:
            self.report.swept_index_keys += await self._objects.sweep(visit)

    def _is_marked(self, info: ObjectInfo) -> bool:
        since = self._marks.first_ms.get(info.key)
        return since is not None and since <= self._now_ms - self._config.mark_gap_ms

    def _is_due(self, info: ObjectInfo) -> bool:
        if self._is_marked(info):
            return True
        self._hold([info], "waits for its second mark")
        return False

    def _hold(self, infos: Sequence[ObjectInfo], reason: str) -> None:
        """Keep them, marked since when they were first seen without a name."""
        self.report.keep(reason, len(infos))
        for info in infos:
            if len(self._still_marked) < self._config.marks_max:
                self._still_marked[info.key] = self._marks.first_ms.get(info.key, self._now_ms)
                self.report.marked_bytes += info.size

    async def _delete(self, doomed: Sequence[ObjectInfo]) -> None:
        for first in range(0, len(doomed), DELETES_PER_CALL):
            part = doomed[first : first + DELETES_PER_CALL]
            errors = await self._delete_part(part)
            for info, error in zip(part, errors, strict=True):
                if error is not None:
                    self.report.failed.append(f"{info.key}: {error.message}")
                    self._hold([info], "could not be deleted")
                    continue
                self.report.deleted += 1
                self.report.deleted_bytes += info.size
                if len(self.report.deleted_keys) < REPORT_KEYS_MAX:
                    self.report.deleted_keys.append(info.key)
            self._progress("deleting", self.report.deleted)

    async def _delete_part(self, part: Sequence[ObjectInfo]) -> list[ForebayError | None]:
        if self.report.dry_run:
            return [None] * len(part)
        try:
            return [result.error for result in await self._store.delete([info.key for info in part])]
        except ForebayError as error:
            return [error] * len(part)

    async def _save(self) -> None:
        # Also without a single mark, since it names the log whose objects these are; only who knows it may.
        if not self.report.dry_run and self._knows_the_log:
            await self._objects.patiently(
                lambda: self._marks_store.replace(self._marks, self._still_marked, self._config.marks_max)
            )
