"""What Spark's workers run for the tests of the jobs."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from forebay.log import CompactorConfig
from forebay.spark.jobs._compact import CompactedPartition, compact_partition
from forebay.spark.jobs._place import Place
from forebay.storage import LocalStore


def die_once(mark: Path) -> None:
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def compact_and_die_once(
    marks: str, place: Place, config: CompactorConfig, which: tuple[str, int]
) -> CompactedPartition:
    """Dies by SIGKILL right after the compacted object was stored, at the first attempt."""
    mark = Path(marks, f"{which[0]}-{which[1]}")
    put_parts = LocalStore.put_parts

    async def deadly(self: LocalStore, key: str, *given: Any) -> str:
        version = await put_parts(self, key, *given)
        if "/compacted/" in key:
            die_once(mark)
        return version

    LocalStore.put_parts = deadly  # type: ignore[assignment, method-assign]
    try:
        return compact_partition(place, config, which)
    finally:
        LocalStore.put_parts = put_parts  # type: ignore[method-assign]
