"""Who asks, and whether he may.

Three gates, in this order: a page of another site may not use the browser of somebody who runs a broker
(`Origin` must be the broker's own); a broker without tokens listens to its own name only (`Host`, against
names that are made to point at loopback); a broker with tokens wants one.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Final
from urllib.parse import urlsplit

from forebay.broker._config import BrokerConfig, is_loopback
from forebay.broker._errors import HttpRefusal, Unauthenticated
from forebay.broker._http import Request
from forebay.broker._routes import Access, Route
from forebay.broker._tokens import TokenTable

__all__ = ["ANYBODY", "Auth"]

ANYBODY: Final = Access()
"""What a caller may do where no token is wanted: everything."""
HOSTS_REMEMBERED: Final = 64
"""Values of `Host` that were looked at before; nearly all requests have the same few."""


class Auth:
    """The gates of one broker."""

    def __init__(self, config: BrokerConfig, tokens: TokenTable) -> None:
        self._needed = config.needs_tokens
        self._local = not self._needed and is_loopback(config.host)
        self._tokens = tokens

    def access_now(self, request: Request, route: Route, params: Mapping[str, str]) -> Access | None:
        """What the caller may do; None: ask `access`. Raises where it may not call this route."""
        headers = request.headers
        if "origin" in headers:
            _check_origin(headers["origin"], headers.get("host", ""))
        if self._local:
            _check_host(headers.get("host", ""))
        if not self._needed or route.open:
            return ANYBODY
        return self._checked(request, route, params) if self._tokens.fresh else None

    async def access(self, request: Request, route: Route, params: Mapping[str, str]) -> Access:
        """What the token of a request allows; raises where that is not this route."""
        await self._tokens.refresh()
        return self._checked(request, route, params)

    def _checked(self, request: Request, route: Route, params: Mapping[str, str]) -> Access:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise Unauthenticated("this broker wants a token")
        access = self._tokens.access(token.strip())
        if route.action is not None:
            access.check(route.action, params.get("topic"))
        return access


def _check_origin(origin: str, host: str) -> None:
    try:
        own = bool(host) and urlsplit(origin).netloc.lower() == host.lower()
    except ValueError:
        own = False
    if not own:
        raise HttpRefusal(
            403,
            "AccessDenied",
            f"requests from {origin[:200]!r} are not taken",
            hint="use the broker's console",
        )


def _check_host(host: str) -> None:
    if host and not _is_own(host):
        raise HttpRefusal(
            403,
            "AccessDenied",
            f"this broker is not called {host[:200]!r}",
            hint="it serves this machine only; bind another address and issue tokens to serve others",
        )


@lru_cache(maxsize=HOSTS_REMEMBERED)
def _is_own(host: str) -> bool:
    name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
    return is_loopback(name.strip("[]").lower())
