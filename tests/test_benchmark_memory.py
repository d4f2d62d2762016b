"""The memory that benchmarks of Spark fill, with made-up figures of what is free."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
from benchmarks.figures import _memory
from benchmarks.figures._memory import Memory, memory_in_use
from benchmarks.figures._spark import warm
from benchmarks.harness import Bench, Sample, Variant

PIECE, PIECES = 16 * mmap.PAGESIZE, 64


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_memory, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(_memory, "SETTLED_BYTES", 4 * PIECE)


def test_free_memory_is_taken_until_no_more_of_it_is_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory(mmap.mmap(-1, PIECES * PIECE))
    free = iter([50, 40, 30, 30, 20, 21, 20, 22, 23, 19])
    monkeypatch.setattr(_memory, "_free_bytes", lambda: next(free))
    memory.refill()
    assert list(free) == [19]  # Four pieces that took nothing were enough.


def test_a_machine_whose_memory_never_settles_is_left_after_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory(mmap.mmap(-1, PIECES * PIECE))
    looks = iter(range(10_000, 0, -1))
    monkeypatch.setattr(_memory, "_free_bytes", lambda: next(looks))
    memory.refill()
    assert next(looks) == 10_000 - PIECES - 1


def test_files_of_a_folder_are_held_and_the_hole_goes_away(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(_memory, "_free_bytes", lambda: 0)
    folder = tmp_path / "data" / "deep"
    folder.mkdir(parents=True)
    (folder / "full").write_bytes(b"x" * 10_000)
    (folder / "empty").touch()
    with memory_in_use(Bench(tmp_path)) as memory:
        memory.hold(tmp_path / "data")
        assert [len(held) for held in memory._held] == [10_000]
        assert (tmp_path / "hole").exists()
    assert not (tmp_path / "hole").exists()


def test_the_world_is_made_ready_before_every_turn() -> None:
    seen: list[str] = []

    def turn(seconds: float) -> Sample:
        seen.append("turn")
        return Sample(1.0)

    variants = warm({"a": Variant(turn, "rows/s")}, lambda: seen.append("ready"))
    variants["a"].run(0.1)
    assert seen == ["ready", "turn"] * 2 and variants["a"].unit == "rows/s"
