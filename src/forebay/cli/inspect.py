"""`forebay inspect`: what is this file?"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from forebay.cli import _output as out
from forebay.cli._bytes_of import bytes_of
from forebay.cli._errors import EXIT_FAILED
from forebay.cli._options import CommandGroup
from forebay.cli._recognize import Found, recognize
from forebay.cli._run import wait_for

__all__ = ["app"]

app = CommandGroup(help="Inspect.")


@app.command("inspect")
def inspect(
    file_or_url: Annotated[
        str, typer.Argument(metavar="FILE_OR_URL", help="A file, or an object: s3://bucket/key?endpoint=...")
    ],
) -> None:
    """What a file of Forebay is, and whether it is sound.

    Batches and manifests of buffers and claiming queues, objects of the log, segments, fragments and
    manifests of streams, files of Quiver, Arrow and Parquet. Exit code 1 where something in it is damaged.
    """
    found = recognize(wait_for(bytes_of(file_or_url)), file_or_url.partition("?")[0])
    if out.is_json():
        out.document(found.document)
    else:
        _show(found)
    if any(row.get("problem") for row in found.rows) or found.facts.get("damaged_bytes"):
        raise typer.Exit(EXIT_FAILED)


def _show(found: Found) -> None:
    out.line(found.kind)
    for name, value in found.facts.items():
        out.line(f"  {name:<20} {_text(name, value)}")
    if found.rows:
        columns = list(found.rows[0])
        numbers = [name for name in columns if isinstance(found.rows[0][name], int)]
        out.table(columns, [[_text(*cell) for cell in row.items()] for row in found.rows], right=numbers)


def _text(name: str, value: Any) -> str:
    if isinstance(value, int) and name.endswith(("_ms", "timestamp")) and value > 0:
        return out.time_text(value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, dict):
        return ", ".join(f"{out.printable(str(key))}: {each}" for key, each in value.items())
    if isinstance(value, list):
        return ", ".join(str(each) for each in value)
    return "" if value is None else out.printable(str(value))
