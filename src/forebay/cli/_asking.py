"""Asking before something is gone for ever."""

from __future__ import annotations

import sys

import typer

from forebay.errors import UsageError

__all__ = ["ask"]


def ask(question: str) -> None:
    """Go on only at a yes, typed or piped; where nobody answers, say how it goes without a question."""
    try:
        said_yes = typer.confirm(question, err=True)
    except typer.Abort:
        if sys.stdin.isatty():
            raise
        raise UsageError("nobody answered", hint="add --yes to go on without a question") from None
    if not said_yes:
        raise typer.Abort
