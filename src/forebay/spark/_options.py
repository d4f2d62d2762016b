"""Options of the source and the sinks: which there are, what they mean, and what is refused.

Names and meanings are those of Spark's Kafka connector wherever it has the same thing. An option that is not
known is refused by name, with the nearest one that is: a misspelt `failOnDataLos` must not change what a
pipeline promises. Spark hands options over with lower-cased names and text values only.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal
from urllib.parse import unquote, urlsplit

from forebay.errors import ForebayError, UsageError
from forebay.kit.limits import parse_bytes
from forebay.spark._clients import Deployment
from forebay.spark._offsets import Offsets, TopicPartition, parse_assignment, parse_positions, parse_times

__all__ = ["ENGINES", "Engine", "LogOptions", "Options", "Start", "check_range", "check_times", "is_number"]

Engine = Literal["log", "buffer", "stream", "quiver"]
ENGINES: Final[tuple[Engine, ...]] = ("log", "buffer", "stream", "quiver")

COMMON: Final = ("path", "coordinator", "engine")
SPARKS_OWN: Final = ("checkpointLocation", "queryName", "outputMode")
"""Options of Spark's that reach a sink together with ours."""
LIMITS: Final = ("maxOffsetsPerTrigger", "maxBytesPerTrigger", "minPartitions")
LOG_READ: Final = (
    "subscribe",
    "subscribePattern",
    "assign",
    "startingOffsets",
    "endingOffsets",
    "startingTimestamp",
    "endingTimestamp",
    "startingOffsetsByTimestamp",
    "endingOffsetsByTimestamp",
    "startingOffsetsByTimestampStrategy",
    "failOnDataLoss",
    *LIMITS,
)
BUFFER_READ: Final = (
    "manifest",
    "prefix",
    "acknowledge",
    "startingOffsets",
    "endingOffsets",
    "failOnDataLoss",
    *LIMITS,
)
STREAM_READ: Final = (
    "subscribe",
    "startingOffsets",
    "endingOffsets",
    "failOnDataLoss",
    "maxOffsetsPerTrigger",
    "minPartitions",
)
QUIVER_READ: Final = (
    "prefix",
    "signal",
    "startingOffsets",
    "startingTimestamp",
    "endingTimestamp",
    "failOnDataLoss",
    *LIMITS,
)
WRITE: Final[Mapping[Engine, tuple[str, ...]]] = {
    "log": ("topic", "partitions", "compression", "writeId"),
    "buffer": ("manifest", "prefix", "compression", "writeId", "onUnknown"),
}

SCHEMES: Final = ("memory", "file", "s3", "gs", "az", "sqlite", "oxia")
"""Of the URLs of stores and coordinators."""
DIGITS_MAX: Final = 18
"""Digits of a number among the options: any such fits into 64 bits."""
_IDENTIFIER: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


