"""Spark over every engine: a data source, sinks, and a session in one line."""

from forebay.spark._session import session

__all__ = ["session"]
