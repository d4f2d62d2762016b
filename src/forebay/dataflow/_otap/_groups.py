"""Resources and scopes of a batch: columns of its first table, groups in OTLP.

A batch may become several requests, because whoever gets them takes four megabytes and a batch of Arrow may
hold more. What resources and scopes have in attributes is stored once in a batch and once per group in OTLP,
so the copies are counted before they are made.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pyarrow as pa

from forebay.dataflow._otap._cbor import Reader
from forebay.dataflow._otap._table import NO_ID, Table
from forebay.dataflow._otap._values import attach
from forebay.dataflow._signals import SIGNALS
from forebay.errors import LimitExceeded

__all__ = ["Groups"]

REQUEST_BYTES: Final = 2 * 1024 * 1024
"""About how large a request becomes that is made from a part of a batch."""
_U16: Final = pa.uint16()
_U32: Final = pa.uint32()
_TEXT: Final = pa.string()
_FIELDS: Final = {
    "traces": ("resource_spans", "scope_spans"),
    "logs": ("resource_logs", "scope_logs"),
    "metrics": ("resource_metrics", "scope_metrics"),
}


class Groups:
    """The requests that a batch becomes, with the groups in them."""

    def __init__(self, signal: str, root: Table, size: int) -> None:
        self.requests: list[Any] = []
        """Filled by `scopes`."""
        self._signal = signal
        self._root = root
        self._rows_per_request = max(1, root.rows * REQUEST_BYTES // max(size, REQUEST_BYTES))
        self._resources: dict[int, list[Any]] = {}
        self._scopes: dict[int, list[Any]] = {}

    def scopes(self) -> Iterator[Any]:
        """For each row of the table, the group that its item goes into."""
        root, per_request = self._root, self._rows_per_request
        resource_field, scope_field = _FIELDS[self._signal]
        found: dict[tuple[Any, ...], Any] = {}
        resource_keys = zip(
            root.ids("resource.id", _U16),
            root.values("resource.schema_url", _TEXT, ""),
            root.values("resource.dropped_attributes_count", _U32, 0),
            strict=True,
        )
        scope_keys = zip(
            root.ids("scope.id", _U16),
            root.values("scope.name", _TEXT, ""),
            root.values("scope.version", _TEXT, ""),
            root.values("scope.dropped_attributes_count", _U32, 0),
            root.values("schema_url", _TEXT, ""),
            strict=True,
        )
        for row, keys in enumerate(zip(resource_keys, scope_keys, strict=True)):
            if row % per_request == 0:
                self.requests.append(SIGNALS[self._signal].request())
                found.clear()
            group = found.get(keys)
            if group is None:
                resource_key, scope_key = keys
                outer = found.get(resource_key)
                if outer is None:
                    outer = found[resource_key] = self._add_resource(resource_field, resource_key)
                group = found[keys] = self._add_scope(getattr(outer, scope_field), scope_key)
            yield group

    def finish(
        self, resource_attrs: Table | None, scope_attrs: Table | None, reader: Reader, most: int
    ) -> None:
        """Give resources and scopes their attributes, up to `most` bytes of copies."""
        for table, owners in ((resource_attrs, self._resources), (scope_attrs, self._scopes)):
            attach(table, {key: each[0] for key, each in owners.items()}, reader, _U16)
            copies = [(each[0], other) for each in owners.values() for other in each[1:]]
            size = sum(first.ByteSize() for first, _ in copies)
            if size > most:
                raise LimitExceeded("max_request_size", limit=most, actual=size, hint="send smaller batches")
            for first, other in copies:
                other.attributes.extend(first.attributes)

    def _add_resource(self, field: str, key: tuple[Any, ...]) -> Any:
        ident, schema_url, dropped = key
        outer = getattr(self.requests[-1], field).add(schema_url=schema_url)
        outer.resource.dropped_attributes_count = dropped
        if ident != NO_ID:
            self._resources.setdefault(ident, []).append(outer.resource)
        return outer

    def _add_scope(self, groups: Any, key: tuple[Any, ...]) -> Any:
        ident, name, version, dropped, schema_url = key
        group = groups.add(schema_url=schema_url)
        scope = group.scope
        scope.name, scope.version, scope.dropped_attributes_count = name, version, dropped
        if ident != NO_ID:
            self._scopes.setdefault(ident, []).append(scope)
        return group