class Options:
    """The options of one source or sink, by their proper names."""

    def __init__(self, given: Mapping[str, str]) -> None:
        self._given = {name.lower(): value for name, value in given.items()}

    @property
    def engine(self) -> Engine:
        """Which engine: log unless said otherwise."""
        found = self.text("engine", "log").lower()
        if found not in ENGINES:
            raise UsageError(f"engine {found!r}", hint=f"one of {', '.join(ENGINES)}")
        return found

    @property
    def deployment(self) -> Deployment:
        """Where it lies. A relative directory is that of the driver."""
        path = self.text("path", "")
        if not path:
            raise UsageError(
                "the option 'path' is missing", hint='.option("path", "a directory or the URL of a store")'
            )
        coordinator = self.text("coordinator", "")
        return Deployment(
            _absolute(path, "path"), _absolute(coordinator, "coordinator") if coordinator else None
        )

    def check(self, known: tuple[str, ...]) -> None:
        """Raise for an option that this engine does not know, or where there is none at all."""
        if not self._given:
            raise UsageError(
                "no option is given",
                hint='.option("path", ...). Spark hands on no options of a table in its catalog: use '
                "`create temporary view ... using forebay options (...)`",
            )
        names = {name.lower(): name for name in (*COMMON, *SPARKS_OWN, *known)}
        for name in self._given:
            if name not in names:
                near = difflib.get_close_matches(name, names, 1)
                known_names = ", ".join(sorted(known))
                hint = f"did you mean {names[near[0]]!r}?" if near else f"known: {known_names}"
                raise UsageError(f"the engine {self.engine!r} has no option {name!r} here", hint=hint)

    def text(self, name: str, default: str) -> str:
        """An option as it is."""
        return self._given.get(name.lower(), default).strip()

    def given(self, name: str) -> str | None:
        """An option, or None."""
        value = self._given.get(name.lower())
        return None if value is None else value.strip()

    def identifier(self, name: str) -> str | None:
        """A name under which something is kept, or None."""
        value = self.given(name)
        if value is not None and _IDENTIFIER.fullmatch(value) is None:
            raise UsageError(
                f"{name} is {value[:200]!r}",
                hint="letters, digits, '.', '_', '-', up to 200, first a letter or digit",
            )
        return value

    def flag(self, name: str, default: bool) -> bool:
        """true or false."""
        value = self.text(name, str(default)).lower()
        if value not in ("true", "false"):
            raise UsageError(f"{name} is {value!r}", hint="true or false")
        return value == "true"

    def count(self, name: str) -> int | None:
        """A number from 1 on, or None."""
        value = self.given(name)
        if value is None:
            return None
        if not is_number(value) or int(value) < 1:
            raise UsageError(f"{name} is {value[:200]!r}", hint="a whole number from 1 on")
        return int(value)

    def moment(self, name: str) -> int | None:
        """Milliseconds since 1970, or None."""
        value = self.given(name)
        if value is not None and not is_number(value):
            raise UsageError(f"{name} is {value[:200]!r}", hint="milliseconds since 1970")
        return None if value is None else int(value)

    def size(self, name: str) -> int | None:
        """Bytes, such as 1000000 or 64MiB, or None."""
        value = self.given(name)
        if value is None:
            return None
        try:
            found = parse_bytes(value)
        except ForebayError as error:
            raise UsageError(f"{name} is {value[:200]!r}", hint=error.hint) from error
        if found < 1:
            raise UsageError(f"{name} is {value[:200]!r}", hint="a size from 1 byte on")
        return found


def is_number(text: str) -> bool:
    """Whether it is a whole number of 64 bits from 0 on."""
    return text.isdecimal() and len(text) <= DIGITS_MAX


def _absolute(location: str, option: str) -> str:
    """A whole path where it is a directory, as `forebay.connect` takes it."""
    if location.lower().startswith("file:///"):
        return unquote(urlsplit(location).path)
    if location.lower().startswith("memory://"):
        raise UsageError(
            f"{option} is {location[:200]!r}, which every process has for itself",
            hint="Spark reads and writes in many: a directory, or a URL that all of them reach",
        )
    if "://" in location:
        return location
    scheme, colon, _ = location.partition(":")
    if colon and scheme.lower() in SCHEMES:
        # As a whole path it would quietly be a directory of this machine.
        raise UsageError(
            f"{option} is {location[:200]!r}, neither a URL nor a plain path",
            hint=f"write {scheme}:// for the URL, or ./{scheme}: for a directory of that name",
        )
    return str(Path(os.path.expanduser(location)).absolute())  # noqa: PTH111 - as stores do


@dataclass(frozen=True, slots=True)
class Start:
    """A boundary of a read: offsets, a time, or times by partition. One of them is set."""

    offsets: Offsets | Literal["earliest", "latest"] | None = None
    time_ms: int | None = None
    times_ms: Offsets | None = None


