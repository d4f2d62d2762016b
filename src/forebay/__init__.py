"""Forebay: a durable, leaderless log and ingest buffer on object storage."""

from forebay._version import __version__

__all__ = ["__version__"]
