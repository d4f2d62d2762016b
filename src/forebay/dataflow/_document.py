"""YAML as a tree in which every value knows its line and column, and nothing is unbounded.

PyYAML's loaders build plain objects and forget where they came from; its composer keeps the places, but
follows aliases and nesting without a limit. So the text goes through the event parser first, which stops at
the first event too deep or too many, then through the composer, and then into this tree. Aliases become
copies, and copies count: a file of a few hundred bytes that would unfold into millions of values (the
"billion laughs") ends at `VALUES_MAX`, one that contains itself at `DEPTH_MAX`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import yaml

from forebay.dataflow._problems import Problems, shown

__all__ = ["FILE_BYTES_MAX", "Value", "read_document"]

FILE_BYTES_MAX: Final = 256 * 1024
"""Longest file."""
VALUES_MAX: Final = 10_000
"""Most values in a file, aliases counted wherever they stand."""
DEPTH_MAX: Final = 32
"""Deepest nesting."""

_MERGE_TAG: Final = "tag:yaml.org,2002:merge"
_PLAIN_TAGS: Final = frozenset(
    f"tag:yaml.org,2002:{each}" for each in ("str", "int", "float", "bool", "null", "seq", "map", "timestamp")
)


@dataclass(slots=True)
class Value:
    """A scalar, a list or a mapping, and where it begins."""

    place: tuple[int, int]
    where: str
    kind: str
    """`text`, `integer`, `boolean`, `nothing`, `number`, `list` or `mapping`."""
    text: str = ""
    items: list[Value] = field(default_factory=list)
    fields: dict[str, Value] = field(default_factory=dict)
    key_places: dict[str, tuple[int, int]] = field(default_factory=dict)


class _TooMuch(Exception):
    """A bound was passed; said already."""


def read_document(data: bytes, problems: Problems) -> Value | None:
    """The tree, or None where the text is no YAML or passes a bound. What is wrong goes to `problems`."""
    if len(data) > FILE_BYTES_MAX:
        # How many more is not known: the command reads no further.
        problems.add((1, 1), "", f"the file has more than {FILE_BYTES_MAX:,} bytes", "is it the right one?")
        return None
    try:
        text = data.decode("utf-8-sig")
        _check_bounds(text, problems)
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        problems.add((line, 1), "", "the file is not UTF-8", "save it as UTF-8")
        return None
    except yaml.YAMLError as error:
        place, message = _explained(error, text)
        problems.add(place, "", f"not YAML: {message}")
        return None
    except _TooMuch:
        return None
    if node is None:
        problems.add((1, 1), "", "the file is empty", "it begins with nodes:")
        return None
    try:
        return _Builder(problems).build(node, "", 0)
    except _TooMuch:
        return None


def _explained(error: yaml.YAMLError, text: str) -> tuple[tuple[int, int], str]:
    """Where the text is wrong, and what is wrong with it."""
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        place = (1, 1) if mark is None else (mark.line + 1, mark.column + 1)
        return place, error.problem or error.context or "it cannot be read"
    if isinstance(error, yaml.reader.ReaderError):
        at = error.position
        place = (text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at))
        return place, f"the character {ord(text[at]):#04x} is not allowed"
    return (1, 1), " ".join(str(error).split())[:200]


def _check_bounds(text: str, problems: Problems) -> None:
    depth = count = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        place = (event.start_mark.line + 1, event.start_mark.column + 1)
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        count += isinstance(event, yaml.NodeEvent)
        if depth > DEPTH_MAX:
            problems.add(place, "", "nested too deeply", f"at most {DEPTH_MAX} levels")
            raise _TooMuch
        if count > VALUES_MAX:
            problems.add(place, "", "too many values", f"at most {VALUES_MAX:,}")
            raise _TooMuch


class _Builder:
    def __init__(self, problems: Problems) -> None:
        self._problems = problems
        self._count = 0

    def build(self, node: yaml.Node, where: str, depth: int) -> Value:
        place = (node.start_mark.line + 1, node.start_mark.column + 1)
        self._count += 1
        if depth > DEPTH_MAX or self._count > VALUES_MAX:
            self._problems.add(
                place,
                where,
                "aliases unfold into too much",
                f"at most {VALUES_MAX:,} values, {DEPTH_MAX} levels",
            )
            raise _TooMuch
        if node.tag not in _PLAIN_TAGS:
            self._problems.add(place, where, f"the tag {shown(node.tag)} means nothing here", "leave it out")
            return Value(place, where, "nothing")
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, Value(place, where, "mapping"), depth)
        if isinstance(node, yaml.SequenceNode):
            items = [
                self.build(each, f"{where}[{index}]", depth + 1) for index, each in enumerate(node.value)
            ]
            return Value(place, where, "list", items=items)
        return Value(place, where, _scalar_kind(node), text=str(node.value))

    def _mapping(self, node: yaml.MappingNode, value: Value, depth: int) -> Value:
        for key_node, child in node.value:
            place = (key_node.start_mark.line + 1, key_node.start_mark.column + 1)
            if not isinstance(key_node, yaml.ScalarNode):
                self._problems.add(place, value.where, "a key is a list or a mapping", "use plain names")
                continue
            if key_node.tag == _MERGE_TAG:
                self._problems.add(place, value.where, "<< is not merged here", "write the keys out")
                continue
            name = str(key_node.value)
            path = f"{value.where}.{name}" if value.where else name
            built = self.build(child, path, depth + 1)
            if name in value.fields:
                first = value.key_places[name][0]
                self._problems.add(place, path, f"the key comes twice, first in line {first}", "remove one")
                continue
            value.fields[name] = built
            value.key_places[name] = place
        return value


def _scalar_kind(node: yaml.Node) -> str:
    kind = node.tag.rpartition(":")[2]
    return {"int": "integer", "bool": "boolean", "null": "nothing", "float": "number"}.get(kind, "text")