@dataclass(frozen=True, slots=True)
class LogOptions:
    """What to read of a log."""

    deployment: Deployment
    topics: frozenset[str] | None
    """By name, or None."""
    pattern: str | None
    """By regular expression, matched against whole names."""
    assigned: tuple[TopicPartition, ...] | None
    """Some partitions only."""
    start: Start
    end: Start
    strict_times: bool
    """Whether a starting time that no record has reached is an error."""
    fail_on_data_loss: bool
    rows_max: int | None
    bytes_max: int | None
    partitions_min: int | None

    @classmethod
    def parse(cls, options: Options, *, streaming: bool) -> LogOptions:
        """Check everything that can be checked without looking at the log."""
        options.check(LOG_READ)
        topics, pattern, assigned = _selection(options)
        strategy = options.text("startingOffsetsByTimestampStrategy", "error").lower()
        if strategy not in ("error", "latest"):
            raise UsageError(f"startingOffsetsByTimestampStrategy is {strategy!r}", hint="error or latest")
        start = _boundary(options, "starting", "latest" if streaming else "earliest")
        end = _boundary(options, "ending", "latest")
        if not streaming:
            _check_batch(start, end)
        elif any(options.given(f"ending{what}") for what in ("Offsets", "Timestamp", "OffsetsByTimestamp")):
            raise UsageError("a stream has no ending offsets", hint="use trigger(availableNow=True)")
        return cls(
            options.deployment,
            topics,
            pattern,
            assigned,
            start,
            end,
            strategy == "error",
            options.flag("failOnDataLoss", True),
            options.count("maxOffsetsPerTrigger"),
            options.size("maxBytesPerTrigger"),
            options.count("minPartitions"),
        )

    def wants_topic(self, topic: str) -> bool:
        """Whether a topic is read, at least in part."""
        if self.assigned is not None:
            return any(topic == name for name, _ in self.assigned)
        if self.pattern is not None:
            return re.fullmatch(self.pattern, topic) is not None
        return self.topics is not None and topic in self.topics

    def wants(self, topic: str, partition: int) -> bool:
        """Whether a partition of a wanted topic is read."""
        return self.assigned is None or (topic, partition) in self.assigned


def _selection(
    options: Options,
) -> tuple[frozenset[str] | None, str | None, tuple[TopicPartition, ...] | None]:
    names = ("subscribe", "subscribePattern", "assign")
    given = [(name, value) for name in names if (value := options.given(name)) is not None]
    if len(given) != 1:
        raise UsageError(
            f"{len(given)} of subscribe, subscribePattern and assign are given", hint="give exactly one"
        )
    [(name, value)] = given
    if name == "assign":
        return None, None, tuple(parse_assignment(value, name))
    if name == "subscribePattern":
        try:
            re.compile(value)
        except re.error as error:
            message = f"subscribePattern is {value!r}: {error}"
            raise UsageError(message, hint="a regular expression") from error
        return None, value, None
    topics = frozenset(topic.strip() for topic in value.split(",") if topic.strip())
    if not topics:
        raise UsageError("subscribe names no topic", hint='.option("subscribe", "orders,clicks")')
    return topics, None, None


def _boundary(options: Options, word: str, default: Literal["earliest", "latest"]) -> Start:
    """Times before offsets, as in the Kafka connector."""
    time_ms = options.moment(f"{word}Timestamp")
    if time_ms is not None:
        return Start(time_ms=time_ms)
    times = options.given(f"{word}OffsetsByTimestamp")
    if times is not None:
        return Start(times_ms=parse_times(times, f"{word}OffsetsByTimestamp"))
    value = options.text(f"{word}Offsets", default)
    if value.lower() == "earliest":
        return Start("earliest")
    if value.lower() == "latest":
        return Start("latest")
    return Start(parse_positions(value, f"{word}Offsets"))


def _check_batch(start: Start, end: Start) -> None:
    if start.offsets == "latest" or (isinstance(start.offsets, dict) and -1 in start.offsets.values()):
        raise UsageError("startingOffsets of a batch is latest", hint="a batch from the latest on is empty")
    if end.offsets == "earliest" or (isinstance(end.offsets, dict) and -2 in end.offsets.values()):
        raise UsageError("endingOffsets of a batch is earliest", hint="use latest or offsets")
    check_times(start.time_ms, end.time_ms)
    for key, time_ms in (start.times_ms or {}).items():
        check_times(time_ms, (end.times_ms or {}).get(key))


def check_times(start_ms: int | None, end_ms: int | None) -> None:
    """Raise for a range of times that ends before it begins: it would quietly be empty."""
    if start_ms is not None and end_ms is not None and end_ms < start_ms:
        raise UsageError(
            f"the starting time is {start_ms}, and the ending time {end_ms}",
            hint="the ending time is not before the starting time",
        )


def check_range(start: int | None, end: int | None) -> None:
    """Raise for a range of offsets that ends before it begins: it would quietly be empty."""
    if start is not None and end is not None and end < start:
        raise UsageError(
            f"startingOffsets is {start}, and endingOffsets {end}",
            hint="endingOffsets are not below startingOffsets",
        )
