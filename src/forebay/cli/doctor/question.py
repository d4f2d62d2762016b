"""The child process that asks a store or a coordinator whether it answers: URL on stdin, JSON on stdout."""

from __future__ import annotations

import asyncio
import json
import os
import sys

from forebay.errors import ForebayError

__all__: list[str] = []

COORDINATION_KEY = "forebay/doctor"
"""A key nobody writes: reading it asks the server everything and changes nothing."""


async def _ask(kind: str, url: str) -> str:
    if kind == "store":
        from forebay.storage import open_store

        async with open_store(url) as store:
            async for page in store.list_pages(page_keys=1):
                return f"{store.url} answers, and holds objects" if page else f"{store.url} answers, empty"
            return f"{store.url} answers, empty"
    from forebay.coordination import open_coordinator

    async with open_coordinator(url) as coordinator:
        await coordinator.get(COORDINATION_KEY)
        return f"{coordinator.url} answers"


def main() -> None:
    """Answer and leave at once: threads of a client that still wait are nobody's concern here."""
    try:
        answer = {"status": "ok", "detail": asyncio.run(_ask(sys.argv[1], sys.stdin.read())), "hint": ""}
    except ForebayError as error:
        answer = {"status": "failed", "detail": error.message, "hint": error.hint}
    sys.stdout.write(json.dumps(answer))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
