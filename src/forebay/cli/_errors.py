"""How a command ends when it does not end well: two lines for people, one document for programs, one code.

A traceback tells the writer of the code where, and the reader of the terminal nothing, so it is shown only
when asked for.
"""

from __future__ import annotations

import errno
import json
import sys
import traceback

import typer

from forebay.cli._settings import OutputForm, settings
from forebay.errors import ForebayError, NotDone, NotFound, UsageError

__all__ = ["EXIT_CODES", "EXIT_FAILED", "EXIT_INTERRUPTED", "EXIT_PIPE", "EXIT_USAGE", "end"]

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_PIPE = 141
EXIT_CODES = {
    0: "done",
    EXIT_FAILED: "the operation failed",
    EXIT_USAGE: "wrong usage",
    EXIT_INTERRUPTED: "interrupted",
    EXIT_PIPE: "the reader of the output went away",
}

_OS_HINTS = {
    errno.EACCES: "check the permissions, or choose another place",
    errno.EPERM: "check the permissions, or choose another place",
    errno.EROFS: "the file system is read-only: choose another place",
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "a part of the path is a file: choose another place",
    errno.EEXIST: "choose a name that is not taken",
    errno.ENOSPC: "make room, or choose another place",
}


def end(error: BaseException) -> int:
    """Report `error` on stderr as the settings ask, and return the exit code."""
    if isinstance(error, BrokenPipeError):
        return EXIT_PIPE
    if settings().debug:
        traceback.print_exception(error)
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        _report("Interrupted", "interrupted", "")
        return EXIT_INTERRUPTED
    kind, message, hint, code = _describe(error)
    _report(kind, message, hint)
    return code


def _describe(error: BaseException) -> tuple[str, str, str, int]:
    if isinstance(error, ForebayError):
        # Some errors are both, like a missing bucket: it was tried, and found to be impossible.
        wrong_usage = isinstance(error, UsageError) and not isinstance(error, NotDone)
        code = EXIT_USAGE if wrong_usage else EXIT_FAILED
        return type(error).__name__, error.message, error.hint or _default_hint(error), code
    if isinstance(error, typer.TyperException):
        context = getattr(error, "ctx", None)
        path = context.command_path if context is not None else "forebay"
        return "UsageError", error.format_message(), f"{path} --help shows what it takes", error.exit_code
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return type(error).__name__, where + error.strerror, _OS_HINTS.get(error.errno or 0, ""), EXIT_FAILED
    message = f"unexpected {type(error).__name__}: {error}"
    return type(error).__name__, message, "this is a defect of Forebay; --debug shows where", EXIT_FAILED


def _default_hint(error: ForebayError) -> str:
    return "forebay store ls URL shows which keys there are" if isinstance(error, NotFound) else ""


def _report(kind: str, message: str, hint: str) -> None:
    message, hint = (" ".join(text.split()) for text in (message, hint))
    if settings().output is OutputForm.JSON:
        line = json.dumps({"error": {"type": kind, "message": message, "hint": hint}})
    else:
        line = f"error: {message}" + (f"\nhint: {hint}" if hint else "")
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
