"""`forebay bench`: run a load test from a scenario file, and look at one that was run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from forebay.cli import _output as out
from forebay.cli._options import CommandGroup
from forebay.cli._run import wait_for
from forebay.errors import ForebayError, UsageError

__all__ = ["app"]

app = CommandGroup(help="Load tests: run a scenario, look at a run.")


class NotReconciled(ForebayError):
    """What clients were told, what brokers counted and what is in the log do not agree."""


@app.command("run")
def run(
    scenario: Annotated[Path, typer.Argument(metavar="SCENARIO", help="A TOML file.")],
    results: Annotated[
        Path, typer.Option("--results", metavar="DIR", help="Where the run directory is made.")
    ] = Path("loadtest/results"),
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Another value for a setting.", show_default=False),
    ] = None,
) -> None:
    """Run a scenario. Exit code 1 where the accounts differ. JSON: the summary."""
    from forebay.loadtest import Run, load_scenario

    chosen = load_scenario(scenario, dict(_parted(each) for each in changes or []))
    started = Run(chosen, results, _say)
    summary = wait_for(started.run())
    if out.is_json():
        out.document(summary)
    else:
        _print(summary, started.directory)
    if not summary["reconciliation"]["exact"]:
        raise NotReconciled(
            "; ".join(summary["reconciliation"]["differences"]),
            hint=f"see {started.directory / 'summary.json'}",
        )


@app.command("report")
def report(
    directory: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
) -> None:
    """Write the page of a run anew. JSON: its path."""
    from forebay.loadtest import write_report

    if not (directory / "summary.json").is_file():
        raise UsageError(f"{directory} is no run directory", hint="it holds a summary.json")
    path = write_report(directory)
    if out.is_json():
        out.document({"report": str(path)})
    else:
        out.line(str(path))


def _parted(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"{text!r} sets nothing", hint="as --set duration_s=30")
    return name, value


def _say(line: str) -> None:
    if sys.stderr.isatty() and not out.is_json():
        sys.stderr.write(f"{line}\n")


def _print(summary: dict[str, Any], directory: Path) -> None:
    client, account = summary["client"], summary["reconciliation"]
    latency = client["latency_ms"]
    out.line(f"{client['mb_per_s']:.1f} MB/s, {client['records_per_s']:,.0f} records/s acknowledged")
    out.line(
        f"latency p50 {latency['p50']:.1f} ms, p95 {latency['p95']:.1f} ms, p99 {latency['p99']:.1f} ms, "
        f"max {latency['max']:.1f} ms"
    )
    out.line(
        f"{account['records_acked']:,} acknowledged, {account['records_failed']:,} failed, "
        f"{account['records_unknown']:,} unknown ({account['records_unknown_in_log']:,} of them in the log); "
        f"{account['records_in_log']:,} in the log"
    )
    out.line(
        f"generator: {client['cpu_share']:.0%} of a core, {client['cpu_us_per_record']:.1f} us per record"
    )
    for warning in summary["warnings"]:
        out.line(f"warning: {warning}")
    out.line("reconciliation exact" if account["exact"] else "reconciliation found differences")
    out.line(str(directory / "report.html"))
