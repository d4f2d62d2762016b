"""Real processes, killed with -9."""

from __future__ import annotations

import random

import pytest
from tests.spark.export.bed import Bed, places
from tests.spark.export.kill_workers import export_in_pieces

from forebay.spark.export import export
from forebay.testing.kill import Child, at, kill_repeatedly

pytestmark = pytest.mark.xdist_group("export")

COUNT = 60


def fill(bed: Bed) -> tuple[list[tuple[int, int]], list[bytes]]:
    """Good and bad records in turns; the places of the good ones, and the bad ones."""
    good, bad = [], []
    for part in range(6):
        bed.fill(COUNT // 6, appends=1)
        for partition in range(bed.partitions):
            first = part * (COUNT // 6 + 1) + 1
            good += [(partition, first + number) for number in range(COUNT // 6)]
            bad.append(b"{bad %d %d" % (partition, part))
            bed.send([bad[-1]], partition=partition)
    return sorted(good), sorted(bad)


def check(bed: Bed, kind: str, good: list[tuple[int, int]], bad: list[bytes]) -> None:
    export(bed.config(kind, dead_letter="topic:dead"))
    assert places(bed.rows(kind)) == good
    assert sorted(row["value"] for row in bed.read_topic("dead")) == bad


@pytest.mark.parametrize("step", ["task", "written", "dead", "committed"])
def test_a_process_killed_at_a_step_loses_and_doubles_nothing(bed: Bed, step: str) -> None:
    good, bad = fill(bed)
    arguments = {"directory": str(bed.directory), "kind": "delta"}
    with Child(export_in_pieces, arguments=arguments, crash=at(step, 2)) as child:
        child.wait_for_crash()
    check(bed, "delta", good, bad)


@pytest.mark.parametrize("kind", ["delta", "parquet"])
def test_a_process_killed_again_and_again_gets_there(bed: Bed, kind: str) -> None:
    good, bad = fill(bed)
    kill_repeatedly(
        export_in_pieces,
        randomness=random.Random(7),
        lives=3,
        arguments={"directory": str(bed.directory), "kind": kind},
        delay_ms_max=300,
    )
    check(bed, kind, good, bad)
