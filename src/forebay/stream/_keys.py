"""Where the objects of a stream are, and which stream an object belongs to.

    rabbitmq/stream/<id>/data/<offset, 20 digits>.fragment
    rabbitmq/stream/<id>/metadata/root.<uid>.manifest
    rabbitmq/stream/<id>/metadata/<offset, 20 digits>.<uid>.group | .kgroup | .mgroup
    rabbitmq/stream/<id>/metadata/current
    rabbitmq/stream/<id>/metadata/<offset, 20 digits>.filters

The first three are the plugin's layout. The others are ours. `current` says which root is the current one, so
that a stream can be read and restored from the bucket alone. `filters` stand beside the fragment of the same
offset, if its chunks have any.

Every prefix ends with a slash: one stream id may be the beginning of another.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from forebay.errors import UsageError
from forebay.formats.stream_manifest import GROUP, KILO_GROUP, MEGA_GROUP, uid_text

__all__ = [
    "BASE",
    "ObjectName",
    "StreamKeys",
    "as_stream_id",
    "names_of",
    "short_name",
    "stream_of",
    "stream_of_directory",
]

BASE: Final = "rabbitmq/stream/"
STREAM_ID_BYTES_MAX: Final = 255
"""Longest stream id: that of a directory's name, which a broker gives it."""
_STREAM_ID: Final = re.compile(r"[A-Za-z0-9_\-=]+", re.ASCII)
_SUFFIXES: Final = {GROUP: "group", KILO_GROUP: "kgroup", MEGA_GROUP: "mgroup"}
_KINDS: Final = {suffix: kind for kind, suffix in _SUFFIXES.items()}
_FRAGMENT: Final = re.compile(r"data/([0-9]{20})\.fragment", re.ASCII)
_FILTERS: Final = re.compile(r"metadata/([0-9]{20})\.filters", re.ASCII)
_ROOT: Final = re.compile(r"metadata/root\.([0-9a-f]{12})\.manifest", re.ASCII)
_GROUP: Final = re.compile(r"metadata/([0-9]{20})\.([0-9a-f]{12})\.(group|kgroup|mgroup)", re.ASCII)
_INCARNATION: Final = re.compile(r"(.+)_[0-9]{10,25}", re.ASCII)
_NOT_IN_IDS: Final = re.compile(r"[^A-Za-z0-9_\-=]")


@dataclass(frozen=True, slots=True)
class ObjectName:
    """What a key says of its object."""

    what: str
    """`fragment`, `filters`, `root`, `group` or `current`."""
    offset: int = 0
    uid: int = 0
    kind: int = 0
    """Of a group: 1 to 3."""


class StreamKeys:
    """The keys of one stream."""

    def __init__(self, stream: str) -> None:
        if len(stream) > STREAM_ID_BYTES_MAX or not _STREAM_ID.fullmatch(stream):
            raise UsageError(
                f"{stream[:STREAM_ID_BYTES_MAX]!r} is no stream id",
                hint="1 to 255 letters, digits, '_', '-' and '='",
            )
        self.stream = stream
        self.prefix = f"{BASE}{stream}/"
        self.current = f"{self.prefix}metadata/current"

    def fragment(self, offset: int) -> str:
        """The fragment that begins at `offset`."""
        return f"{self.prefix}data/{offset:020d}.fragment"

    def filters(self, offset: int) -> str:
        """The filters of the fragment that begins at `offset`."""
        return f"{self.prefix}metadata/{offset:020d}.filters"

    def root(self, uid: int) -> str:
        """A manifest root."""
        return f"{self.prefix}metadata/root.{uid_text(uid)}.manifest"

    def group(self, kind: int, offset: int, uid: int) -> str:
        """A group of `kind` whose first child begins at `offset`."""
        return f"{self.prefix}metadata/{offset:020d}.{uid_text(uid)}.{_SUFFIXES[kind]}"

    def parse(self, key: str) -> ObjectName | None:
        """What `key` names, or None where it is not of a form we know."""
        if key == self.current:
            return ObjectName("current")
        rest = key.removeprefix(self.prefix)
        if rest == key:
            return None
        if match := _FRAGMENT.fullmatch(rest):
            return ObjectName("fragment", offset=int(match[1]))
        if match := _FILTERS.fullmatch(rest):
            return ObjectName("filters", offset=int(match[1]))
        if match := _ROOT.fullmatch(rest):
            return ObjectName("root", uid=int(match[1], 16))
        if match := _GROUP.fullmatch(rest):
            return ObjectName("group", int(match[1]), int(match[2], 16), _KINDS[match[3]])
        return None


def stream_of(key: str) -> str | None:
    """The stream a key belongs to."""
    rest = key.removeprefix(BASE)
    name, slash, _ = rest.partition("/")
    return name if rest != key and slash else None


def as_stream_id(name: str) -> str:
    """A name as a broker writes it into an id: what may not be in one becomes an underscore."""
    return _NOT_IN_IDS.sub("_", name)


def stream_of_directory(path: Path) -> str:
    """The id of the stream whose files are in a directory, `.` included: the directory's name."""
    # Not resolved: a link to a directory is known by its own name.
    return as_stream_id(path.name if path.name not in ("", "..") else path.resolve().name)


def short_name(stream: str) -> str:
    """The name of the stream inside its id: `__vary_1794776874866716458` gives `vary`.

    The virtual host comes first: the default one is an underscore, and any other is taken to have none behind
    its first character.
    """
    match = _INCARNATION.fullmatch(stream)
    return (match[1].removeprefix("_").partition("_")[2] or match[1]) if match else stream


def names_of(stream: str) -> set[str]:
    """What people may call a stream: its id, its id without the time of its creation, its plain name."""
    match = _INCARNATION.fullmatch(stream)
    return {stream, short_name(stream)} | ({match[1]} if match else set())
