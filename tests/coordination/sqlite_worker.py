"""What other processes do in the tests of the embedded coordinator. Run as a script: MODE PATH ARGUMENTS."""

from __future__ import annotations

import asyncio
import fcntl
import os
import resource
import signal
import sys

from forebay.coordination import ABSENT, SqliteCoordinator
from forebay.errors import ForebayError, PreconditionFailed


def say(line: str) -> None:
    """One line in one system call: a kill leaves it whole or not there."""
    os.write(1, f"{line}\n".encode())


async def _increment(coordinator: SqliteCoordinator, key: str, report: bool) -> None:
    while True:
        record = await coordinator.get(key)
        value, when = (int(record.value), record.version) if record else (0, ABSENT)
        if report:
            say("try")
        try:
            await coordinator.put(key, str(value + 1).encode(), when)
        except PreconditionFailed:
            if report:
                say("lost")
            continue
        if report:
            say("ack")
        return


async def count(path: str, key: str, times: str) -> None:
    """Increment a number of times; an endless number where it is negative, with a report."""
    left = int(times)
    async with SqliteCoordinator(path) as coordinator:
        while left != 0:
            await _increment(coordinator, key, report=left < 0)
            left -= 1


async def hold(path: str, key: str, timeout_ms: str) -> None:
    """Hold an ephemeral key until killed."""
    coordinator = SqliteCoordinator(path)
    session = await coordinator.open_session(int(timeout_ms))
    await coordinator.put(key, b"held", ABSENT, session=session)
    say("held")
    await asyncio.Event().wait()


async def fork(path: str) -> None:
    """Use a coordinator on the wrong side of a fork."""
    coordinator = SqliteCoordinator(path)
    await coordinator.put("d/a", b"parent")
    child = os.fork()
    if child == 0:
        for call in (coordinator.get("d/a"), coordinator.put("d/a", b"child"), coordinator.close()):
            try:
                await call
                say("allowed")
            except ForebayError as error:
                say(f"{type(error).__name__}: {error.hint}")
        os._exit(0)
    await asyncio.to_thread(os.waitpid, child, 0)
    record = await coordinator.get("d/a")
    say("parent" if record and record.value == b"parent" else "broken")
    await coordinator.close()


async def full(path: str) -> None:
    """Write until no file may grow any further, then with the limit lifted."""
    async with SqliteCoordinator(path) as coordinator:
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, hard))
        written = await _write_until_refused(coordinator)
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        for number in range(written):
            assert await coordinator.get(f"d/{number}") is not None
        assert await coordinator.get(f"d/{written}") is None
        await coordinator.put(f"d/{written}", b"", ABSENT)
        say("healed")


async def _write_until_refused(coordinator: SqliteCoordinator) -> int:
    for number in range(10_000):
        try:
            await coordinator.put(f"d/{number}", os.urandom(4096), ABSENT)
        except ForebayError as error:
            say(f"{type(error).__mro__[1].__name__}: {bool(error.hint)}")
            return number
    raise AssertionError("the limit did not hold")


async def orphan(path: str) -> None:
    """Stand in the middle of a write until killed, and leave a forked child behind."""
    coordinator = SqliteCoordinator(path)
    await coordinator.put("d/a", b"parent")
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        signal.pause()
    fcntl.flock(coordinator._writer._loop_descriptor, fcntl.LOCK_EX)  # type: ignore[union-attr]
    say(str(child))
    await asyncio.Event().wait()


if __name__ == "__main__":
    modes = {"count": count, "hold": hold, "fork": fork, "full": full, "orphan": orphan}
    asyncio.run(modes[sys.argv[1]](*sys.argv[2:]))  # type: ignore[operator]
