"""The root of the command: which commands there are, and how a run of it ends.

A command is one module with one line in `COMMANDS`. The module is imported when the command is called;
until then the help line given here stands for it. A module offers `app`, a `CommandGroup`: with several
commands it becomes a group (`forebay store ls`), with a single one named like the module it becomes that
command (`forebay doctor`).
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import typer
import typer.core
import typer.main

from forebay.cli._errors import EXIT_CODES, EXIT_FAILED, EXIT_PIPE, end
from forebay.cli._options import CommandGroup
from forebay.cli._settings import Settings, using

__all__ = ["COMMANDS", "Registered", "load", "main", "root", "run"]

PROGRAM = "forebay"
STDERR = 2


@dataclass(frozen=True, slots=True)
class Registered:
    """A command that is known by name and help line, and imported on demand."""

    name: str
    module: str
    help: str


COMMANDS = (
    Registered("bench", "forebay.cli.bench", "Load tests: run a scenario, look at a run."),
    Registered("buffer", "forebay.cli.buffer", "Look at a queue of batches, check it, clean up behind it."),
    Registered("compact", "forebay.cli.compact", "Fold small appends into large objects."),
    Registered("consume", "forebay.cli.consume", "Write the records of a topic to stdout."),
    Registered("cost", "forebay.cli.cost", "What a log costs per month, or would cost."),
    Registered("dataflow", "forebay.cli.dataflow", "Receive telemetry, keep it on disk, hand it on."),
    Registered("demo", "forebay.cli.demo", "The whole pipeline, killed with -9 and proven record by record."),
    Registered(
        "doctor", "forebay.cli.doctor", "What is installed, which servers answer, how fast the disk is."
    ),
    Registered("groups", "forebay.cli.groups", "Consumer groups: lag, reset, delete."),
    Registered("inspect", "forebay.cli.inspect", "What a file of Forebay is, and whether it is sound."),
    Registered("log", "forebay.cli.log", "Verify a log, explain a record, let go of old ones."),
    Registered("produce", "forebay.cli.produce", "Send lines of stdin or files to a topic."),
    Registered("quiver", "forebay.cli.quiver", "Look into a Quiver store on disk, repair it, forward it."),
    Registered("serve", "forebay.cli.serve", "Serve the log over HTTP."),
    Registered(
        "spark", "forebay.cli.spark", "Export to tables; compact, vacuum, verify and replay on Spark."
    ),
    Registered("store", "forebay.cli.store", "Look into an object store."),
    Registered("stream", "forebay.cli.stream", "Tier streams into a bucket, and read them back."),
    Registered("tail", "forebay.cli.tail", "Follow the end of a topic."),
    Registered("tokens", "forebay.cli.tokens", "Issue, list and revoke the tokens of brokers."),
    Registered("topics", "forebay.cli.topics", "Create, list, describe, change and delete topics."),
    Registered("vacuum", "forebay.cli.vacuum", "Delete objects that nobody names any more."),
    Registered(
        "verify",
        "forebay.cli.verify",
        "Prove that nothing is missing or damaged.",
    ),
    Registered("version", "forebay.cli.version", "Versions of Forebay, Python and the main libraries."),
)


class _LazyGroup(typer.core.TyperGroup):
    """Lists stand-ins, and replaces one by the real command when it is called."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for registered in COMMANDS:
            self.add_command(typer.core.TyperCommand(name=registered.name, help=registered.help))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command by its stand-in."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, None if command is None else load(str(name)), rest


def load(name: str) -> Any:
    """Import a registered command."""
    [registered] = [each for each in COMMANDS if each.name == name]
    app: CommandGroup = importlib.import_module(registered.module).app
    single = len(app.registered_commands) == 1 and not app.registered_groups
    if single and app.registered_commands[0].name == name:
        app.registered_callback = None
    command = typer.main.get_command(app)
    command.name = name
    return command


def root() -> Any:
    """The whole command."""
    epilog = "\b\n" + "\n".join(
        ["Exit codes:", *(f"  {code:<4} {text}" for code, text in EXIT_CODES.items())]
    )
    app = CommandGroup(
        help="Forebay: a durable, leaderless log and ingest buffer on object storage.",
        cls=_LazyGroup,
        epilog=epilog,
        add_completion=True,
        context_settings={"help_option_names": ["--help", "-h"]},
    )
    return typer.main.get_command(app)


def run(words: Sequence[str]) -> int:
    """Run the command with these words and return its exit code."""
    with using(Settings.glance(words, os.environ)):
        try:
            code = root().main(args=list(words or ["--help"]), prog_name=PROGRAM, standalone_mode=False)
            sys.stdout.flush()
            return code if isinstance(code, int) else 0
        except SystemExit as exit_:
            # Typer leaves this way after a completion, and when the reader of a pipe has gone.
            if isinstance(exit_.__context__, BrokenPipeError):
                return EXIT_PIPE
            return exit_.code if isinstance(exit_.code, int) else EXIT_FAILED
        except (Exception, KeyboardInterrupt) as error:
            return end(error)


def _open_closed_streams() -> None:
    """Give a process that was started without stdin, stdout or stderr empty ones.

    Otherwise the next file that is opened, a database for one, gets the number of the missing one, and what
    anybody writes there goes into it.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= STDERR:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for number, (name, mode) in enumerate([("stdin", "r"), ("stdout", "w"), ("stderr", "w")]):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115 - open as long as the process


def main() -> None:
    """Run the command as a process."""
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a letter gets its number; a key must never end a listing.
        getattr(stream, "reconfigure", lambda **_: None)(errors="backslashreplace")
    code = run(sys.argv[1:])
    if code == EXIT_PIPE:
        # Nobody reads any more: keep the interpreter from complaining about its own last flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)
