"""The file as a plan: nodes with their settings, and who hands data to whom.

    receivers  ->  persistence  ->  exporters        the usual shape
    receivers  ->  exporters                          without a disk: answered when the destination has it

What is checked here besides single settings: names, kinds and URNs that fit together; ports that lead to
nodes that take data; a way to and from every node; no circles, not even over an address of this machine; no
address and no directory used twice.
Everything is reported, not only the first.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

from forebay.dataflow._document import Value, read_document
from forebay.dataflow._problems import DataflowInvalid, Problem, Problems, shown
from forebay.dataflow._section import Section, nearest
from forebay.dataflow._settings import (
    OtapExporterSettings,
    OtapReceiverSettings,
    OtlpExporterSettings,
    OtlpReceiverSettings,
    ParquetSettings,
    PersistenceSettings,
)

__all__ = ["Node", "Plan", "check", "load"]

Settings: TypeAlias = (
    OtlpReceiverSettings
    | OtapReceiverSettings
    | PersistenceSettings
    | OtlpExporterSettings
    | OtapExporterSettings
    | ParquetSettings
)

KINDS: Final = ("receiver", "processor", "exporter")
STRATEGIES: Final = ("broadcast", "round_robin")
_EVERYWHERE: Final = "address 0.0.0.0"
OUT_PORT: Final = "out_port"
NODES_MAX: Final = 64
"""Most nodes of a file."""
_NAME: Final = re.compile(r"[A-Za-z0-9_\-]{1,48}", re.ASCII)

_PLUGINS: Final[dict[str, tuple[str, Callable[[Section], Settings]]]] = {
    "urn:otel:otlp:receiver": ("receiver", OtlpReceiverSettings.read),
    "urn:otel:otap:receiver": ("receiver", OtapReceiverSettings.read),
    "urn:otap:processor:persistence": ("processor", PersistenceSettings.read),
    "urn:otel:otlp:exporter": ("exporter", OtlpExporterSettings.read),
    "urn:otel:otap:exporter": ("exporter", OtapExporterSettings.read),
    "urn:otel:parquet:exporter": ("exporter", ParquetSettings.read),
}


@dataclass(frozen=True, slots=True)
class Node:
    """One node."""

    name: str
    kind: str
    """`receiver`, `processor` or `exporter`."""
    settings: Settings
    destinations: tuple[str, ...]
    strategy: str
    """`broadcast`: every destination gets everything. `round_robin`: they take turns."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A file in which nothing is wrong."""

    nodes: dict[str, Node]
    """By name, receivers first, then in the order of the flow."""
    remarks: tuple[Problem, ...]
    """What may not be meant that way."""


@dataclass(slots=True)
class _Draft:
    section: Section
    kind: str = ""
    settings: Settings | None = None
    destinations: tuple[str, ...] = ()
    places: tuple[tuple[int, int], ...] = ()
    strategy: str = "broadcast"
    strategy_place: tuple[int, int] = (1, 1)


def load(data: bytes) -> Plan:
    """The plan. Raises `DataflowInvalid` with everything that is wrong."""
    problems = Problems()
    drafts = _read(data, problems)
    if problems.found:
        raise DataflowInvalid(problems.found)
    nodes = {}
    for name in _order(drafts):
        draft = drafts[name]
        assert draft.settings is not None
        nodes[name] = Node(name, draft.kind, draft.settings, draft.destinations, draft.strategy)
    return Plan(nodes, tuple(sorted(problems.remarks)))


def check(data: bytes) -> tuple[list[Problem], list[Problem]]:
    """What is wrong with a file, and what may not be meant that way."""
    problems = Problems()
    _read(data, problems)
    return sorted(problems.found), sorted(problems.remarks)


def _read(data: bytes, problems: Problems) -> dict[str, _Draft]:
    document = read_document(data, problems)
    if document is None:
        return {}
    top = Section(document, problems)
    nodes = top.take("nodes")
    top.finish()
    if nodes is None or nodes.kind != "mapping" or not nodes.fields:
        if document.kind in ("mapping", "nothing"):
            top.complain("nodes" if nodes else "", "there are no nodes", "a mapping from names to nodes")
        return {}
    if len(nodes.fields) > NODES_MAX:
        problems.add(nodes.place, "nodes", f"{len(nodes.fields)} nodes", f"at most {NODES_MAX}")
        return {}
    drafts = {name: _node(name, value, nodes, problems) for name, value in nodes.fields.items()}
    _check_ports(drafts)
    _check_ways(drafts)
    _check_circles(drafts)
    _check_targets(drafts)
    _check_sharing(drafts)
    _check_room(drafts)
    return drafts


