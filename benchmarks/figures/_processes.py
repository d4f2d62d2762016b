"""Processor time of everything this process has started, however those processes end.

A parent that waits for its child takes over the child's time, and nothing is missing. Spark's daemons leave
their children to the kernel instead, and what such a worker has used is gone with it: the next reading would
be lower than the last, by seconds. So what was seen of a process that has vanished is kept, unless its parent
has it now.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Process", "ProcessTimes", "processes"]

READINGS_MAX = 10
"""Readings until two of them show the same processes."""
_TICK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Process:
    """What the kernel tells of one process, in ticks."""

    parent: int
    began: int
    own: int
    """Its own time, user and system."""
    taken: int
    """That of children it has waited for, and of theirs."""

    @property
    def total(self) -> int:
        """Both."""
        return self.own + self.taken


def processes() -> dict[int, Process]:
    """All processes of the machine."""
    found: dict[int, Process] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            used = [int(field) for field in fields[11:15]]
            found[int(entry.name)] = Process(
                int(fields[1]), int(fields[19]), used[0] + used[1], used[2] + used[3]
            )
    return found


class ProcessTimes:
    """Readings of the tree below one process."""

    def __init__(self, root: int) -> None:
        self._root = root
        self._last: dict[int, Process] = {}
        self._kept = 0
        """Ticks of processes that have vanished without a trace."""

    def seconds(self, aside: int | None = None) -> float:
        """Time used so far; without the process `aside` and what it started: a server that idles beside."""
        tree = _tree(_settled(self._root), self._root)
        self.see(tree)
        without = _tree(tree, aside) | {aside: None} if aside is not None else {}
        used = sum(process.total for number, process in tree.items() if number not in without)
        return (used + self._kept) / _TICK

    def see(self, tree: dict[int, Process]) -> None:
        """Take note of who has vanished since the last reading."""
        gone: dict[int, int] = {}
        for number, process in self._last.items():
            now = tree.get(number)
            if now is None or now.began != process.began:
                gone[process.parent] = gone.get(process.parent, 0) + process.total
        for parent, used in gone.items():
            before, after = self._last.get(parent), tree.get(parent)
            taken = after.taken - before.taken if before and after and before.began == after.began else 0
            self._kept += max(0, used - taken)
        self._last = tree


def _settled(root: int) -> dict[int, Process]:
    """A reading in which nobody was between two chairs: dead already, and not yet its parent's."""
    found = processes()
    for _ in range(READINGS_MAX):
        again = processes()
        if _tree(found, root).keys() == _tree(again, root).keys():
            return again
        found = again
    return found


def _tree(found: dict[int, Process], root: int) -> dict[int, Process]:
    """Everything below a process."""
    children: dict[int, list[int]] = {}
    for number, process in found.items():
        children.setdefault(process.parent, []).append(number)
    below: dict[int, Process] = {}
    waiting = list(children.get(root, []))
    while waiting:
        number = waiting.pop()
        below[number] = found[number]
        waiting += children.get(number, [])
    return below
