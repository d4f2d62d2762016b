"""`forebay dataflow`: run a file of receivers, buffers and exporters, or say what is wrong with it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forebay.cli import _output as out
from forebay.cli._options import CommandGroup
from forebay.errors import ForebayError, NotFound, Unsupported

if TYPE_CHECKING:
    from forebay.dataflow import Problem

__all__ = ["app"]

app = CommandGroup(help="Receive telemetry, keep it on disk, hand it on.")

FilePath = Annotated[Path, typer.Argument(metavar="FILE", help="A dataflow file (YAML).")]


class Wrong(ForebayError):
    """A file in which something is wrong; what, was printed already."""


def _read(path: Path) -> bytes:
    if not path.is_file():
        raise NotFound(str(path), hint="give the path of a dataflow file")
    from forebay.dataflow import FILE_BYTES_MAX

    with path.open("rb") as file:
        return file.read(FILE_BYTES_MAX + 1)


def _need_extra() -> None:
    try:
        import grpc  # noqa: F401
        import httptools  # noqa: F401
        import opentelemetry.proto  # noqa: F401
        import yaml  # noqa: F401
    except ImportError as error:
        raise Unsupported(
            f"{error.name} is not installed", hint="install forebay with the extras otel and broker"
        ) from error


@app.command("check")
def check(file: FilePath) -> None:
    """Say what is wrong with a file, with line numbers. Ends with 1 where something is."""
    _need_extra()
    from forebay.dataflow import check as check_file

    problems, remarks = check_file(_read(file))
    if out.is_json():
        out.document(
            {
                "ok": not problems,
                "problems": [asdict(each) for each in problems],
                "remarks": [asdict(each) for each in remarks],
            }
        )
    else:
        _print(file, "error", problems)
        _print(file, "remark", remarks)
        if not problems:
            out.line(f"{out.printable(str(file))}: nothing is wrong")
    if problems:
        raise Wrong(f"{len(problems)} problems in {file}", hint="mend them, then check again")


def _print(file: Path, kind: str, problems: list[Problem]) -> None:
    for each in problems:
        out.line(out.printable(f"{file}:{each.line}:{each.column}: {kind}: {_text(each)}"))


def _text(problem: Problem) -> str:
    return str(problem).split(": ", 1)[1]
