"""Iceberg tables through pyiceberg: files are added by one snapshot, the numbers are table properties.

Both are updates of one transaction, so they are in or out together. The snapshot carries the numbers as well,
for people; it may expire, a property does not. A transaction demands that the branch still points to the
snapshot it was planned on. pyiceberg would repeat a refused commit on the newer snapshot by itself, which is
right for an append that knows nothing of positions and wrong here: `commit.retry.num-retries` is set to 0 on
the table, and checked at every commit.

    property = forebay.<name of the export>.<lane>      a dot or percent sign of the name as %2E, %25

A catalog that does not answer may have taken a commit: that is unknown, and settled by the properties when it
answers again.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, unquote, urlsplit

import pyarrow as pa

from forebay.errors import FormatError, Unavailable, Unsupported, UsageError
from forebay.spark.export._errors import CommitConflict, CommitUnknown
from forebay.spark.export._tables import Commit, Handle, Table
from forebay.spark.export._types import table_schema

__all__ = ["IcebergTable"]

RETRIES: Final = "commit.retry.num-retries"
DATA: Final = "data"
"""Directory of the files below the table's own."""
NO_FLOATS: Final = "a number that Iceberg keeps rounded: no reader would find its rows"
MESSAGE_CHARS_MAX: Final = 500
"""Longest message of pyiceberg that is passed on."""


class IcebergTable(Table):
    """A table of a catalog: a configured one by its name, or a directory with an SQLite catalog in it."""

    def __init__(self, location: str, name: str) -> None:
        catalog, _, identifier = location.rpartition("/")
        if not catalog or "." not in identifier:
            raise UsageError(
                f"{location!r} is no Iceberg table", hint="CATALOG/namespace.table, or ./DIR/namespace.table"
            )
        with _in_our_words(location):
            self._catalog = _catalog(catalog)
        self._identifier = identifier
        self._name = name

    @property
    def store(self) -> str:
        """The directory of the files, which is known once the table exists."""
        with _in_our_words(self._identifier):
            table = self._catalog.load_table(self._identifier)
        return _store_url(f"{table.location().rstrip('/')}/{DATA}", self._catalog.properties)

    def load(self) -> IcebergHandle | None:
        """The table's current metadata."""
        from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError

        with _in_our_words(self._identifier):
            try:
                table = self._catalog.load_table(self._identifier)
            except (NoSuchTableError, NoSuchNamespaceError):
                return None
        return IcebergHandle(table, self._name)

    def create(self, schema: pa.Schema, partition_by: Sequence[str]) -> None:
        """Schema and partitioning in one step."""
        from pyiceberg.exceptions import (
            CommitFailedException,
            NamespaceAlreadyExistsError,
            TableAlreadyExistsError,
        )

        for column in partition_by:
            if pa.types.is_floating(schema.field(column).type):
                raise UsageError(f"partitioned by {column!r}, {NO_FLOATS}", hint="choose another column")
        namespace = self._identifier.rpartition(".")[0]
        with _in_our_words(self._identifier), contextlib.suppress(NamespaceAlreadyExistsError):
            self._catalog.create_namespace(namespace)
        with (
            _in_our_words(self._identifier),
            contextlib.suppress(TableAlreadyExistsError, CommitFailedException),
        ):
            transaction = self._catalog.create_table_transaction(
                self._identifier, schema=schema, properties={RETRIES: "0"}
            )
            with transaction as change, change.update_spec() as spec:
                for column in partition_by:
                    spec.add_identity(column)


class IcebergHandle(Handle):
    """One version of an Iceberg table."""

    def __init__(self, table: Any, name: str) -> None:
        self._table = table
        self._name = name
        _check(self._title, table)
        self.schema = table_schema(table.schema().as_arrow())
        names = {field.field_id: field.name for field in table.schema().fields}
        self.partition_by = tuple(names[field.source_id] for field in table.spec().fields)

    @property
    def _title(self) -> str:
        return ".".join(self._table.name())

    def _property(self, lane: str) -> str:
        # So that `a.b` and `c:0` are not `a` and `b.c:0`.
        name = self._name.replace("%", "%25").replace(".", "%2E")
        return f"forebay.{name}.{lane}"

    def position(self, lane: str) -> int | None:
        """The table's property."""
        found = self._table.metadata.properties.get(self._property(lane))
        return None if found is None else int(found)

    def commit(self, commit: Commit) -> str:
        """One transaction with the snapshot and the properties."""
        from pyiceberg.exceptions import CommitFailedException

        numbers = {self._property(lane): str(position) for lane, position in commit.positions.items()}
        root = f"{self._table.location().rstrip('/')}/{DATA}"
        paths = [f"{root}/{file.path}" for file in commit.files]
        try:
            self._forbid_retries()
            with self._table.transaction() as change:
                change.set_properties(numbers)
                # An empty snapshot keeps the check of the branch where only positions move.
                change.add_files(
                    paths,
                    snapshot_properties={**numbers, "forebay.commit": commit.commit_id},
                    check_duplicate_files=False,
                )
        except CommitFailedException as error:
            raise CommitConflict(self._title, _line(error)) from error
        except ValueError as error:
            raise UsageError(
                f"{self._title} does not take these files: {_line(error)}",
                hint="export into a table of its own",
            ) from error
        except _outages() as error:
            raise CommitUnknown(f"commit to {self._title}", reason=_line(error)) from error
        return str(self._table.metadata.current_snapshot_id)

    def _forbid_retries(self) -> None:
        if self._table.metadata.properties.get(RETRIES) == "0":
            return
        with self._table.transaction() as change:
            change.set_properties({RETRIES: "0"})
        raise CommitConflict(self._title, f"{RETRIES} had to be set to 0 first")

    def add_columns(self, fields: Sequence[pa.Field]) -> None:
        """A change of the schema alone."""
        from pyiceberg.exceptions import CommitFailedException

        try:
            with self._table.update_schema() as change:
                change.union_by_name(pa.schema(list(fields)))
        except CommitFailedException as error:
            raise CommitConflict(self._title, _line(error)) from error
        except ValueError as error:
            raise UsageError(
                f"{self._title} cannot have these columns: {_line(error)}",
                hint="--new-columns ignore, or other names: a.b is also the field b of a column a",
            ) from error
        except _outages() as error:
            raise CommitUnknown(f"new columns of {self._title}", reason=_line(error)) from error

    def live_files(self) -> dict[str, int]:
        """The files of the current snapshot."""
        root = f"{self._table.location().rstrip('/')}/{DATA}/"
        found = self._table.inspect.files().to_pylist()
        return {row["file_path"].removeprefix(root): row["record_count"] for row in found}


