"""The `forebay` command. `main` is the installed entry point, `run` the same as a function for tests.

Nothing heavy is imported here or in any module this one imports: `forebay --help` has to answer at once, and
pyarrow alone costs more than that. Commands import what they need when they run.
"""

from __future__ import annotations

from forebay.cli._app import main, run

__all__ = ["main", "run"]
