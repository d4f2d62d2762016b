"""The table of routes: what exists, who may, which messages go in and out.

One table for three readers: the dispatcher, the authorization, and the OpenAPI document.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec

from forebay.broker._config import Role
from forebay.broker._errors import HttpRefusal
from forebay.broker._http import Reply, Request, Response

__all__ = ["Action", "Call", "Query", "Route", "Router"]


class Action(enum.StrEnum):
    """What a token may allow."""

    READ = "read"
    APPEND = "append"
    ADMIN = "admin"
    MONITOR = "monitor"


class Access:
    """What the caller of a request may do. Made by the authorization; see `_tokens`."""

    def check(self, action: Action, topic: str | None) -> None:
        """Raise `AccessDenied` where it is not allowed. `topic` None: something that belongs to no topic."""

    def allows(self, action: Action, topic: str | None) -> bool:
        """Whether it is allowed."""
        return True

    @property
    def valid(self) -> bool:
        """Whether it still is: a token may be revoked while a stream goes on."""
        return True

    async def renew(self) -> None:
        """Look again whether it is, if the last look is too long ago."""


@dataclass(slots=True, eq=False)
class Call:
    """A request on its way to a handler, with what the path said and who asks."""

    request: Request
    access: Access
    params: Mapping[str, str]

    @property
    def topic(self) -> str:
        """The topic named in the path."""
        return self.params["topic"]

    @property
    def partition(self) -> int:
        """The partition named in the path."""
        text = self.params["partition"]
        if not (text.isascii() and text.isdecimal() and len(text) <= 5):
            raise HttpRefusal(404, "NotFound", f"{text!r} is no partition", hint="a number from 0 on")
        return int(text)


Act: TypeAlias = Callable[[Call], Awaitable[Response]]
Begin: TypeAlias = Callable[[Call, Reply], None]
"""Begins, or raises, and calls the second argument once with the answer: no task waits for it."""


@dataclass(frozen=True, slots=True)
class Query:
    """A field of the query string, for the document."""

    name: str
    about: str
    required: bool = False
    schema: Mapping[str, Any] = field(default_factory=lambda: {"type": "string"})


@dataclass(frozen=True, slots=True)
class Route:
    """One method of one path."""

    method: str
    path: str
    """With parts in braces."""
    act: Act | None
    """None: there is `begin`."""
    about: str
    action: Action | None = None
    """What a token must allow for the topic of the path; None: the handler checks, or nothing is needed."""
    open: bool = False
    """Whether it is served without a token anywhere."""
    role: Role | None = None
    """Role that the broker needs; None: any."""
    takes: Mapping[str, type[msgspec.Struct] | None] = field(default_factory=dict)
    """Body by content type. Empty: no body."""
    gives: Mapping[str, type[msgspec.Struct] | None] = field(default_factory=dict)
    """Answer by content type."""
    queries: tuple[Query, ...] = ()
    statuses: tuple[int, ...] = ()
    """Statuses beside 200 and the common errors."""
    success: int = 200
    begin: Begin | None = None


class Router:
    """Finds the route of a request."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self.routes = tuple(routes)
        self._plain: dict[str, dict[str, Route]] = {}
        self._patterns: list[tuple[re.Pattern[str], dict[str, Route]]] = []
        by_path: dict[str, dict[str, Route]] = {}
        for route in self.routes:
            by_path.setdefault(route.path, {})[route.method] = route
        for path, methods in by_path.items():
            if "{" not in path:
                self._plain[path] = methods
            else:
                pattern = re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", path)
                self._patterns.append((re.compile(pattern), methods))

    def find(self, request: Request) -> tuple[Route, dict[str, str]]:
        """The route and the decoded parts of the path; raises 404 and 405."""
        path = request.path
        methods, params = self._plain.get(path), {}
        if methods is None:
            for pattern, candidates in self._patterns:
                if match := pattern.fullmatch(path):
                    methods = candidates
                    params = {name: request.part(text) for name, text in match.groupdict().items()}
                    break
            else:
                raise HttpRefusal(
                    404,
                    "NotFound",
                    f"there is no {path[:200]!r}",
                    hint="GET /openapi.json lists what there is",
                )
        route = methods.get("GET" if request.method == "HEAD" else request.method)
        if route is None:
            allowed = ", ".join(sorted(methods))
            error = HttpRefusal(
                405, "MethodNotAllowed", f"{path[:200]!r} takes {allowed}", hint=f"use {allowed}"
            )
            error.headers = (("Allow", allowed),)
            raise error
        return route, params
