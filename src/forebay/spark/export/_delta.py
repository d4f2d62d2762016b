"""Delta tables through delta-rs: the number of a lane is the version of an application transaction.

    app id = forebay/<name of the export>/<lane>        version = next position

Delta writes such a transaction in the same log entry as the files, keeps it through checkpoints, and refuses
a commit if one of its app ids was moved by another commit since the handle was loaded. It does not refuse a
version that goes back, so the positions are compared here. `delta.setTransactionRetentionDuration` must stay
unset on such a table: it would make it forget.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit

import pyarrow as pa

from forebay.errors import FormatError, Unavailable, Unsupported, UsageError
from forebay.spark.export._clients import clients
from forebay.spark.export._errors import CommitConflict, CommitUnknown
from forebay.spark.export._tables import Commit, Handle, Table

__all__ = ["DeltaLake", "storage_of"]

RETENTION = "delta.setTransactionRetentionDuration"
CONSTRAINT = "delta.constraints."
UNSUPPORTED = "Unsupported table features"
"""How delta-rs begins where somebody else has turned on what it cannot write."""
MESSAGE_CHARS_MAX = 500
"""Longest message of delta-rs that is passed on."""
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class DeltaLake(Table):
    """A Delta table."""

    def __init__(self, location: str, name: str) -> None:
        try:
            import deltalake
        except ImportError as error:
            raise Unsupported("deltalake is not installed", hint="pip install 'forebay[spark]'") from error
        del deltalake
        self._store = location if "://" in location else str(Path(location).absolute())
        if Path(self._store).is_file():
            raise UsageError(
                f"{location} is a file", hint="a Delta table is a directory: choose another place"
            )
        self._name = name
        self._uri, self._options = storage_of(self._store)

    @property
    def store(self) -> str:
        """The table's own directory."""
        return self._store

    def load(self) -> DeltaHandle | None:
        """Read the log."""
        from deltalake import DeltaTable
        from deltalake.exceptions import TableNotFoundError

        with _in_our_words(self._uri):
            try:
                found = DeltaTable(self._uri, storage_options=self._options)
            except TableNotFoundError:
                return None
        return DeltaHandle(found, self._name)

    def create(self, schema: pa.Schema, partition_by: Sequence[str]) -> None:
        """Write version 0, unless it is there."""
        from deltalake import Schema
        from deltalake.exceptions import CommitFailedError
        from deltalake.transaction import create_table_with_add_actions

        if "://" not in self._uri:
            Path(self._uri).mkdir(parents=True, exist_ok=True)
        # Where another is faster at the very same moment, delta-rs says that the protocol changed.
        with _in_our_words(self._uri), contextlib.suppress(CommitFailedError):
            create_table_with_add_actions(
                self._uri,
                Schema.from_arrow(schema),
                [],
                mode="ignore",
                partition_by=list(partition_by),
                storage_options=self._options,
            )


