"""The console: static files beside this module, read once and served from memory, with strict headers.

The files are public, like any page: they hold no data. What the page shows it asks of the other routes, with
the token of whoever sits in front of it. The policy allows scripts and styles of this origin only, no
inline ones, no frames, no other site.
"""

from __future__ import annotations

import mimetypes
from functools import lru_cache
from pathlib import Path
from typing import Final

from forebay.broker._errors import HttpRefusal
from forebay.broker._http import Response
from forebay.broker._routes import Call, Route
from forebay.formats.http_messages import PATHS

__all__ = ["FOLDER", "SECURITY_HEADERS", "console_routes"]

FOLDER: Final = Path(__file__).parent / "console"
INDEX: Final = "index.html"
FILE_BYTES_MAX: Final = 8 * 1024 * 1024
"""Largest file of the console that is served."""
SECURITY_HEADERS: Final = (
    (
        "Content-Security-Policy",
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "DENY"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cache-Control", "no-cache"),
)


@lru_cache(maxsize=1)
def _files() -> dict[str, tuple[bytes, str]]:
    """Every file of the folder, by its path below it. What is not in here cannot be asked for."""
    found = {}
    for path in sorted(FOLDER.rglob("*")) if FOLDER.is_dir() else []:
        if path.is_file() and path.stat().st_size <= FILE_BYTES_MAX:
            kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
            text = kind.startswith("text/") or kind in ("application/javascript", "image/svg+xml")
            found[path.relative_to(FOLDER).as_posix()] = (
                path.read_bytes(),
                f"{kind}; charset=utf-8" if text else kind,
            )
    return found


async def _index(call: Call) -> Response:
    return _file(INDEX)


async def _asset(call: Call) -> Response:
    return _file(call.params["file"])


async def _nested(call: Call) -> Response:
    return _file(f"{call.params['folder']}/{call.params['file']}")


async def _home(call: Call) -> Response:
    return Response(307, headers=(("Location", f"{PATHS.CONSOLE}/"),))


def _file(name: str) -> Response:
    found = _files().get(name)
    if found is None:
        raise HttpRefusal(404, "NotFound", "there is no such page", hint="the console is at /console")
    data, kind = found
    return Response(200, data, kind, SECURITY_HEADERS)


def console_routes() -> list[Route]:
    """The page, its files, and the way to it."""
    text = {"text/html": None}
    return [
        Route("GET", "/", _home, "To the console.", open=True, gives=text, success=307),
        Route("GET", PATHS.CONSOLE, _home, "To the console.", open=True, gives=text, success=307),
        Route("GET", f"{PATHS.CONSOLE}/", _index, "The console.", open=True, gives=text),
        Route("GET", f"{PATHS.CONSOLE}/{{file}}", _asset, "A file of the console.", open=True, gives=text),
        Route(
            "GET",
            f"{PATHS.CONSOLE}/{{folder}}/{{file}}",
            _nested,
            "A file of the console.",
            open=True,
            gives=text,
        ),
    ]
