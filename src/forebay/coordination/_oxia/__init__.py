"""The Oxia tenant: a client of our own on Oxia's wire protocol.

Published clients for Python have no deadlines, one operation per round trip, another routing than the
server's other clients, and stop following leaders after the first update; docs/reference/oxia.md has the
list. This one is asynchronous throughout, writes in batches on one stream per shard, and keeps what
certainly did not happen apart from what may have.
"""

from __future__ import annotations

from forebay.coordination._oxia._config import OxiaConfig, parse_url
from forebay.coordination._oxia._coordinator import OxiaCoordinator

__all__ = ["OxiaConfig", "OxiaCoordinator", "open_oxia"]


def open_oxia(url: str) -> OxiaCoordinator:
    """The coordinator at `oxia://host:port/namespace?timeout_ms=...`. It connects at the first call."""
    return OxiaCoordinator(parse_url(url), url=url)
