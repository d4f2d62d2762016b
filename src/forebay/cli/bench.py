"""`forebay bench`: run a load test from a scenario file, and look at one that was run.

`up`, `status` and `down` hold a stack for several runs, or for a look at its console; they know nothing but
the run directory.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from forebay.cli import _output as out
from forebay.cli._options import CommandGroup
from forebay.cli._run import wait_for
from forebay.errors import ForebayError, Unavailable, UsageError

__all__ = ["app"]

app = CommandGroup(help="Load tests: run a scenario, look at a run.")


class NotReconciled(ForebayError):
    """What clients were told, what brokers counted and what is in the log do not agree."""


_RESULTS = typer.Option("--results", metavar="DIR", help="Where the run directory is made.")
_CHANGES = typer.Option(
    "--set", metavar="NAME=VALUE", help="Another value for a setting.", show_default=False
)
_RUN = typer.Argument(metavar="RUN", help="A run directory.")


@app.command("run")
def run(
    scenario: Annotated[
        Path, typer.Argument(metavar="SCENARIO", help="A TOML file, or a run directory whose stack is up.")
    ],
    results: Annotated[Path, _RESULTS] = Path("loadtest/results"),
    changes: Annotated[list[str] | None, _CHANGES] = None,
) -> None:
    """Run a scenario. Exit code 1 where the accounts differ. JSON: the summary."""
    from forebay.loadtest import Run, Stack, load_scenario

    if scenario.is_dir():
        if changes:
            raise UsageError("a stack that is up has its settings", hint="--set belongs to bench up")
        started = Run.of(Stack.found(scenario, _say), _say)
    else:
        started = Run(load_scenario(scenario, dict(map(_parted, changes or []))), results, _say)
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


@app.command("up")
def up(
    scenario: Annotated[Path, typer.Argument(metavar="SCENARIO", help="A TOML file.")],
    results: Annotated[Path, _RESULTS] = Path("loadtest/results"),
    changes: Annotated[list[str] | None, _CHANGES] = None,
) -> None:
    """Start the brokers of a scenario and make its topic; they go on until `down`. JSON: run and brokers."""
    from forebay.loadtest import Stack, load_scenario

    stack = Stack.new(load_scenario(scenario, dict(map(_parted, changes or []))), results, _say)

    async def start() -> list[dict[str, Any]]:
        await stack.up()
        try:
            await stack.precreate()
        except BaseException:
            await stack.down()
            raise
        return await stack.status()

    _print_stack(stack.directory, wait_for(start()))


@app.command("status")
def status(directory: Annotated[Path, _RUN]) -> None:
    """Which brokers of a stack answer. Exit code 1 where one does not. JSON: run and brokers."""
    from forebay.loadtest import Stack

    brokers = wait_for(Stack.found(directory).status())
    _print_stack(directory, brokers)
    missing = [each["name"] for each in brokers if not each["healthy"]]
    if missing:
        raise Unavailable(f"{', '.join(missing)} of the stack cannot be reached", hint="see logs/ in the run")


@app.command("down")
def down(directory: Annotated[Path, _RUN]) -> None:
    """Stop the brokers of a stack; brokers that were only named by URL go on. JSON: run and brokers."""
    from forebay.loadtest import Stack

    stack = Stack.found(directory)

    async def stop() -> list[dict[str, Any]]:
        await stack.down()
        return await stack.status()

    _print_stack(directory, wait_for(stop()))


@app.command("report")
def report(
    directory: Annotated[Path, _RUN],
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


def _print_stack(directory: Path, brokers: list[dict[str, Any]]) -> None:
    if out.is_json():
        out.document({"run": str(directory), "brokers": brokers})
        return
    out.line(str(directory))
    for each in brokers:
        out.line(f"{each['name']} {each['url']} {'answers' if each['healthy'] else 'does not answer'}")


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
    for name, memory in summary["memory"].items():
        out.line(
            f"memory of {name}: {memory['settled_bytes'] / 2**20:.0f} MiB after a quarter of the run, "
            f"{memory['end_bytes'] / 2**20:.0f} MiB at the end"
        )
    for warning in summary["warnings"]:
        out.line(f"warning: {warning}")
    out.line("reconciliation exact" if account["exact"] else "reconciliation found differences")
    out.line(str(directory / "report.html"))
