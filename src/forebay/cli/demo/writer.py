"""The writer process that the demo kills: it appends until it dies, and prints a line per acknowledgement.

A line is printed only after the append has returned, so whatever stands in the pipe was acknowledged. If the
demo itself dies, the next line finds the pipe closed and ends this process too.
"""

from __future__ import annotations

import asyncio
import itertools
import sys

from forebay.cli.demo.journal import Journal
from forebay.storage import open_store

__all__: list[str] = []


async def main(directory: str, prefix: str, writer: str) -> None:
    """Append for ever."""
    async with open_store(directory) as store:
        journal = Journal(store, prefix)
        await journal.read_head()
        for batch in itertools.count():
            await journal.append(writer, batch)
            sys.stdout.write(f"{batch}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
