from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forebay import __version__
from forebay.cli import _app
from forebay.cli import version as version_module
from forebay.cli._errors import EXIT_CODES

Run = Callable[..., Any]
SECONDS_MAX = 120
RunProcess = Callable[..., subprocess.CompletedProcess[bytes]]


def test_help_names_every_command_and_every_exit_code(forebay: Run) -> None:
    ran = forebay("--help")
    assert ran.code == 0
    for command in _app.COMMANDS:
        assert command.help in " ".join(ran.out.split())
    for code, meaning in EXIT_CODES.items():
        assert f"{code:<4} {meaning}" in ran.out


def test_no_words_at_all_show_the_help(forebay: Run) -> None:
    assert forebay() == forebay("--help")


def test_help_line_of_the_map_is_the_first_line_of_the_command() -> None:
    for registered in _app.COMMANDS:
        assert _app.load(registered.name).help.splitlines()[0] == registered.help


def test_help_and_version_import_nothing_heavy() -> None:
    script = (
        "import sys; from forebay.cli import run; run(['--help']); run(['version']);"
        "print('heavy:', sorted({'pyarrow', 'obstore', 'numpy', 'grpc', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=SECONDS_MAX, check=True
    )
    assert done.stdout.endswith("heavy: []\n")


@pytest.mark.parametrize(
    "words",
    [
        ("--output", "json", "version"),
        ("version", "--output", "json"),
        ("-o", "json", "version"),
        ("version", "-ojson"),
        ("--output", "text", "version", "--output=json"),
    ],
)
def test_output_is_accepted_before_and_after_the_command(forebay: Run, words: tuple[str, ...]) -> None:
    ran = forebay(*words)
    assert ran.code == 0
    assert ran.document["forebay"] == __version__


def test_last_output_option_wins(forebay: Run) -> None:
    assert forebay("--output", "json", "version", "--output", "text").out.startswith("forebay ")


def test_settings_of_one_run_do_not_reach_the_next(forebay: Run) -> None:
    forebay("version", "--output", "json")
    assert forebay("version").out.startswith("forebay ")


@pytest.mark.parametrize(
    "words", [("versoin",), ("store",), ("store", "ls"), ("version", "--loud"), ("version", "extra")]
)
def test_wrong_usage_is_one_error_line_one_hint_line_and_code_2(forebay: Run, words: tuple[str, ...]) -> None:
    ran = forebay(*words)
    assert (ran.code, ran.out) == (2, "")
    error, hint = ran.err.splitlines()
    assert error.startswith("error: ")
    assert hint.startswith("hint: forebay")


@pytest.mark.parametrize(
    "words",
    [("versoin", "-o", "json"), ("--output=json", "store", "ls"), ("store", "ls", "--output", "json")],
)
def test_wrong_usage_is_json_where_json_was_asked_for(forebay: Run, words: tuple[str, ...]) -> None:
    ran = forebay(*words)
    assert ran.code == 2
    assert ran.error.keys() == {"type", "message", "hint"}
    assert ran.error["type"] == "UsageError"


def test_misspelt_command_suggests_the_right_one(forebay: Run) -> None:
    assert "'version'" in forebay("versoin").err


def test_defect_is_one_line_and_a_traceback_only_when_asked_for(
    forebay: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: str) -> str:
        raise RuntimeError("two\nlines")

    monkeypatch.setattr(version_module, "_installed", broken)
    ran = forebay("version")
    assert ran.code == 1
    assert ran.err.splitlines()[0] == "error: unexpected RuntimeError: two lines"
    assert "Traceback" not in ran.err
    for shown in (forebay("version", "--debug"), forebay("--debug", "version")):
        assert "Traceback" in shown.err
    monkeypatch.setenv("FOREBAY_DEBUG", "1")
    assert "Traceback" in forebay("version").err
    monkeypatch.setenv("FOREBAY_DEBUG", "0")
    assert "Traceback" not in forebay("version").err


def test_interrupt_ends_with_130_and_no_traceback(forebay: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(version_module, "_installed", interrupted)
    ran = forebay("version")
    assert ran.code == 130
    assert "Traceback" not in ran.err


def test_sigint_ends_the_process_with_130() -> None:
    script = (
        "import os, signal, sys; import forebay.cli.version as v; from forebay.cli import main;"
        "v._installed = lambda name: os.kill(os.getpid(), signal.SIGINT);"
        "sys.argv = ['forebay', 'version']; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, timeout=SECONDS_MAX, check=False
    )
    assert done.returncode == 128 + signal.SIGINT
    assert b"Traceback" not in done.stderr


def test_closed_pipe_is_quiet() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "forebay.cli", "version"],
            stdout=writer,
            stderr=subprocess.PIPE,
            timeout=SECONDS_MAX,
            check=False,
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def complete(forebay_process: RunProcess, words: str, position: int) -> list[str]:
    done = forebay_process(
        environment={
            "_FOREBAY_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(position),
        }
    )
    return done.stdout.decode().split()


def test_shell_completion_offers_commands_and_options(forebay_process: RunProcess) -> None:
    assert complete(forebay_process, "forebay sto", 1) == ["store"]
    assert complete(forebay_process, "forebay store ", 2) == ["ls", "cat", "stat"]
    assert "--limit" in complete(forebay_process, "forebay store ls --", 3)


def test_version_as_json_names_every_library(forebay: Run) -> None:
    document = forebay("version", "-o", "json").document
    assert document["python"] == ".".join(map(str, sys.version_info[:3]))
    assert set(document["libraries"]) == set(version_module.LIBRARIES)
    assert all(document["libraries"].values())


@pytest.mark.parametrize("words", [(), ("--no-color",)])
def test_no_colour_where_nobody_looks(forebay_process: RunProcess, words: tuple[str, ...]) -> None:
    done = forebay_process(*words, "doctor")
    assert b"\x1b" not in done.stdout


def test_json_is_valid_whatever_the_colour(forebay: Run) -> None:
    assert json.loads(forebay("version", "-o", "json", "--color").out)


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_are_empty_ones(tmp_path: Path, closed: str) -> None:
    """A file that is opened next would get the number of the missing stream, and be written to."""
    script = f'exec "$0" -m forebay.cli "$@" {closed}'
    for words in (["topics", "create", "t"], ["produce", "t"], ["topics", "list"], ["consume", "t", "-e"]):
        command = ["sh", "-c", script, sys.executable, *words, "--data", str(tmp_path / "data")]
        ran = subprocess.run(command, input=b"", capture_output=True, timeout=120, check=False)
        assert ran.returncode == 0 and ran.stderr == b"", (words, ran)
