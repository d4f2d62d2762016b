"""`forebay version`: what a bug report needs to say."""

from __future__ import annotations

import importlib.metadata
import platform

from forebay import __version__
from forebay.cli import _output as out
from forebay.cli._options import CommandGroup

__all__ = ["app"]

app = CommandGroup(help="Versions.")

LIBRARIES = (
    "crc32c",
    "msgspec",
    "numpy",
    "obstore",
    "prometheus-client",
    "pyarrow",
    "rich",
    "typer",
    "zstandard",
)


@app.command("version")
def version() -> None:
    """Versions of Forebay, Python and the main libraries."""
    libraries = {name: _installed(name) for name in LIBRARIES}
    if out.is_json():
        out.document({"forebay": __version__, "python": platform.python_version(), "libraries": libraries})
        return
    for name, found in {"forebay": __version__, "python": platform.python_version(), **libraries}.items():
        out.line(f"{name:<18} {found or 'missing'}")


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
