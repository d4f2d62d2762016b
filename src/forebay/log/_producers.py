"""Which groups of a unit may be appended: fencing and the bookkeeping of idempotent producers.

Pure functions over a control record. The rules, in this order:

1. An epoch below the partition's is refused for ever, repetitions included: nothing is told to a writer that
   was shut out.
2. A sequence that the partition remembers is a repetition: it gets the offsets it got then.
3. While the partition is fenced nothing is appended.
4. A producer the partition does not know begins at sequence 0, one it knows goes on with the next number.
   Anything else is `OutOfSequence`: an append before it is missing, or too old to be recognised.

A partition remembers the last `PRODUCER_APPENDS_KEPT` appends of the last `PRODUCERS_MAX` producers, in the
control record itself, so that remembering is atomic with appending and compaction does not touch it. Two
consequences: a producer has at most that many appends under way per partition, and one that was silent while
so many others wrote is forgotten and is refused when it goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forebay.errors import ForebayError
from forebay.log._append import AppendGroup, AppendResult, Unit
from forebay.log._errors import Fenced, OutOfSequence
from forebay.log._records import PRODUCER_APPENDS_KEPT, PRODUCERS_MAX, Control, ProducerAppend

__all__ = ["admit", "remember"]


def admit(unit: Unit, control: Control) -> bool:
    """Answer the groups that may not be appended. True: the rest, if any, is what was uploaded."""
    if unit.epoch is not None and unit.epoch < control.epoch:
        unit.fail(_fenced(unit, control))
        unit.keep([])
        return True
    if control.log_state == "OPEN" and all(group.producer_id is None for group in unit.groups):
        return True
    accepted = _Admission(unit, control).run()
    if len(accepted) == len(unit.groups):
        return True
    unit.keep(accepted)
    return not accepted


@dataclass(slots=True)
class _Admission:
    unit: Unit
    control: Control

    def run(self) -> list[int]:
        """Answer what is refused or known; the numbers of the groups to be appended."""
        accepted: list[int] = []
        last: dict[str, int] = {}
        for number, group in enumerate(self.unit.groups):
            known = self._known(group)
            if known is not None and known.end_offset - known.start_offset + 1 == len(group.batch):
                self.unit.answers[self.unit.places[number]] = _repeated(group, known)
                continue
            error = self._refusal(group, last)
            if error is not None:
                self.unit.fail_group(number, error)
                continue
            accepted.append(number)
            if group.producer_id is not None and group.sequence is not None:
                last[group.producer_id] = group.sequence
        return accepted

    def _known(self, group: AppendGroup) -> ProducerAppend | None:
        for append in self.control.producers.get(group.producer_id or "", ()):
            if append.sequence == group.sequence:
                return append
        return None

    def _refusal(self, group: AppendGroup, last: dict[str, int]) -> ForebayError | None:
        if self.control.log_state != "OPEN":
            return _fenced(self.unit, self.control)
        if group.producer_id is None or group.sequence is None:
            return None
        expected = last.get(group.producer_id)
        if expected is None:
            appends = self.control.producers.get(group.producer_id)
            expected = appends[-1].sequence if appends else -1
        if group.sequence == expected + 1:
            return None
        return OutOfSequence(
            str(self.unit.keys), group.producer_id, expected=expected + 1, got=group.sequence
        )


def remember(
    control: Control, groups: Sequence[AppendGroup], start_offset: int, now_ms: int
) -> dict[str, list[ProducerAppend]]:
    """The bookkeeping after these groups were appended from `start_offset` on."""
    if all(group.producer_id is None for group in groups):
        return control.producers
    producers = dict(control.producers)
    for group in groups:
        end = start_offset + len(group.batch) - 1
        if group.producer_id is not None and group.sequence is not None:
            # Taken out and put in again: the order of the dictionary is the order of the last appends.
            appends = producers.pop(group.producer_id, [])
            one = ProducerAppend(group.sequence, start_offset, end, now_ms)
            producers[group.producer_id] = [*appends, one][-PRODUCER_APPENDS_KEPT:]
        start_offset = end + 1
    for silent in list(producers)[: max(0, len(producers) - PRODUCERS_MAX)]:
        del producers[silent]
    return producers


def _fenced(unit: Unit, control: Control) -> Fenced:
    return Fenced(str(unit.keys), state=control.log_state, epoch=control.epoch, writer_epoch=unit.epoch)


def _repeated(group: AppendGroup, known: ProducerAppend) -> AppendResult:
    return AppendResult(
        group.topic,
        group.partition,
        known.start_offset,
        known.end_offset,
        len(group.batch),
        duplicate=True,
    )
