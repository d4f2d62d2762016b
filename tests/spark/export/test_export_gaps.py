"""Records that go while they are exported, and acknowledgements that did not come."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.spark.export.bed import Bed, order, places
from tests.spark.export.test_export_sources import buffer_config, entries, produce

import forebay
from forebay.spark.export import RecordsTrimmed, close_clients, export

pytestmark = pytest.mark.xdist_group("export")


def trimming(bed: Bed, offset: int) -> object:
    """Trims when the first plan is made."""
    done: list[str] = []

    def step(what: str, *_: int) -> None:
        if what == "planned" and not done:
            done.append(what)
            with forebay.connect(bed.bay_directory) as bay:
                bay.trim("orders", partition=0, offset=offset)

    return step


def test_records_that_go_after_the_plan_end_the_export_in_the_same_words(bed: Bed) -> None:
    bed.fill(9, appends=9)
    with pytest.raises(RecordsTrimmed, match="now begins at 5") as caught:
        export(bed.config(), step=trimming(bed, 5))  # type: ignore[arg-type]
    assert "--on-data-loss skip" in caught.value.hint
    assert bed.rows().num_rows == 0


def test_records_that_go_after_the_plan_are_stepped_over_and_told(bed: Bed) -> None:
    bed.fill(2)
    export(bed.config())
    bed.fill(7, appends=7)
    report = export(bed.config(on_data_loss="skip"), step=trimming(bed, 5))  # type: ignore[arg-type]
    assert report.skipped == {"orders:0": 2}
    assert [offset for partition, offset in places(bed.rows()) if partition == 0] == [1, 2, 5, 6, 7, 8, 9]


def test_a_gap_counts_once_however_often_it_is_planned(bed: Bed) -> None:
    bed.fill(4)
    export(bed.config())
    bed.fill(4)
    bed.send([order(1, note="a column more")])
    with forebay.connect(bed.bay_directory) as bay:
        bay.trim("orders", partition=0, offset=7)
    report = export(bed.config(on_data_loss="skip"))
    assert (report.added_columns, report.skipped) == (["note"], {"orders:0": 2})


def test_a_gap_up_to_the_end_is_stepped_over_for_good(bed: Bed) -> None:
    bed.fill(4)
    export(bed.config())
    bed.fill(4)
    with forebay.connect(bed.bay_directory) as bay:
        bay.trim("orders", partition=0, offset=9)
    assert export(bed.config(on_data_loss="skip")).skipped == {"orders:0": 4}
    assert export(bed.config()).skipped == {}


def test_a_buffer_is_acknowledged_by_the_next_export_where_the_last_was_killed(tmp_path: Path) -> None:
    produce(tmp_path / "buffer", 3)
    export(buffer_config(tmp_path))
    assert entries(tmp_path / "buffer") == 3
    report = export(buffer_config(tmp_path, acknowledge=True))
    close_clients()
    assert (report.records, entries(tmp_path / "buffer")) == (0, 0)
