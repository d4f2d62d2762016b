from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.spark.export.bed import Bed

from forebay.spark.export import close_clients


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[Bed]:
    yield Bed(tmp_path)
    close_clients()
