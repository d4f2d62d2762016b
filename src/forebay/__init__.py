"""Forebay: a durable, leaderless log and ingest buffer on object storage.

`connect` is the front door; `forebay.aio.connect` is the same for asyncio. Importing this package is cheap:
what is behind the door is loaded when it is opened.
"""

from __future__ import annotations

import importlib
import typing

from forebay._version import __version__

if typing.TYPE_CHECKING:
    from forebay._connect import Location
    from forebay.log import GroupConfig, ReaderConfig, WriterConfig
    from forebay.sync import Bay

__all__ = ["__version__", "connect"]

_LAZY = ("aio", "sync")


def connect(
    location: Location,
    coordinator: Location | None = None,
    *,
    writer_config: WriterConfig | None = None,
    reader_config: ReaderConfig | None = None,
    group_config: GroupConfig | None = None,
) -> Bay:
    """Open a deployment: `with forebay.connect("./data") as bay`.

    `location` is a directory, which holds store and coordinator, or the URL of a store; `coordinator` is then
    the URL of the coordinator.
    """
    from forebay import sync

    return sync.connect(
        location,
        coordinator,
        writer_config=writer_config,
        reader_config=reader_config,
        group_config=group_config,
    )


def __getattr__(name: str) -> typing.Any:
    if name in _LAZY:
        return importlib.import_module(f"forebay.{name}")
    raise AttributeError(f"module 'forebay' has no attribute {name!r}")
