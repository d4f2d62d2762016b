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

from forebay.log._append import AppendGroup, AppendResult, Unit, failed
from forebay.log._errors import Fenced, OutOfSequence
from forebay.log._records import PRODUCER_APPENDS_KEPT, PRODUCERS_MAX, Control, ProducerAppend

__all__ = ["admit", "judge", "remember"]


def judge(unit: Unit, control: Control) -> list[AppendResult | None]:
    """An answer for each group that may not be appended, None for each that may. Empty: all may."""
    if unit.epoch is not None and unit.epoch < control.epoch:
        return [failed(group, _fenced(unit, control)) for group in unit.groups]
    if control.log_state == "OPEN" and not unit.idempotent:
        return []
    last: dict[str, int] = {}
    answers = [_judge_group(group, unit, control, last) for group in unit.groups]
    return answers if any(answers) else []


def admit(unit: Unit, answers: Sequence[AppendResult | None]) -> None:
    """Give these answers and go on with the groups that have none."""
    if answers:
        for place, answer in zip(unit.places, answers, strict=True):
            unit.answers[place] = answer
        unit.keep([number for number, answer in enumerate(answers) if answer is None])


def _judge_group(
    group: AppendGroup, unit: Unit, control: Control, last: dict[str, int]
) -> AppendResult | None:
    """`last` holds the sequences of those before it in the unit that may be appended."""
    for known in control.producers.get(group.producer_id or "", ()):
        if known.sequence == group.sequence and _count(known) == len(group.batch):
            return _repeated(group, known)
    if control.log_state != "OPEN":
        return failed(group, _fenced(unit, control))
    if group.producer_id is None or group.sequence is None:
        return None
    before = last.get(group.producer_id)
    if before is None:
        appends = control.producers.get(group.producer_id)
        before = appends[-1].sequence if appends else -1
    if group.sequence != before + 1:
        expected = before + 1
        error = OutOfSequence(str(unit.keys), group.producer_id, expected=expected, got=group.sequence)
        return failed(group, error)
    last[group.producer_id] = group.sequence
    return None


def _count(append: ProducerAppend) -> int:
    return append.end_offset - append.start_offset + 1


def remember(
    control: Control, groups: Sequence[AppendGroup], start_offset: int, now_ms: int
) -> dict[str, list[ProducerAppend]]:
    """The bookkeeping after these groups were appended from `start_offset` on."""
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