def _node(name: str, value: Value, nodes: Value, problems: Problems) -> _Draft:
    # A mistake that concerns the whole node is reported where its name stands.
    section = Section(
        Value(
            nodes.key_places[name],
            value.where,
            value.kind,
            value.text,
            value.items,
            value.fields,
            value.key_places,
        ),
        problems,
    )
    if not _NAME.fullmatch(name):
        section.complain("", "not a name for a node", "1 to 48 of A-Z a-z 0-9 _ -")
    draft = _Draft(section)
    draft.kind = section.choice("kind", KINDS, "")
    if not section.has("kind") and section.is_mapping:
        section.complain("", "the key kind is missing", f"one of {', '.join(KINDS)}")
    urn = section.text("plugin_urn")
    plugin = _PLUGINS.get(urn)
    config = section.section("config")
    if plugin is not None:
        expected, read = plugin
        if draft.kind and draft.kind != expected:
            section.complain("kind", f"{urn} is of kind {expected}", f"write {expected}")
        draft.kind = expected
        draft.settings = read(config)
        config.finish()
    elif urn:
        section.complain("plugin_urn", f"{shown(urn)} is no plugin", nearest(urn, list(_PLUGINS)))
    _out_ports(draft)
    section.finish()
    return draft


def _out_ports(draft: _Draft) -> None:
    section = draft.section
    if not section.has("out_ports"):
        section.take("out_ports")
        if draft.kind in ("receiver", "processor"):
            section.complain("", f"a {draft.kind} without out_ports leads nowhere", "name its destinations")
        return
    if draft.kind == "exporter":
        section.take("out_ports")
        section.complain("out_ports", "an exporter has no ports", "remove them")
        return
    ports = section.section("out_ports")
    port = ports.section(OUT_PORT)
    ports.finish()
    if not ports.has(OUT_PORT):
        ports.complain("", f"the port {OUT_PORT} is missing", "add it")
        return
    draft.strategy = port.choice("dispatch_strategy", STRATEGIES, "broadcast")
    draft.strategy_place = port.place("dispatch_strategy")
    found = port.take("destinations")
    port.finish()
    if found is None or found.kind != "list" or not found.items:
        port.complain(
            "destinations" if found else "", "the port leads nowhere", "destinations: a list of nodes"
        )
        return
    names = []
    for each in found.items:
        if each.kind in ("list", "mapping", "nothing"):
            port.problems.add(each.place, each.where, "this is not the name of a node", "write one name")
        else:
            names.append(each)
    draft.destinations = tuple(each.text for each in names)
    draft.places = tuple(each.place for each in names)


def _check_ports(drafts: dict[str, _Draft]) -> None:
    for draft in drafts.values():
        problems, where = draft.section.problems, f"{draft.section.where}.out_ports.{OUT_PORT}"
        for index, (name, place) in enumerate(zip(draft.destinations, draft.places, strict=True)):
            if name not in drafts:
                problems.add(place, where, f"there is no node {shown(name)}", nearest(name, list(drafts)))
            elif drafts[name].kind == "receiver":
                problems.add(place, where, f"{name} is a receiver and takes nothing in", "name another node")
            elif name in draft.destinations[:index]:
                problems.add(place, where, f"the destination {name} comes twice", "remove one")
            elif draft.kind == "receiver" and isinstance(drafts[name].settings, ParquetSettings):
                problems.remark(
                    place,
                    where,
                    "without a persistence node before it, every request becomes a file",
                    "put one between, unless requests are few and large",
                )
        if draft.strategy == "round_robin" and draft.kind == "processor" and len(draft.destinations) > 1:
            problems.remark(
                draft.strategy_place,
                where,
                "with round_robin each segment goes to one of the destinations",
                "write broadcast if each of them should get everything",
            )


def _check_ways(drafts: dict[str, _Draft]) -> None:
    fed = {name for draft in drafts.values() for name in draft.destinations}
    for name, draft in drafts.items():
        if draft.kind in ("processor", "exporter") and name not in fed:
            draft.section.complain("", "no port leads to this node", "name it as a destination, or remove it")
    if not any(draft.kind in ("receiver", "") for draft in drafts.values()):
        next(iter(drafts.values())).section.complain("", "there is no receiver", "add one")


def _check_circles(drafts: dict[str, _Draft]) -> None:
    # A port into a receiver is a problem of its own.
    left = {name for name, draft in drafts.items() if draft.kind != "receiver"}
    while True:
        # Whoever leads only to nodes that are done is done; what remains at the end leads in circles.
        done = {name for name in left if not any(each in left for each in drafts[name].destinations)}
        if not done:
            break
        left -= done
    if not left:
        return
    path = [min(left)]
    while path.count(path[-1]) < 2:
        path.append(next(each for each in drafts[path[-1]].destinations if each in left))
    circle = path[path.index(path[-1]) :]
    drafts[circle[0]].section.complain(
        "out_ports",
        f"the data would go in a circle: {' -> '.join(circle)}",
        "remove one of these destinations",
    )


