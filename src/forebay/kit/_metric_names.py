"""What a metric may be called.

Names come from two worlds. Ours have dots (`buffer.flush_duration_seconds`), as OpenTelemetry likes them;
Prometheus knows only underscores and gives suffixes a meaning. Whatever passes here is fit for both, and no
two names fall together on the way. A unit of time must be the last word, because a rate or an average is read
by its unit; sizes are not forced there, since `bytes_flushed` is a name we share with other implementations.
"""

from __future__ import annotations

import re
from typing import Final, Literal, TypeAlias

from forebay.errors import UsageError

__all__ = ["Kind", "check_help", "check_labels", "check_name", "exposed", "prometheus_name"]

Kind: TypeAlias = Literal["counter", "gauge", "histogram"]

NAME_CHARS_MAX: Final = 200
"""Longest name of a metric or label."""
_NAME: Final = re.compile(r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)*")
_LABEL: Final = re.compile(r"[a-z][a-z0-9_]*")
_RESERVED_LABELS: Final = frozenset({"le", "quantile"})
_OTHER_TIME_UNITS: Final = frozenset(
    {"ns", "us", "ms", "nanoseconds", "microseconds", "milliseconds", "millis", "minutes", "hours", "days"}
)
_LAST_WORDS: Final = frozenset({"seconds", "ratio", "total"})
_HISTOGRAM_SUFFIXES: Final = ("_bucket", "_sum", "_count")


def check_name(name: str, *, counter: bool) -> None:
    """Raise `UsageError` where `name` is not fit for a metric."""
    if len(name) > NAME_CHARS_MAX or not _NAME.fullmatch(name):
        raise UsageError(
            f"{name[:NAME_CHARS_MAX]!r} is not a metric name",
            hint="use lower case letters, digits and underscores, and dots between the parts",
        )
    words = re.split(r"[._]", name)
    if wrong := _OTHER_TIME_UNITS.intersection(words):
        raise UsageError(f"metric {name!r} is in {min(wrong)}", hint="measure time in seconds")
    if words[-1] == "total":
        if not counter:
            raise UsageError(f"metric {name!r} ends in total", hint="only counters do")
        words.pop()
    if early := _LAST_WORDS.intersection(words[:-1]):
        raise UsageError(f"metric {name!r} has {min(early)!r} in the middle", hint="the unit comes last")


def check_help(name: str, help_text: str) -> None:
    """Raise `UsageError` where there is no help text."""
    if not help_text.strip():
        raise UsageError(f"metric {name!r} has no help text", hint="say in one line what it counts")


def check_labels(owner: str, labels: tuple[str, ...]) -> None:
    """Raise `UsageError` where a label name is not fit or comes twice."""
    for label in labels:
        if len(label) > NAME_CHARS_MAX or not _LABEL.fullmatch(label) or label in _RESERVED_LABELS:
            raise UsageError(
                f"{owner}: {label[:NAME_CHARS_MAX]!r} is not a label name",
                hint="use lower case letters, digits and underscores; le and quantile are reserved",
            )
    if len(set(labels)) < len(labels):
        raise UsageError(
            f"{owner}: a label comes twice in {', '.join(labels)}", hint="constant labels count as well"
        )


def prometheus_name(name: str, kind: Kind) -> str:
    """The name of the samples in the Prometheus view; of a histogram without its suffixes."""
    flat = name.replace(".", "_")
    return f"{flat.removesuffix('_total')}_total" if kind == "counter" else flat


def exposed(name: str, kind: Kind) -> list[str]:
    """Every name that the Prometheus view will use for this metric."""
    final = prometheus_name(name, kind)
    if kind == "counter":
        return [final, final.removesuffix("_total")]
    if kind == "histogram":
        return [final, *(final + suffix for suffix in _HISTOGRAM_SUFFIXES)]
    return [final]
