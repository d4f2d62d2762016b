from __future__ import annotations

import io
import sys

import pytest

from forebay.cli import _output as out
from forebay.cli._settings import OutputForm, Settings, using


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def use_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Called in the test itself: pytest puts its own streams back between a fixture and the test."""
    stream = Terminal()
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    return stream


@pytest.mark.parametrize(("color", "coloured"), [(None, True), (True, True), (False, False)])
def test_colour_follows_the_terminal_unless_told_otherwise(
    color: bool | None, coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = use_terminal(monkeypatch)
    with using(Settings(color=color)):
        out.console().print("[red]word[/red]")
    assert ("\x1b" in terminal.getvalue()) is coloured


def test_colour_can_be_forced_where_nobody_looks(capsys: pytest.CaptureFixture[str]) -> None:
    with using(Settings(color=True)):
        out.console().print("[red]word[/red]")
    assert "\x1b" in capsys.readouterr().out
    with using(Settings()):
        out.console().print("[red]word[/red]")
    assert "\x1b" not in capsys.readouterr().out


def test_progress_is_silent_for_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = use_terminal(monkeypatch)
    with using(Settings(output=OutputForm.JSON)), out.progress() as bar:
        bar.add_task("work", total=1)
    assert terminal.getvalue() == ""
    with using(Settings()), out.progress() as bar:
        bar.add_task("work", total=1)
    assert "work" in terminal.getvalue()


def test_progress_is_silent_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with using(Settings()), out.progress() as bar:
        bar.add_task("work", total=1)
    assert capsys.readouterr() == ("", "")


def test_table_aligns_and_cells_are_not_markup(capsys: pytest.CaptureFixture[str]) -> None:
    out.table(("name", "count"), [("a[red]", "1"), ("b", "22")], right=("count",))
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == [
        "name    count",
        "a[red]      1",
        "b          22",
    ]


def test_times_are_in_utc() -> None:
    assert out.time_text(0) == "1970-01-01 00:00:00Z"
    assert out.time_text(1_794_841_654_999) == "2026-11-16 15:07:34Z"


@pytest.mark.parametrize("time_ms", [1 << 62, -(1 << 62), 300_000_000_000_000])
def test_times_beyond_the_calendar_are_numbers(time_ms: int) -> None:
    assert out.time_text(time_ms) == f"{time_ms} ms"


@pytest.mark.parametrize(
    ("text", "shown"),
    [("plain", "plain"), ("grün", "grün"), ("a\nb", "a\\nb"), ("\x1b[31m", "\\x1b[31m"), ("", "")],
)
def test_nothing_printed_can_move_the_cursor(text: str, shown: str) -> None:
    assert out.printable(text) == shown
