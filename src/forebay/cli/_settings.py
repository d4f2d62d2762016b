"""What every command knows without asking: output form, colour, debugging.

The settings live in a context variable, because they are given before the subcommand, after it, or both, and
because an error in the command line has to be reported in the form that same command line asks for. So `run`
starts with what a glance at the words tells, and each level that is parsed properly adds what it was given.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

__all__ = ["OutputForm", "Settings", "settings", "using"]


class OutputForm(enum.StrEnum):
    """How results are printed."""

    TEXT = "text"
    JSON = "json"


@dataclass(frozen=True, slots=True)
class Settings:
    """What the command line and the environment say about the conversation itself."""

    output: OutputForm = OutputForm.TEXT
    """Text for people, or JSON for programs. Default text."""
    color: bool | None = None
    """Colour on or off. Default None: on where a terminal is looking and NO_COLOR is not set."""
    debug: bool = False
    """Whether errors come with a traceback. Default no."""

    def merged(self, output: OutputForm | None, color: bool | None, debug: bool | None) -> Settings:
        """These settings, with what is not None put over them."""
        return Settings(
            output=self.output if output is None else output,
            color=self.color if color is None else color,
            debug=self.debug if debug is None else debug,
        )

    @classmethod
    def glance(cls, words: Sequence[str], environment: Mapping[str, str]) -> Settings:
        """The settings that hold until the words are parsed: enough to report that they cannot be."""
        options = list(_options(words))
        return cls(
            output=OutputForm.JSON if _asks_for_json(options) else OutputForm.TEXT,
            color=False if environment.get("NO_COLOR") or "--no-color" in options else None,
            debug="--debug" in options or environment.get("FOREBAY_DEBUG", "") not in ("", "0"),
        )


def _options(words: Sequence[str]) -> Iterator[str]:
    for word in words:
        if word == "--":
            return
        yield word


def _asks_for_json(options: Sequence[str]) -> bool:
    if any(word in ("--output=json", "-ojson") for word in options):
        return True
    return any(word in ("--output", "-o") and value == "json" for word, value in itertools.pairwise(options))


_DEFAULT = Settings()
_current: ContextVar[Settings] = ContextVar("forebay_cli_settings")


def settings() -> Settings:
    """The settings of the command that is running."""
    return _current.get(_DEFAULT)


def change(output: OutputForm | None, color: bool | None, debug: bool | None) -> None:
    """Put what one level of the command line was given over the settings so far."""
    _current.set(settings().merged(output, color, debug))


@contextmanager
def using(initial: Settings) -> Iterator[None]:
    """Begin with these settings and restore the former ones afterwards."""
    token = _current.set(initial)
    try:
        yield
    finally:
        _current.reset(token)
