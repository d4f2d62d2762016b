"""`forebay demo`: the promise, shown on this machine in a few seconds.

Acknowledged records survive writers that race and writers that are killed, and come back as they were
written. The demo runs on a real local store with real processes; nothing in it is simulated.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forebay.cli import _output as out
from forebay.cli._errors import EXIT_FAILED
from forebay.cli._options import CommandGroup
from forebay.cli._run import wait_for
from forebay.kit.clock import SystemClock
from forebay.kit.ids import IdSource
from forebay.kit.limits import format_bytes

if TYPE_CHECKING:
    from forebay.cli.demo.steps import Outcome

__all__ = ["app"]

app = CommandGroup(help="The demo.")


@app.command("demo")
def demo(
    data: Annotated[
        Path | None,
        typer.Option(
            "--data", metavar="DIR", help="Where to write; else a new directory here.", show_default=False
        ),
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the data for a look at it.")] = False,
) -> None:
    """Show the promise kept: write, race, kill -9, read back, verify.

    Every record that was acknowledged is read back and compared. Exit code 1 if a single one is missing.
    """
    prefix = f"demo/{IdSource().ulid()}"
    with _place(data, keep=keep) as directory:
        done = wait_for(_play(directory, prefix, keep=keep))
        lost = sum(outcome.lost for _, outcome, _ in done)
        _print(done, lost, directory if keep else None, prefix)
    if lost:
        raise typer.Exit(EXIT_FAILED)


@contextmanager
def _place(data: Path | None, *, keep: bool) -> Iterator[Path]:
    """The directory to play in. What was not there before is gone afterwards, unless it is to be kept."""
    if data is not None and data.exists():
        yield data.absolute()
        return
    if data is not None:
        data.mkdir(parents=True)
        directory = data.absolute()
    else:
        directory = Path(tempfile.mkdtemp(prefix="forebay-demo-", dir=Path.cwd()))
    try:
        yield directory
    finally:
        if not keep:
            shutil.rmtree(directory, ignore_errors=True)


async def _play(directory: Path, prefix: str, *, keep: bool) -> list[tuple[str, Outcome, float]]:
    from forebay.cli.demo.steps import STEPS, Stage
    from forebay.storage import open_store

    clock = SystemClock()
    done = []
    async with open_store(str(directory)) as store:
        stage = Stage(store, directory, prefix, clock)
        try:
            with out.progress() as bar:
                task = bar.add_task("", total=sum(step.advances for step in STEPS))
                for step in STEPS:
                    bar.update(task, description=step.name)
                    began = clock.monotonic()
                    outcome = await step.work(stage, lambda: bar.advance(task))
                    done.append((step.name, outcome, clock.monotonic() - began))
        finally:
            if not keep:
                await store.delete(await stage.journal().keys())
    return done


def _print(done: list[tuple[str, Outcome, float]], lost: int, kept: Path | None, prefix: str) -> None:
    if out.is_json():
        steps = [_facts(name, outcome, seconds) for name, outcome, seconds in done]
        out.document(
            {"ok": not lost, "lost": lost, "steps": steps, "data": None if kept is None else str(kept)}
        )
        return
    columns = ("step", "records", "size", "requests", "seconds", "records/s", "what happened")
    out.table(columns, [_row(*each) for each in done], right=columns[1:6])
    out.line("")
    if lost:
        out.line(f"LOST: {lost:,} acknowledged records are missing or damaged.")
    else:
        out.line("Every acknowledged record is there, once, byte for byte.")
    if kept is not None:
        out.line(f"Kept: forebay store ls {kept} {prefix}")


def _row(name: str, outcome: Outcome, seconds: float) -> list[str]:
    counts = outcome.counts
    return [
        name,
        f"{outcome.records:,}",
        format_bytes(counts.bytes) if counts.bytes else "",
        f"{counts.requests:,}" if counts.requests else "",
        f"{seconds:.2f}",
        f"{outcome.records / max(seconds, 1e-9):,.0f}" if counts.requests else "",
        outcome.detail,
    ]


def _facts(name: str, outcome: Outcome, seconds: float) -> dict[str, Any]:
    return {
        "name": name,
        "records": outcome.records,
        "bytes": outcome.counts.bytes,
        "requests": outcome.counts.requests,
        "seconds": round(seconds, 6),
        "lost": outcome.lost,
        "detail": outcome.detail,
    }
