"""Files that a real RabbitMQ wrote, where they can be had."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

VARY = "__vary_1794776874866716458"
ONE = "__one_1794776926531673457"
EMPTY = "__empty_1794776926578769585"
BLOOM = "bloom16"


def osiris_files() -> Path:
    """The folder with the files, or a skip that says where they were looked for."""
    given = os.environ.get("FOREBAY_SHARED_DATA")
    base = Path(given) if given else Path(__file__).resolve().parents[3] / "shared" / "data"
    if not (base / "osiris").is_dir():
        pytest.skip(f"no files of a real RabbitMQ under {base} (set FOREBAY_SHARED_DATA)")
    return base / "osiris"


def delivered(name: str) -> list[tuple[int, int, str]]:
    """Offset, length and hash of every record that the live broker delivered."""
    lines = (osiris_files() / f"{name}.records.tsv").read_text().splitlines()
    rows = [line.split("\t") for line in lines if line and not line.startswith("#")]
    return [(int(offset), int(length), digest) for offset, length, digest in rows]


def segments(stream: str) -> list[Path]:
    return sorted((osiris_files() / stream).glob("*.segment"))
