"""What an export's reader may do depends on the process that it is in."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pyspark
import pytest

from forebay.spark.export._clients import Clients


@pytest.mark.parametrize("task", [None, object()])
def test_objects_are_mapped_in_workers_of_spark_alone(
    task: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pyspark, "TaskContext", SimpleNamespace(get=lambda: task))
    opened = Clients()
    try:
        reader = opened.reader(str(tmp_path), None)
        assert reader._config.maps_objects is (task is not None)
    finally:
        opened.close()
