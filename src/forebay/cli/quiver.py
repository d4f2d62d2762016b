"""`forebay quiver`: look into a store's directory without opening it.

Everything here only reads. It may run beside the process that has the store open; what that process writes or
deletes in the meantime may then be missing from the answer.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forebay.cli import _output as out
from forebay.cli._options import CommandGroup
from forebay.errors import ForebayError, NotFound
from forebay.kit.limits import format_bytes

if TYPE_CHECKING:
    from forebay.quiver import DirectoryView

__all__ = ["app"]

app = CommandGroup(help="Look into a Quiver store on disk.")

Directory = Annotated[Path, typer.Argument(metavar="DIR", help="The directory of a store.")]


class Damaged(ForebayError):
    """A verification that found something; its answer was printed already."""


def _view(directory: Path) -> DirectoryView:
    from forebay.quiver import DirectoryView

    if not directory.is_dir():
        raise NotFound(str(directory), hint="give the directory of a Quiver store")
    return DirectoryView.read(directory)


@app.command("inspect")
def inspect(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A store's directory, or one segment file.")],
) -> None:
    """Show what is in a store, or in one segment file."""
    from forebay.quiver import describe_segment

    facts: dict[str, Any] = describe_segment(path) if path.is_file() else _view(path).describe()
    if out.is_json():
        out.document(facts)
        return
    segments = facts.pop("segments", [])
    for name, value in facts.items():
        out.line(f"{name:<16} {out.printable(json.dumps(value))}")
    for each in segments:
        out.line(
            f"segment {each['segment']:<8} {each['signal']:<10} {each['rows']:>10,} rows  "
            f"{format_bytes(each['file_bytes'])}"
        )


@app.command("stats")
def stats(directory: Directory) -> None:
    """Show sizes, positions, lags and losses."""
    facts = _view(directory).stats()
    if out.is_json():
        out.document(facts)
        return
    subscribers = facts.pop("subscribers")
    for name, value in facts.items():
        out.line(f"{name:<16} {json.dumps(value)}")
    for each in subscribers:
        out.line(
            f"{each['name']:<16} resolved to {each['high_water']}, {each['lag_segments']} segments behind"
        )


@app.command("verify")
def verify(directory: Directory) -> None:
    """Compare every checksum of every file. Ends with 1 where something is damaged."""
    view = _view(directory)
    problems = view.verify()
    if out.is_json():
        report = asdict(view.found.report)
        out.document({"ok": not problems, "problems": problems, "recovery": report})
    else:
        for problem in problems:
            out.line(f"problem: {out.printable(problem)}")
        out.line(f"{len(view.found.segments):,} segments, {len(problems)} problems")
    if problems:
        raise Damaged(f"{len(problems)} problems", hint="opening the store puts damaged parts aside")


@app.command("tail")
def tail(
    directory: Directory,
    lines: Annotated[int, typer.Option("--lines", "-n", metavar="N", help="Rows to show.", min=1)] = 10,
) -> None:
    """Print the last rows of the finished segments, a JSON document per line."""
    for row in _view(directory).last_rows(lines):
        sys.stdout.write(json.dumps(row, default=str) + "\n")