def _check_targets(drafts: dict[str, _Draft]) -> None:
    """An exporter that sends to a receiver of the same file: a circle, or the wrong protocol."""
    doors = _doors(drafts)
    hops: dict[str, str] = {}
    for name, draft in drafts.items():
        if not isinstance(draft.settings, OtlpExporterSettings):
            continue
        speaks = "otap" if isinstance(draft.settings, OtapExporterSettings) else "otlp"
        receiver, takes = doors.get(_reachable(draft.settings.target), ("", ""))
        # Those before may be a part of the way back; one that closes a circle is the only one to say so.
        if takes == speaks and name in _behind(receiver, drafts, hops):
            draft.section.section("config").complain(
                "grpc_endpoint",
                f"this is {receiver}, and the data would go in a circle",
                "name another server",
            )
        elif takes == speaks:
            hops[name] = receiver
        elif receiver:
            draft.section.section("config").remark(
                "grpc_endpoint",
                f"this is {receiver}, which does not take {speaks.upper()} over gRPC there",
                "name a server that does",
            )


def _doors(drafts: dict[str, _Draft]) -> dict[str, tuple[str, str]]:
    """Who takes what on which address."""
    doors = {}
    for name, draft in drafts.items():
        settings = draft.settings
        if isinstance(settings, OtapReceiverSettings):
            doors[_reachable(str(settings.address))] = (name, "otap")
        elif isinstance(settings, OtlpReceiverSettings):
            for address, takes in ((settings.http, "http"), (settings.grpc, "otlp")):
                if address is not None:
                    doors[_reachable(str(address))] = (name, takes)
    return doors


def _reachable(address: str) -> str:
    """The address, with one name for all that mean this machine."""
    host, _, port = address.rpartition(":")
    is_here = host.startswith("127.") or host in ("localhost", "0.0.0.0", "[::]", "[::1]")
    return f"localhost:{port}" if is_here else address


def _behind(name: str, drafts: dict[str, _Draft], hops: dict[str, str]) -> set[str]:
    """All nodes that data of this one reaches. `hops`: exporters that send to a receiver of the file."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        giver = waiting.pop()
        ahead = {*drafts[giver].destinations, hops.get(giver, "")} & drafts.keys() - found
        found |= ahead
        waiting += ahead
    return found


def _check_sharing(drafts: dict[str, _Draft]) -> None:
    seen: dict[str, str] = {}
    for name, draft in drafts.items():
        settings = draft.settings
        uses: list[tuple[str, str]] = []
        if isinstance(settings, OtlpReceiverSettings):
            uses = [
                (key, f"address {address}")
                for key, address in (
                    ("listening_addr", settings.grpc),
                    ("http_listening_addr", settings.http),
                )
                if address is not None and address.port
            ]
        elif isinstance(settings, OtapReceiverSettings) and settings.address.port:
            uses = [("listening_addr", f"address {settings.address}")]
        elif isinstance(settings, PersistenceSettings | ParquetSettings) and settings.path.parts:
            # Two Parquet exporters behind one store would write the same files at the same time.
            uses = [("path", f"directory {os.path.realpath(settings.path)}")]
        for key, what in uses:
            taken = next((each for each in seen if _overlap(each, what)), None)
            if taken is not None:
                config = draft.section.section("config")
                config.complain(key, f"the {taken} is used by {seen[taken]} already", "use one of its own")
            seen.setdefault(what, name)


def _overlap(one: str, other: str) -> bool:
    """Whether both mean the same directory or address; `0.0.0.0` is every address that has no colon in it."""
    if one == other or not (one.startswith("address ") and other.startswith("address ")):
        return one == other
    (host, _, port), (other_host, _, other_port) = one.rpartition(":"), other.rpartition(":")
    hosts = (host, other_host)
    return port == other_port and _EVERYWHERE in hosts and not any("[" in each for each in hosts)


def _check_room(drafts: dict[str, _Draft]) -> None:
    """A request larger than a segment makes a segment of its own, and the store has to hold that, too."""
    for name, draft in drafts.items():
        if not isinstance(draft.settings, OtlpReceiverSettings | OtapReceiverSettings):
            continue
        largest = draft.settings.request_bytes_max
        for store in draft.destinations:
            settings = drafts[store].settings if store in drafts else None
            if not isinstance(settings, PersistenceSettings):
                continue
            need = settings.quiver.wal_bytes_max + 2 * largest
            if settings.quiver.size_cap_bytes < need:
                drafts[store].section.section("config").section("retention").remark(
                    "size_cap",
                    f"the largest requests of {name}, {largest:,} bytes, may never fit",
                    f"at least wal.max_size + 2 x max_request_size = {need:,}, or a smaller max_request_size",
                )


def _order(drafts: dict[str, _Draft]) -> list[str]:
    """Receivers first, everybody before its destinations."""
    order: list[str] = []
    while len(order) < len(drafts):
        order += [
            name
            for name in drafts
            if name not in order
            and all(giver in order for giver in drafts if name in drafts[giver].destinations)
        ]
    return order
