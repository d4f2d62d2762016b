"""Positions as Spark keeps them, and how a limit is shared.

Spark compares offsets as JSON text: the same positions in another order would count as new data for ever.
So every dictionary leaves through `as_offset`, which sorts, and holds plain integers under string keys:

    {"clicks": {"0": 17, "1": 4}, "orders": {"0": 133}}

The number is the next offset to be read. A partition that is not in the dictionary has not been seen: it is
entered with its earliest offset first and read from there in the next batch, so that what a batch holds
follows from its two dictionaries alone, whatever is trimmed or created in between.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final, TypeAlias

from forebay.errors import UsageError
from forebay.spark._errors import own_position

__all__ = [
    "EARLIEST",
    "LATEST",
    "Offsets",
    "TopicPartition",
    "as_offset",
    "from_offset",
    "parse_assignment",
    "parse_positions",
    "parse_times",
    "share",
]

TopicPartition: TypeAlias = tuple[str, int]
Offsets: TypeAlias = dict[TopicPartition, int]

EARLIEST, LATEST = -2, -1
POSITIONS: Final = '{"topic": {"0": 23, "1": -2}}'
TIMES: Final = '{"topic": {"0": 1767225600000}}, milliseconds since 1970'
ASSIGNMENT: Final = '{"topic": [0, 1]}'
PARTITION_DIGITS_MAX: Final = 9
"""Digits of a partition's number: more than any has, and few enough to be read as a number at all."""


def as_offset(offsets: Mapping[TopicPartition, int]) -> dict[str, dict[str, int]]:
    """The dictionary that Spark gets. The only way out."""
    found: dict[str, dict[str, int]] = {}
    for (topic, partition), offset in sorted(offsets.items(), key=lambda item: (item[0][0], str(item[0][1]))):
        found.setdefault(topic, {})[str(partition)] = int(offset)
    return found


def from_offset(offset: Mapping[str, Mapping[str, int]]) -> Offsets:
    """What `as_offset` was given."""
    with own_position("log"):
        return {
            (topic, int(partition)): int(position)
            for topic, partitions in offset.items()
            for partition, position in partitions.items()
        }


def parse_positions(text: str, option: str) -> Offsets:
    """Positions given as an option: `{"topic": {"0": 23, "1": -2}}`; -2 is the earliest, -1 the latest."""
    return dict(_positions(_json(text, option, POSITIONS), text, option))


def parse_times(text: str, option: str) -> Offsets:
    """Times given as an option: milliseconds since 1970. None of them stands for the earliest or latest."""
    found = parse_positions(text, option)
    if any(time_ms < 0 for time_ms in found.values()):
        raise _refused(option, text, TIMES)
    return found


def parse_assignment(text: str, option: str) -> list[TopicPartition]:
    """Partitions given as an option: `{"topic": [0, 1]}`."""
    found: set[TopicPartition] = set()
    for topic, numbers in _json(text, option, ASSIGNMENT).items():
        # A text would be gone through letter by letter, a truth be a number, a fraction be cut.
        if not isinstance(numbers, list) or any(type(number) is not int or number < 0 for number in numbers):
            raise _refused(option, text, ASSIGNMENT)
        found.update((topic, number) for number in numbers)
    if not found:
        raise _refused(option, text, ASSIGNMENT)
    return sorted(found)


def _json(text: str, option: str, example: str) -> Mapping[str, Any]:
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _refused(option, text, example) from error
    if not isinstance(parsed, dict):
        raise _refused(option, text, example)
    return parsed


def _positions(parsed: Mapping[str, Any], text: str, option: str) -> Iterator[tuple[TopicPartition, int]]:
    for topic, partitions in parsed.items():
        if not isinstance(partitions, dict):
            raise _refused(option, text, POSITIONS)
        for partition, position in partitions.items():
            is_partition = partition.isdecimal() and len(partition) <= PARTITION_DIGITS_MAX
            if not is_partition or type(position) is not int or position < EARLIEST:
                raise _refused(option, text, POSITIONS)
            yield (topic, int(partition)), position


def _refused(option: str, text: str, example: str) -> UsageError:
    return UsageError(f"{option} is {text[:200]!r}", hint=f"for example {example}")


def share(start: Offsets, latest: Offsets, rows_max: int) -> Offsets:
    """Spread a limit evenly; what a short partition leaves over goes to the longer ones."""
    backlog = {key: max(0, latest[key] - start.get(key, latest[key])) for key in latest}
    end, left = dict(latest), rows_max
    for done, key in enumerate(sorted(backlog, key=lambda key: (backlog[key], key))):
        taken = min(backlog[key], -(-left // (len(backlog) - done)))
        end[key] = latest[key] - backlog[key] + taken
        left -= taken
    return end
