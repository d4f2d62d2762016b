"""The OpenAPI document, made from the table of routes and the messages: there is nothing to keep in step."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

from forebay._version import __version__
from forebay.broker._http import Response
from forebay.broker._routes import Call, Route
from forebay.formats.http_messages import JSON, PATHS, ErrorBody

__all__ = ["document", "openapi_route"]

_REFERENCE: Final = "#/components/schemas/{name}"
_NAME = {
    "type": "string",
    "minLength": 1,
    "maxLength": 200,
    "pattern": "^[A-Za-z0-9_][A-Za-z0-9._-]*$",
}
_PATH_SCHEMAS: Final = {
    "topic": _NAME,
    "group": _NAME,
    "partition": {"type": "integer", "minimum": 0, "maximum": 99_999},
}
_ERRORS: Final = {
    400: "The request is wrong.",
    401: "No token, or none that counts.",
    403: "The token does not allow it.",
    404: "There is no such thing.",
    408: "The request took too long to arrive.",
    409: "It was refused, or its outcome is unknown.",
    411: "There is no body.",
    413: "The body is too large.",
    415: "The body has another type.",
    429: "Too many wait already.",
    431: "The headers are too long.",
    503: "Not now: see Retry-After.",
}


def openapi_route(routes: Sequence[Route]) -> Route:
    """The route of the document, which describes itself too."""
    made: list[bytes] = []

    async def act(call: Call) -> Response:
        if not made:
            made.append(msgspec.json.encode(document([*routes, route])))
        return Response(200, made[0], JSON)

    route = Route("GET", PATHS.OPENAPI, act, "This document.", open=True, gives={JSON: None})
    return route


def document(routes: Sequence[Route]) -> dict[str, Any]:
    """The document of these routes."""
    structs = sorted(set(_structs(routes)), key=lambda kind: kind.__name__)
    _, components = msgspec.json.schema_components(structs, ref_template=_REFERENCE)
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Forebay broker",
            "version": __version__,
            "description": "Durable, leaderless topics over HTTP.",
        },
        "security": [{}, {"token": []}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _structs(routes: Iterable[Route]) -> Iterable[type[msgspec.Struct]]:
    yield ErrorBody
    for route in routes:
        for kinds in (route.takes, route.gives):
            yield from (kind for kind in kinds.values() if kind is not None)


def _operation(route: Route) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": route.about,
        "operationId": _operation_id(route),
        "parameters": [*_path_parameters(route), *_query_parameters(route)],
        "responses": _responses(route),
    }
    if route.takes:
        operation["requestBody"] = {"required": True, "content": _content(route.takes)}
    if route.open:
        operation["security"] = []
    return operation


def _operation_id(route: Route) -> str:
    words = re.sub(r"[^a-z0-9]+", "_", route.path.lower()).strip("_")
    return f"{route.method.lower()}_{words or 'root'}" + ("_index" if route.path.endswith("e/") else "")


def _path_parameters(route: Route) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "in": "path",
            "required": True,
            "schema": _PATH_SCHEMAS.get(name, {"type": "string", "minLength": 1}),
        }
        for name in re.findall(r"\{(\w+)\}", route.path)
    ]


def _query_parameters(route: Route) -> list[dict[str, Any]]:
    return [
        {
            "name": query.name,
            "in": "query",
            "required": query.required,
            "description": query.about,
            "schema": dict(query.schema),
        }
        for query in route.queries
    ]


def _responses(route: Route) -> dict[str, Any]:
    found: dict[str, Any] = {
        str(route.success): {"description": "Done.", "content": _content(route.gives)},
    }
    error = {"$ref": _REFERENCE.format(name="ErrorBody")}
    for status, text in _ERRORS.items():
        schema: dict[str, Any] = error
        if status in route.statuses and (own := route.gives.get(JSON)) is not None:
            schema = {"anyOf": [error, {"$ref": _REFERENCE.format(name=own.__name__)}]}
        content = {kind: {"schema": schema} if kind == JSON else {} for kind in {JSON, *route.gives}}
        found[str(status)] = {"description": text, "content": content}
    return found


def _content(kinds: Any) -> dict[str, Any]:
    return {
        name: {} if kind is None else {"schema": {"$ref": _REFERENCE.format(name=kind.__name__)}}
        for name, kind in kinds.items()
    }
