"""Typed reading of a mapping, where every mistake becomes a problem with its place and a default goes on.

A reader asks for each key it knows, by kind; `finish` then reports the keys nobody asked for. A key with dots
(`retention.size_cap: 1GB`) means the same as the nested mapping.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from typing import Final

from forebay.dataflow._document import Value
from forebay.dataflow._problems import Problems, shown
from forebay.errors import UsageError
from forebay.kit.limits import parse_bytes, parse_duration_ms

__all__ = ["Section", "nearest"]

TEXT_CHARS_MAX: Final = 4_096
"""Longest text of a setting."""
_NO_TEXT: Final = re.compile("[\0\ud800-\udfff]")
"""What no file, host or header has in its name; YAML can write the half of a pair of UTF-16 as `\\ud800`."""
_INTEGER: Final = re.compile(r"[0-9]{1,18}", re.ASCII)


def nearest(name: str, known: Sequence[str]) -> str:
    """A hint that names what was probably meant, or else all there is."""
    close = difflib.get_close_matches(name[:100], known, n=1)
    return f"did you mean {close[0]}?" if close else f"one of {', '.join(known)}"


class Section:
    """A mapping of the file."""

    def __init__(self, value: Value, problems: Problems) -> None:
        self.value = value
        self.problems = problems
        self._asked: list[str] = []
        self._fields = dict(value.fields)
        self.is_mapping = value.kind in ("mapping", "nothing")
        """Whether it can have keys. Where it cannot, that is the mistake, and not each key it lacks."""
        if not self.is_mapping:
            self._add(value, f"{value.kind} where a mapping of settings belongs", "indent its keys below it")

    @property
    def where(self) -> str:
        """The path of keys to it."""
        return self.value.where

    def place(self, name: str = "") -> tuple[int, int]:
        """Where a key stands, or the section where it does not."""
        return self.value.key_places.get(name) or self.value.place

    def complain(self, name: str, message: str, hint: str = "") -> None:
        """Something is wrong with the key."""
        where = ".".join(each for each in (self.where, name) if each)
        self.problems.add(self.place(name), where, message, hint)

    def remark(self, name: str, message: str, hint: str = "") -> None:
        """Something about the key may not be what was meant."""
        self.problems.remark(self.place(name), f"{self.where}.{name}", message, hint)

    def has(self, name: str) -> bool:
        """Whether the key is there with a value."""
        return name in self._fields and self._fields[name].kind != "nothing"

    def take(self, name: str) -> Value | None:
        """The value as it stands."""
        self._asked.append(name)
        value = self._fields.get(name)
        return None if value is None or value.kind == "nothing" else value

    def text(self, name: str, default: str | None = None) -> str:
        """A text; without a default it must be there."""
        value = self._scalar(name)
        if value is None:
            if default is None and not self.has(name) and self.is_mapping:
                self.complain("", f"the key {name} is missing", "add it")
            return default or ""
        if not value.text or len(value.text) > TEXT_CHARS_MAX or _NO_TEXT.search(value.text):
            self._add(
                value,
                "empty, too long, or with a zero byte or half a letter in it",
                f"1 to {TEXT_CHARS_MAX:,} letters",
            )
            return default or ""
        return value.text

    def choice(self, name: str, known: Sequence[str], default: str) -> str:
        """One of several words."""
        value = self._scalar(name)
        if value is None:
            return default
        if value.text not in known:
            self._add(value, f"{shown(value.text)} is not known", nearest(value.text, known))
            return default
        return value.text

    def integer(self, name: str, default: int, low: int, high: int) -> int:
        """A whole number from `low` to `high`."""
        value = self._scalar(name)
        if value is None:
            return default
        if value.kind != "integer" or not _INTEGER.fullmatch(value.text):
            self._add(value, f"{shown(value.text)} is not a whole number", f"{low:,} to {high:,}")
            return default
        return self._bounded(value, int(value.text), default, low, high)

    def bytes(self, name: str, default: int, low: int, high: int) -> int:
        """A size like `32MB` or `1GiB`."""
        return self._quantity(name, default, low, high, parse_bytes)

    def duration_ms(self, name: str, default: int, low: int, high: int) -> int:
        """A duration like `25ms` or `10s`, in milliseconds."""
        return self._quantity(name, default, low, high, parse_duration_ms)

    def boolean(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self._scalar(name)
        if value is None:
            return default
        if value.kind != "boolean":
            self._add(value, f"{shown(value.text)} is neither true nor false", "write true or false")
            return default
        return value.text.lower() in ("true", "yes", "on")

    def section(self, name: str) -> Section:
        """A mapping inside; empty where it is not there."""
        value = self.take(name) or Value(self.place(name), f"{self.where}.{name}", "mapping")
        prefix = f"{name}."
        inner = Value(value.place, value.where, value.kind, value.text, value.items, dict(value.fields))
        inner.key_places = dict(value.key_places)
        for key in [each for each in self._fields if each.startswith(prefix)]:
            self._asked.append(key)
            rest = key.removeprefix(prefix)
            if rest in inner.fields:
                self.complain(key, "the key comes twice, with dots and nested", "remove one")
                continue
            inner.fields[rest] = self._fields[key]
            inner.key_places[rest] = self.place(key)
        return Section(inner, self.problems)

    def finish(self) -> None:
        """Report the keys that nobody asked for."""
        known = list(dict.fromkeys(each for each in self._asked if "." not in each))
        for name in self.value.fields:
            if name not in self._asked:
                hint = nearest(name, known) if known else "it takes no settings"
                self.complain(name, "unknown key", hint)

    def _quantity(self, name: str, default: int, low: int, high: int, parse: Callable[[str], int]) -> int:
        value = self._scalar(name)
        if value is None:
            return default
        try:
            number = parse(value.text)
        except UsageError as error:
            self._add(value, error.message, error.hint)
            return default
        return self._bounded(value, number, default, low, high)

    def _scalar(self, name: str) -> Value | None:
        value = self.take(name)
        if value is not None and value.kind in ("list", "mapping"):
            self._add(value, f"a {value.kind} where a single value belongs", "write one value")
            return None
        return value

    def _bounded(self, value: Value, number: int, default: int, low: int, high: int) -> int:
        if not low <= number <= high:
            self._add(value, f"{shown(value.text)} is out of range", f"{low:,} to {high:,}")
            return default
        return number

    def _add(self, value: Value, message: str, hint: str = "") -> None:
        self.problems.add(value.place, value.where, message, hint)
