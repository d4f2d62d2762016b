"""Memory as it is on a machine that has been up for a while: full of files that were read once.

A virtual machine may get its memory from the host page by page, when it is touched, and give back at once
what becomes free: where a file was deleted, or where a file was not looked at for a minute. Seen: 2 to 3 s of
processor time for a gigabyte of new memory, ten times the copying of a file into it, and all of it for
whoever happens to be the first to touch it: who writes files, or starts a process, and not who throws
everything away. It came and went with what had run before, and was more than the work that was to be
measured. Where no memory is free a new page is one that held an old file, at no such price for anybody.

So memory is filled with a file before the first turn, and what became free since is taken again before every
turn. The file is a single hole: nothing comes from the disk, and its pages are the first that the kernel
takes away when they are needed. It is mapped, since what is mapped is not given back; for the same reason the
files that a turn reads may be held in memory by a mapping of them.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.harness import Bench, Sample, Variant, Variants

__all__ = ["Memory", "made_ready", "memory_in_use"]

PIECE_BYTES = 64 * 1024 * 1024
SETTLED_BYTES = 16 * PIECE_BYTES
"""Bytes to be touched in a row that leave as much free as there was: the kernel keeps some of it free."""


class Memory:
    """A file that fills the memory, and files that stay in it."""

    def __init__(self, hole: mmap.mmap) -> None:
        self._pages = np.frombuffer(hole, np.uint8)[:: mmap.PAGESIZE]
        self._next = 0
        self._held: list[mmap.mmap] = []

    def refill(self) -> None:
        """Take what is free, until no more of it is to be had."""
        step = PIECE_BYTES // mmap.PAGESIZE
        lowest, settled, turns = _free_bytes(), 0, len(self._pages) // step
        while settled < SETTLED_BYTES and turns:
            self._pages[self._next : self._next + step].max()
            self._next = (self._next + step) % len(self._pages)
            free = _free_bytes()
            settled = 0 if free < lowest else settled + PIECE_BYTES
            lowest, turns = min(lowest, free), turns - 1

    def hold(self, folder: Path) -> None:
        """Keep all files of a folder as they are now in memory."""
        for path in sorted(folder.rglob("*")):
            if path.is_file() and path.stat().st_size:
                with path.open("rb") as file:
                    self._held.append(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
                np.frombuffer(self._held[-1], np.uint8)[:: mmap.PAGESIZE].max()


def made_ready(variants: Variants, ready: Callable[[], None]) -> Variants:
    """The same variants; before every turn the world is made `ready`, unmeasured."""

    def prepared(variant: Variant) -> Variant:
        def run(seconds: float) -> Sample:
            ready()
            return variant.run(seconds)

        return replace(variant, run=run)

    return {name: prepared(variant) for name, variant in variants.items()}


@contextmanager
def memory_in_use(bench: Bench) -> Iterator[Memory]:
    """No memory is free; `refill` it before a turn."""
    bench.say("filling memory with a file")
    size = 2 * os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE // PIECE_BYTES * PIECE_BYTES
    with ExitStack() as stack:
        path = bench.directory / "hole"
        file = stack.enter_context(path.open("w+b"))
        stack.callback(path.unlink)
        file.truncate(size)
        memory = Memory(mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ))
        memory.refill()
        yield memory


def _free_bytes() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * mmap.PAGESIZE
