"""Options that several commands share, written once.

Typer reads the options of a command from the signature of its function. A shared option is therefore a
parameter added to that signature and taken away again before the function is called. The alternative,
subclassing the command and option classes below Typer, reaches into parts that change between its versions.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar

import typer

from forebay.cli._settings import OutputForm, change

__all__ = ["CommandGroup", "add_parameters", "option"]

Function = TypeVar("Function", bound=Callable[..., Any])
PANEL = "Common options"


def option(name: str, kind: Any, info: Any, default: Any = None) -> inspect.Parameter:
    """A keyword parameter that Typer reads as an option."""
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info]
    )


def add_parameters(
    function: Callable[..., Any],
    added: Sequence[inspect.Parameter],
    consume: Callable[[dict[str, Any]], dict[str, Any]],
    *,
    without: str = "",
) -> Callable[..., Any]:
    """A command function with more options than `function` has parameters.

    `consume` gets the values of the added options and returns the arguments to call `function` with in their
    place. `without` names the parameter of `function` that `consume` provides, if there is one.
    """
    signature = inspect.signature(function, eval_str=True)
    kept = [parameter for parameter in signature.parameters.values() if parameter.name != without]
    names = [parameter.name for parameter in added]

    @functools.wraps(function)
    def command(**arguments: Any) -> Any:
        values = {name: arguments.pop(name) for name in names}
        return function(**arguments, **consume(values))

    command.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[
            *[parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in kept],
            *added,
        ]
    )
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in (*kept, *added)}
    return command


_COMMON = (
    option(
        "output_form",
        OutputForm | None,
        typer.Option(
            "--output",
            "-o",
            help="Text for people (the default), or JSON for programs.",
            show_default=False,
            rich_help_panel=PANEL,
        ),
    ),
    option(
        "color",
        bool | None,
        typer.Option(
            "--color/--no-color",
            help="Colour, whatever the terminal and NO_COLOR say.",
            show_default=False,
            rich_help_panel=PANEL,
        ),
    ),
    option(
        "debug",
        bool | None,
        typer.Option(
            "--debug",
            help="Show tracebacks (or FOREBAY_DEBUG=1).",
            show_default=False,
            rich_help_panel=PANEL,
        ),
    ),
)


def _take_common(values: dict[str, Any]) -> dict[str, Any]:
    change(values["output_form"], values["color"], values["debug"])
    return {}


def _group() -> None:
    """Stand where a group has nothing of its own to do but to take the common options."""


class CommandGroup(typer.Typer):
    """A group of commands, each of which takes the common options, as does the group itself."""

    def __init__(self, *, help: str, add_completion: bool = False, **settings: Any) -> None:  # noqa: A002
        super().__init__(help=help, rich_markup_mode=None, add_completion=add_completion, **settings)
        self.callback(help=help)(_group)

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Function], Function]:
        """As in Typer; the function stays as it is and can be called by others."""
        register = super().command(name, **settings)

        def decorate(function: Function) -> Function:
            register(add_parameters(function, _COMMON, _take_common))
            return function

        return decorate

    def callback(self, *args: Any, **settings: Any) -> Callable[[Function], Function]:
        """As in Typer."""
        register = super().callback(*args, **settings)

        def decorate(function: Function) -> Function:
            register(add_parameters(function, _COMMON, _take_common))
            return function

        return decorate
