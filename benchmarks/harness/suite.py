"""The registry: a benchmark is a function that sets its parts up, yields what to measure, and tidies up.

    @suite.benchmark("checksum", "crc32c keeps up", Figure("1 MiB", of="crc32c", against="memcpy"))
    def checksum(bench: Bench) -> Iterator[Variants]:
        yield {"memcpy": Variant(...), "crc32c": Variant(...)}

A generator instead of a class: set-up and tidying up stand in one place, around a `yield`, with the `with`
blocks they need. Variants are measured one after the other and never at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from benchmarks.harness.figure import Figure, Sample

__all__ = ["Bench", "Benchmark", "CannotMeasure", "Suite", "Variant", "Variants"]


class CannotMeasure(Exception):
    """This machine lacks a part: the benchmark is shown as skipped, with this reason."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One way of doing the work."""

    run: Callable[[float], Sample]
    """Works for about that many seconds and tells the rate."""
    unit: str = "/s"
    """What the rate counts."""
    stretch: float = 1.0
    """How many times longer its turns are. Shares of sixteen processes need more than a handful of units."""


Variants: TypeAlias = Mapping[str, Variant]


@dataclass(frozen=True, slots=True)
class Bench:
    """What a benchmark is given."""

    directory: Path
    """Its own, empty, on the disk to be measured; removed afterwards."""
    say: Callable[[str], None] = field(default=lambda _: None)
    """Tells the person who waits what takes so long."""
    quick: bool = False
    """Whether somebody only wants to see that it works."""


Function: TypeAlias = Callable[[Bench], Iterator[Variants]]


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A name, a claim in one line, and the figures that show whether it holds."""

    name: str
    claim: str
    figures: tuple[Figure, ...]
    variants: Callable[[Bench], AbstractContextManager[Variants]]
    """Sets up, gives the variants, tidies up."""
    jobs: bool = False
    """Whether a turn is a whole job of seconds: then there are fewer."""


class Suite:
    """All benchmarks, by name, in the order of registration."""

    def __init__(self) -> None:
        self._benchmarks: dict[str, Benchmark] = {}

    def benchmark(
        self, name: str, claim: str, *figures: Figure, jobs: bool = False
    ) -> Callable[[Function], Function]:
        """Register the decorated generator function. `jobs`: its turns are whole jobs of seconds."""
        if name in self._benchmarks:
            raise ValueError(f"there are two benchmarks named {name!r}")

        def register(function: Function) -> Function:
            self._benchmarks[name] = Benchmark(name, claim, figures, contextmanager(function), jobs)
            return function

        return register

    def __iter__(self) -> Iterator[Benchmark]:
        return iter(self._benchmarks.values())

    def select(self, names: Sequence[str]) -> list[Benchmark]:
        """Those named, in the order of registration; all without names. Raises `KeyError` for a stranger."""
        for name in names:
            if name not in self._benchmarks:
                raise KeyError(name)
        return [benchmark for benchmark in self if not names or benchmark.name in names]
