"""`forebay doctor`: whether this machine can do what Forebay needs, and what to do where it cannot."""

from __future__ import annotations

import resource
from pathlib import Path

import typer

from forebay.cli import _output as out
from forebay.cli._deployment import COORDINATION_FILE, Deployment, deployment_options
from forebay.cli._errors import EXIT_FAILED
from forebay.cli._options import CommandGroup
from forebay.cli.doctor.check import Check, Probe, Status, examine
from forebay.cli.doctor.disk import examine_disk
from forebay.cli.doctor.servers import answers
from forebay.cli.doctor.software import programs, python_packages

__all__ = ["app"]

app = CommandGroup(help="The doctor.")

OPEN_FILES_LOW = 1024
"""Open files below which a process with many connections runs out of them."""

_STYLES = {Status.OK: "green", Status.WARN: "yellow", Status.MISSING: "cyan", Status.FAILED: "bold red"}


@app.command("doctor")
@deployment_options
def doctor(deployment: Deployment) -> None:
    """What is installed, which servers answer, how fast the disk is.

    Without --data the current directory is measured. Exit code 1 if something Forebay needs is broken, or a
    named store or coordinator does not answer; a missing extra or program is no failure.
    """
    checks = examine(_probes(deployment))
    broken = any(check.status is Status.FAILED for check in checks)
    _print(checks, ok=not broken)
    if broken:
        raise typer.Exit(EXIT_FAILED)


def _probes(deployment: Deployment) -> list[Probe]:
    probes = [Probe("software", python_packages), Probe("programs", programs)]
    store, coordinator = _named_servers(deployment)
    if store is not None:
        probes.append(Probe("store", lambda: [answers("store", store)]))
    if coordinator is not None:
        probes.append(Probe("coordinator", lambda: [answers("coordinator", coordinator)]))
    directory = deployment.data or Path()
    probes.append(Probe("directory", lambda: examine_disk(directory, named=deployment.data is not None)))
    probes.append(Probe("open files", lambda: [_open_files()]))
    return probes


def _named_servers(deployment: Deployment) -> tuple[str | None, str | None]:
    """The URLs to ask. A data directory is asked for what it holds already: a doctor creates nothing."""
    if deployment.data is None:
        return deployment.store, deployment.coordinator
    database = deployment.data / COORDINATION_FILE
    return (
        deployment.store_url if database.parent.is_dir() else None,
        deployment.coordinator_url if database.is_file() else None,
    )


def _open_files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    detail = f"at most {soft:,}" if soft != resource.RLIM_INFINITY else "no limit"
    if soft != resource.RLIM_INFINITY and soft < OPEN_FILES_LOW:
        return Check(
            "open files", Status.WARN, detail, f"ulimit -n {min(hard, 4096)} before starting a server"
        )
    return Check("open files", Status.OK, detail)


def _print(checks: list[Check], *, ok: bool) -> None:
    if out.is_json():
        listed = [
            {"name": check.name, "status": check.status.value, "detail": check.detail, "hint": check.hint}
            for check in checks
        ]
        out.document({"ok": ok, "checks": listed})
        return
    from rich.text import Text

    console = out.console()
    width = max(len(check.name) for check in checks)
    for check in checks:
        console.print(
            Text.assemble(
                (f"{check.status.value:<8}", _STYLES[check.status]), f"{check.name:<{width}}  {check.detail}"
            ),
            soft_wrap=True,
        )
        if check.hint:
            console.print(Text(f"{'':8}{'':{width}}  -> {check.hint}"), soft_wrap=True)
    console.print("All that Forebay needs is here." if ok else "Something Forebay needs is broken.")
