"""What a worker does once for all tasks that follow."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from forebay.spark import _worker


@pytest.fixture(autouse=True)
def thawed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(_worker, "_settled", set())
    gc.unfreeze()
    yield
    gc.unfreeze()


def test_what_is_loaded_is_put_aside_once_and_only_in_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    _worker.settle()
    assert gc.get_freeze_count() == 0

    monkeypatch.setattr(_worker, "TaskContext", SimpleNamespace(get=object))
    _worker.settle()
    frozen = gc.get_freeze_count()
    assert frozen > 1_000

    later: list[list[int]] = [[] for _ in range(1_000)]
    _worker.settle()
    assert gc.get_freeze_count() <= frozen and len(later) == 1_000
