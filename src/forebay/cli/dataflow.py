"""`forebay dataflow`: run a file of receivers, buffers and exporters, or say what is wrong with it."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from forebay.cli import _output as out
from forebay.cli._options import CommandGroup
from forebay.cli._run import on_ending, wait_for
from forebay.errors import ForebayError, NotFound, Unsupported, UsageError
from forebay.kit.limits import parse_duration_ms

if TYPE_CHECKING:
    from forebay.dataflow import Plan, Problem

__all__ = ["app"]

app = CommandGroup(help="Receive telemetry, keep it on disk, hand it on.")

CONNECTIONS: Final = 16_384
"""For so many the limit on open files is raised, as far as it may be."""

FilePath = Annotated[Path, typer.Argument(metavar="FILE", help="A dataflow file (YAML).")]


class Wrong(ForebayError):
    """A file in which something is wrong; what, was printed already."""


def _read(path: Path) -> bytes:
    if path.is_dir():
        raise UsageError(f"{path} is a directory", hint="give the path of a dataflow file")
    if not path.exists():
        raise NotFound(str(path), hint="give the path of a dataflow file")
    from forebay.dataflow import FILE_BYTES_MAX

    with path.open("rb") as file:
        return file.read(FILE_BYTES_MAX + 1)


def _need_extra() -> None:
    missing = [name for name in ("grpc", "httptools", "opentelemetry", "yaml") if find_spec(name) is None]
    if missing:
        raise Unsupported(
            f"not installed: {', '.join(missing)}", hint="install forebay with the extras otel and broker"
        )


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


class OneLine(logging.Formatter):
    """What a destination says of itself cannot look like a line of our own, nor move the cursor."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name is that of logging
        """The message with all of that written out."""
        return out.printable(super().formatMessage(record))


@app.command("run")
def run(
    file: FilePath,
    drain: Annotated[
        str,
        typer.Option("--drain", metavar="DURATION", help="How long to hand on what is there when it stops."),
    ] = "10s",
    metrics: Annotated[
        str | None,
        typer.Option("--metrics", metavar="HOST:PORT", help="Serve Prometheus metrics on this address."),
    ] = None,
) -> None:
    """Run a file until SIGTERM or Ctrl-C. What was not handed on stays on disk for the next run."""
    _need_extra()
    from forebay.broker import connections_that_fit
    from forebay.dataflow import DataflowInvalid, load

    drain_s = parse_duration_ms(drain) / 1000
    try:
        plan = load(_read(file))
    except DataflowInvalid as invalid:
        for each in invalid.problems:
            sys.stderr.write(out.printable(f"{file}:{each.line}:{each.column}: error: {_text(each)}") + "\n")
        raise Wrong(
            f"{len(invalid.problems)} problems in {file}", hint="mend them, then run it again"
        ) from None
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneLine("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    for each in plan.remarks:
        sys.stderr.write(out.printable(f"{file}:{each.line}:{each.column}: remark: {_text(each)}") + "\n")
    # Connections are open files, as are those of the store: with the usual limit of 1,024, as many clients
    # that send nothing would leave none for it.
    connections_that_fit(CONNECTIONS)
    wait_for(_serve(plan, drain_s, metrics))


async def _serve(plan: Plan, drain_s: float, metrics: str | None) -> None:
    from forebay.broker import calm_collector
    from forebay.dataflow import Dataflow, MetricsPage
    from forebay.kit.metrics import MetricsRegistry

    registry = MetricsRegistry()
    flow = Dataflow(plan, metrics=registry, drain_s=drain_s)
    page = None if metrics is None else MetricsPage(metrics, registry)
    enough = asyncio.Event()

    def stop() -> None:
        # Asked for a second time, it waits for nobody.
        if enough.is_set():
            flow.hurry()
        enough.set()

    on_ending(stop)
    async with flow:
        if page is not None:
            await page.start()
        calm_collector()
        _ready(flow.addresses, None if page is None else page.address)
        failed = asyncio.create_task(flow.failure())
        asked = asyncio.create_task(enough.wait())
        await asyncio.wait({failed, asked}, return_when=asyncio.FIRST_COMPLETED)
        for task in (failed, asked):
            task.cancel()
        if page is not None:
            await page.stop()
    if failed.done() and not failed.cancelled():
        # A new start reads what the disk really holds; only whoever started this process can do that.
        raise failed.result()


def _ready(addresses: dict[str, dict[str, str]], metrics: str | None) -> None:
    if out.is_json():
        out.document({"ready": True, "pid": os.getpid(), "receivers": addresses, "metrics": metrics})
    else:
        found = [f"{name} {kind} {at}" for name, each in addresses.items() for kind, at in each.items()]
        found += [f"metrics {metrics}"] if metrics else []
        out.line(f"ready: {', '.join(found)}")
    sys.stdout.flush()
