"""Where the vectors of the Rust implementation lie."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def vectors_folder() -> Path:
    """The folder with what the Rust implementation wrote; skips where it is not beside the checkout."""
    default = Path(__file__).parents[3] / "shared" / "data"
    folder = Path(os.environ.get("FOREBAY_SHARED_DATA", default)) / "opendata"
    if not folder.is_dir():
        pytest.skip("the shared vectors are not here; FOREBAY_SHARED_DATA names their folder")
    return folder
