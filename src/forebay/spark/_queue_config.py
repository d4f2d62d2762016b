"""The engine's configuration of a queue, from the options of Spark."""

from __future__ import annotations

from typing import Any, Final

from forebay.buffer import BufferConfig
from forebay.errors import UsageError
from forebay.spark._options import Options

__all__ = ["queue_config"]

NAMES: Final = {"manifest_path": "manifest", "data_path_prefix": "prefix"}
"""Of the engine's settings, those that are options."""


def queue_config(options: Options, **more: Any) -> BufferConfig:
    """Where a queue lies, and `more` of the engine's settings. What is wrong is told under the name of the
    option, which is the one that the caller knows."""
    defaults = BufferConfig()
    given: dict[str, Any] = {
        name: options.text(option, getattr(defaults, name)) for name, option in NAMES.items()
    }
    try:
        return BufferConfig(**given, **more)
    except UsageError as error:
        name, _, rest = error.message.partition(" ")
        raise UsageError(f"{NAMES.get(name, name)} {rest}", hint=error.hint) from error
