"""Spark over every engine: a data source, sinks, and a session in one line.

Importing this costs nothing and needs no PySpark; what does is looked up when it is first asked for.
"""

import typing

from forebay.spark._errors import DataLossFound
from forebay.spark._session import session

if typing.TYPE_CHECKING:
    from forebay.spark._source import ForebaySource

__all__ = ["DataLossFound", "ForebaySource", "session"]


def __getattr__(name: str) -> typing.Any:
    if name != "ForebaySource":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from forebay.spark._source import ForebaySource

    globals()[name] = ForebaySource
    return ForebaySource