def _check(title: str, table: Any) -> None:
    """Raise `UsageError` where files cannot be added to a table that somebody else has made, or changed."""
    from pyiceberg.transforms import IdentityTransform
    from pyiceberg.types import TimestampType

    fields = table.schema().fields
    wrong = [f"{each.name} is required" for each in fields if each.required]
    naive = [each.name for each in fields if isinstance(each.field_type, TimestampType)]
    wrong += [f"{name} is a timestamp without a zone" for name in naive]
    kinds = {each.field_id: each for each in fields}
    for each in table.spec().fields:
        origin = kinds.get(each.source_id)
        if origin is None or not isinstance(each.transform, IdentityTransform):
            wrong.append(f"it is partitioned by {each.transform} of {origin and origin.name}")
        elif _is_floating(origin.field_type):
            wrong.append(f"it is partitioned by {origin.name}, {NO_FLOATS}")
    if wrong:
        raise UsageError(
            f"{title} takes no files of an export: {'; '.join(wrong)}", hint="export into a table of its own"
        )


def _is_floating(kind: Any) -> bool:
    from pyiceberg.types import DoubleType, FloatType

    return isinstance(kind, DoubleType | FloatType)


def _outages() -> tuple[type[Exception], ...]:
    """What is raised where a catalog or a store does not answer, or cannot now."""
    from pyiceberg import exceptions

    found: list[type[Exception]] = [
        OSError,  # Of sockets, of requests and of Arrow's file systems.
        exceptions.CommitStateUnknownException,
        exceptions.ServerError,
        exceptions.ServiceUnavailableError,
        exceptions.TooManyRequestsError,
        exceptions.WaitingForLockException,
    ]
    with contextlib.suppress(ImportError):  # Only a catalog in a database has it.
        from sqlalchemy.exc import OperationalError

        found.append(OperationalError)
    return tuple(found)


@contextlib.contextmanager
def _in_our_words(table: str) -> Iterator[None]:
    """A catalog that cannot be reached is waited for by a continuous export; lost metadata is not."""
    try:
        yield
    except FileNotFoundError as error:
        raise FormatError(f"{table} has lost metadata: {_line(error)}", hint="restore the file") from error
    except Exception as error:
        if not isinstance(error, _outages()):
            raise
        raise Unavailable(f"{table}: {_line(error)}", hint="check the catalog and that it is up") from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:MESSAGE_CHARS_MAX]


def _catalog(name: str) -> Any:
    try:
        from pyiceberg.catalog import load_catalog
    except ImportError as error:
        raise Unsupported("pyiceberg is not installed", hint="pip install 'forebay[iceberg]'") from error
    if not name.startswith((".", "/")):
        return _configured(name)
    folder = Path(name).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"uri": f"sqlite:///{folder / 'catalog.db'}", "warehouse": f"file://{quote(str(folder))}"}
    try:
        return load_catalog("forebay", type="sql", **settings)
    except _outages() as error:
        if "already exists" not in str(error):
            raise
        return load_catalog("forebay", type="sql", **settings)  # Another made its tables at the same moment.


def _configured(name: str) -> Any:
    from pyiceberg.catalog import load_catalog

    try:
        return load_catalog(name)
    except ValueError as error:
        raise UsageError(
            f"the Iceberg catalog {name!r} cannot be opened: {error}",
            hint="configure it for pyiceberg, or name a directory: ./DIR/namespace.table",
        ) from error


def _store_url(location: str, properties: dict[str, str]) -> str:
    """One of our addresses for a table's location."""
    parts = urlsplit(location)
    if parts.scheme in ("", "file"):
        return unquote(parts.path)
    options = {
        "endpoint": properties.get("s3.endpoint") or os.environ.get("AWS_ENDPOINT_URL", ""),
        "region": properties.get("s3.region", ""),
        "access_key_id": properties.get("s3.access-key-id", ""),
        "secret_access_key": properties.get("s3.secret-access-key", ""),
    }
    query = "&".join(f"{name}={quote(value, safe=':/')}" for name, value in options.items() if value)
    return location + (f"?{query}" if query else "")
