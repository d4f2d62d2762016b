"""Where the data is: one directory with everything in it, or a store and a coordinator by their URLs.

A command that needs one takes a parameter `deployment: Deployment` and is decorated with
`@deployment_options`; the three options and their environment variables come with it:

    @app.command()
    @deployment_options
    def topics(deployment: Deployment) -> None: ...

Command line beats environment as a whole: `--store` on the command line also silences FOREBAY_DATA, because
half of one deployment and half of another is never what anybody meant.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from forebay.cli._options import add_parameters, option
from forebay.errors import UsageError

if TYPE_CHECKING:
    from forebay.coordination import Coordinator
    from forebay.storage import ObjectStore

__all__ = ["COORDINATION_FILE", "Deployment", "deployment_options"]

ENVIRONMENT = {"data": "FOREBAY_DATA", "store": "FOREBAY_STORE", "coordinator": "FOREBAY_COORDINATOR"}
COORDINATION_FILE = Path(".forebay", "coordination.db")
"""The embedded coordinator of a data directory, in the part of it that belongs to Forebay itself."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """The store and the coordinator a command works with."""

    data: Path | None = None
    """Directory of an embedded deployment: local store and embedded coordinator. Excludes the other two."""
    store: str | None = None
    """URL of the object store."""
    coordinator: str | None = None
    """URL of the coordinator."""

    @property
    def store_url(self) -> str:
        """What to open as the store. Raises `UsageError` where nothing was given."""
        if self.data is not None:
            return str(self.data.absolute())
        if self.store is None:
            raise UsageError("no store was named", hint="give --data DIR, or --store URL")
        return self.store

    @property
    def coordinator_url(self) -> str:
        """What to open as the coordinator. Raises `UsageError` where nothing was given."""
        if self.data is not None:
            return str(self.data.absolute())
        if self.coordinator is None:
            raise UsageError("no coordinator was named", hint="give --data DIR, or --coordinator URL")
        return self.coordinator

    def open_store(self) -> ObjectStore:
        """Open the store; call it inside the running loop."""
        from forebay.storage import open_store

        # A path, not its text: a directory may be called like a URL.
        return open_store(self.store_url if self.data is None else self.data.absolute())

    def open_coordinator(self) -> Coordinator:
        """Open the coordinator; call it inside the running loop."""
        from forebay.coordination import open_coordinator

        return open_coordinator(self.coordinator_url if self.data is None else self.data.absolute())

    @classmethod
    def choose(cls, given: Mapping[str, str | None], environment: Mapping[str, str]) -> Deployment:
        """The deployment of the command line, or else the one of the environment."""
        values = {name: value for name, value in given.items() if value}
        spelled = {name: f"--{name}" for name in ENVIRONMENT}
        if not values:
            values = {name: environment[key] for name, key in ENVIRONMENT.items() if environment.get(key)}
            spelled = ENVIRONMENT
        if "data" in values and len(values) > 1:
            other = next(name for name in values if name != "data")
            raise UsageError(
                f"{spelled['data']} and {spelled[other]} exclude each other",
                hint="a data directory holds both, a store and a coordinator",
            )
        data = values.get("data")
        return cls(Path(data) if data else None, values.get("store"), values.get("coordinator"))


_HELP = {
    "data": ("DIR", "Directory with everything in it: local store and embedded coordinator."),
    "store": ("URL", "Object store: a directory, s3://bucket/prefix, gs://..., az://..., memory://."),
    "coordinator": (
        "URL",
        "Coordinator: a directory, sqlite:///file, oxia://host:port/namespace, memory://.",
    ),
}

# The environment is not left to Typer, which would fill in each option by itself.
_OPTIONS = tuple(
    option(
        name,
        str | None,
        typer.Option(
            f"--{name}", metavar=metavar, help=f"{text} [env: {ENVIRONMENT[name]}]", show_default=False
        ),
    )
    for name, (metavar, text) in _HELP.items()
)


def deployment_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the three options, and its parameter `deployment` what they say."""

    def consume(values: dict[str, Any]) -> dict[str, Any]:
        return {"deployment": Deployment.choose(values, os.environ)}

    return add_parameters(function, _OPTIONS, consume, without="deployment")
