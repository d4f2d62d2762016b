"""What is gone for ever is asked about first."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forebay import connect

Run = Callable[..., Any]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    with connect(tmp_path) as bay:
        bay.topics.create("orders", partitions=1)
    return tmp_path


@pytest.mark.parametrize(
    ("answer", "code", "there"),
    [("", 2, True), ("n\n", 130, True), ("y\n", 0, False)],
    ids=["nobody answers", "no", "yes"],
)
def test_a_topic_goes_only_at_a_yes(
    forebay: Run, data: Path, monkeypatch: pytest.MonkeyPatch, answer: str, code: int, there: bool
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(answer))
    ran = forebay("topics", "delete", "orders", "--data", data)
    assert ran.code == code
    assert ("--yes" in ran.err) == (answer == "")
    listed = forebay("topics", "list", "--data", data, "-o", "json").out
    assert ("orders" in listed) == there