class DeltaHandle(Handle):
    """One version of a Delta table."""

    def __init__(self, table: Any, name: str) -> None:
        self._table = table
        self._name = name
        self.schema = _arrow_schema(table)
        metadata = table.metadata()
        self.partition_by = tuple(metadata.partition_columns)
        if RETENTION in metadata.configuration:
            raise UsageError(
                f"{table.table_uri} forgets its positions: {RETENTION} is set",
                hint="remove that property before exporting into the table",
            )
        rules = [
            name.removeprefix(CONSTRAINT) for name in metadata.configuration if name.startswith(CONSTRAINT)
        ]
        rules += [f"{field.name} not null" for field in table.schema().fields if not field.nullable]
        if rules:
            # delta-rs takes files as they are; nobody would notice before the table is read.
            raise UsageError(
                f"{table.table_uri} has rules that an export does not look at: {', '.join(rules)}",
                hint="drop them, or export into a table of its own",
            )

    def _app(self, lane: str) -> str:
        return f"forebay/{self._name}/{lane}"

    def position(self, lane: str) -> int | None:
        """From the log, as of this version."""
        found = self._table.transaction_version(self._app(lane))
        return None if found is None else int(found)

    def commit(self, commit: Commit) -> str:
        """One log entry with the files and the transactions."""
        from deltalake import Schema
        from deltalake.exceptions import CommitFailedError, DeltaError
        from deltalake.transaction import AddAction, CommitProperties, Transaction

        now_ms = clients().clock.now_ms()
        actions = [
            AddAction(quote(file.path), file.size, dict(file.partition), now_ms, True, file.stats)
            for file in commit.files
        ]
        moved = [Transaction(self._app(lane), position) for lane, position in commit.positions.items()]
        try:
            self._table.create_write_transaction(
                actions,
                "append",
                Schema.from_arrow(self.schema),
                partition_by=list(self.partition_by),
                commit_properties=CommitProperties(
                    custom_metadata={"forebay.commit": commit.commit_id}, app_transactions=moved
                ),
            )
        except CommitFailedError as error:
            if str(error).startswith(UNSUPPORTED):
                raise Unsupported(
                    f"{self._table.table_uri}: {_line(error)}", hint="export into a table without them"
                ) from error
            raise CommitConflict(self._table.table_uri, str(error)) from error
        except (OSError, DeltaError) as error:
            raise CommitUnknown(f"commit to {self._table.table_uri}", reason=_line(error)) from error
        return str(self._table.version() + 1)

    def add_columns(self, fields: Sequence[pa.Field]) -> None:
        """A commit that changes the schema alone."""
        from deltalake import Field, Schema
        from deltalake.exceptions import CommitFailedError, DeltaError

        added: list[Field] = Schema.from_arrow(pa.schema(list(fields))).fields
        try:
            self._table.alter.add_columns(added)
        except (CommitFailedError, DeltaError) as error:
            raise CommitConflict(self._table.table_uri, _line(error)) from error
        except OSError as error:
            raise CommitUnknown(f"new columns of {self._table.table_uri}", reason=_line(error)) from error

    def live_files(self) -> dict[str, int]:
        """The add actions of this version."""
        actions = pa.table(self._table.get_add_actions(flatten=True))
        names = [unquote(path) for path in actions.column("path").to_pylist()]
        return dict(zip(names, actions.column("num_records").to_pylist(), strict=True))


@contextlib.contextmanager
def _in_our_words(uri: str) -> Iterator[None]:
    """A store that cannot be reached is waited for by a continuous export; a log that is damaged is not."""
    from deltalake.exceptions import DeltaError

    try:
        yield
    except OSError as error:
        raise Unavailable(f"{uri}: {_line(error)}", hint="check the endpoint and that it is up") from error
    except DeltaError as error:
        raise FormatError(
            f"{uri} is no Delta table that can be read: {_line(error)}", hint="restore its _delta_log"
        ) from error


def _line(error: Exception) -> str:
    """What delta-rs says, as one line without colours and without its own call stack."""
    text = _COLOURS.sub("", str(error)).partition("   0: ")[0]
    return " ".join(text.split())[:MESSAGE_CHARS_MAX]


def _arrow_schema(table: Any) -> pa.Schema:
    """The schema with plain Arrow types: delta-rs hands out views and its own metadata."""
    from forebay.spark.export._types import table_schema

    return table_schema(pa.schema(table.schema().to_arrow()))


def storage_of(url: str) -> tuple[str, dict[str, str]]:
    """An address and options for delta-rs from one of ours: `s3://bucket/prefix?endpoint=...`."""
    if "://" not in url:
        return url, {}
    parts = urlsplit(url)
    if parts.scheme == "file":
        return unquote(parts.path), {}
    given = dict(parse_qsl(parts.query))
    uri = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
    if parts.scheme != "s3":
        if given:
            raise UsageError(f"{uri}: options are not passed on", hint="set them in the environment")
        return uri, {}
    options = {"AWS_REGION": os.environ.get("AWS_REGION") or "us-east-1"}
    names = {
        "endpoint": "AWS_ENDPOINT_URL",
        "region": "AWS_REGION",
        "access_key_id": "AWS_ACCESS_KEY_ID",
        "secret_access_key": "AWS_SECRET_ACCESS_KEY",
        "session_token": "AWS_SESSION_TOKEN",
    }
    options.update({names[name]: value for name, value in given.items() if name in names})
    if options.get("AWS_ENDPOINT_URL", "").startswith("http://"):
        options["AWS_ALLOW_HTTP"] = "true"
    options["AWS_CONDITIONAL_PUT"] = "etag"
    return uri, options
