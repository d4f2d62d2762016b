"""The brokers of a run: started as processes of their own, sampled, killed or stopped by their own ids.

A stack that was started by one command is stopped by another, from the process ids in `stack.json`. An id may
belong to somebody else by then, so a process is only ended where its command line is that of our broker.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forebay.client.aio import Client
from forebay.errors import ForebayError, Unavailable
from forebay.formats.http_messages import PATHS
from forebay.loadtest._machine import process_counters

__all__ = ["BrokerRun", "start_broker"]

START_S_MAX = 120.0
"""Seconds until a broker must say its address."""
STOP_S_MAX = 30.0
"""Seconds a broker has to stop before it is killed."""
LOOK_S = 0.05
"""Seconds between two looks at a process that is not our child."""


@dataclass(slots=True)
class BrokerRun:
    """One broker: ours, or one that was there."""

    name: str
    url: str
    process: asyncio.subprocess.Process | None = None
    """Where this program started it."""
    pid: int | None = None
    """Where another one did, or this one; None: it was there before, and is not ours."""
    killed: bool = False
    last: dict[str, Any] = field(default_factory=dict)
    """The last metrics it told."""

    async def sample(self) -> dict[str, Any]:
        """Its metrics and what the kernel says of its process; what cannot be had is left out."""
        found: dict[str, Any] = {"broker": self.name, "alive": False}
        if self.pid is not None and not self.runs:
            return found  # The client would ask again and again, and the samples of the others would wait.
        with contextlib.suppress(ForebayError):
            async with Client(self.url) as client:
                self.last = await client.session.get(PATHS.METRICS, dict)
                found |= {"alive": True, **_totals(self.last)}
        if self.pid is not None and self.runs:
            found |= process_counters(self.pid)
        return found

    @property
    def records(self) -> int:
        """Records that it has counted as appended, as last told."""
        return int(self.last.get("wal", {}).get("records") or 0)

    @property
    def runs(self) -> bool:
        """Whether its process is there, and is the one we mean."""
        if self.process is not None:
            return self.process.returncode is None
        return self.pid is not None and _is_broker(self.pid, self.name)

    async def kill(self) -> None:
        """SIGKILL: no goodbye."""
        if self.runs:
            self.killed = True
            await self._end(signal.SIGKILL)

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL where that takes too long."""
        try:
            await asyncio.wait_for(self._end(signal.SIGTERM), STOP_S_MAX)
        except TimeoutError:
            await self._end(signal.SIGKILL)

    async def _end(self, number: signal.Signals) -> None:
        if self.process is not None:
            if self.process.returncode is None:
                self.process.send_signal(number)
                await self.process.wait()
            return
        if self.pid is not None and self.runs:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)
            while self.runs:  # noqa: ASYNC110 - no child of ours, so nobody tells
                await asyncio.sleep(LOOK_S)


def _is_broker(pid: int, name: str) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return False
    return "serve" in words and name in words and "forebay.cli" in words


async def start_broker(
    name: str, where: Sequence[str], options: Sequence[str], log: Path, environment: dict[str, str]
) -> BrokerRun:
    """`forebay serve` on a free port; returns when it is ready."""
    words = ["serve", "--port", "0", "--output", "json", "--broker-id", name, *where, *options]
    with log.open("wb") as sink:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "forebay.cli",
            *words,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=sink,
            env={**os.environ, **environment},
            # Ctrl-C belongs to the run, which then stops its brokers in order.
            start_new_session=True,
        )
    assert process.stdout is not None
    try:
        line = await asyncio.wait_for(process.stdout.readline(), START_S_MAX)
        url = json.loads(line)["url"]
    except (TimeoutError, ValueError, KeyError) as error:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        tail = await asyncio.to_thread(log.read_text, errors="replace")
        raise Unavailable(f"{name} did not start: {tail[-300:].strip()}", hint=f"see {log.name}") from error
    return BrokerRun(name, url, process, process.pid)


def _totals(metrics: dict[str, Any]) -> dict[str, Any]:
    """The numbers that matter over time."""
    billing = metrics.get("billing", {})
    batcher = metrics.get("batcher", {})
    return {
        "records": metrics.get("wal", {}).get("records"),
        "bytes": metrics.get("wal", {}).get("bytes"),
        "blobs": metrics.get("wal", {}).get("blobs"),
        "pending_bytes": batcher.get("pending_bytes"),
        "commits": batcher.get("commits"),
        "coordination_requests": _sum(metrics.get("coordination", {}).get("requests")),
        "store_requests": _sum(metrics.get("store", {}).get("requests", {}).get("total")),
        "request_dollars": billing.get("request_dollars"),
    }


def _sum(series: Any) -> float:
    """Of a family with labels, or the one value of one without."""
    if isinstance(series, list):
        return sum(float(each["value"]) for each in series)
    return float(series or 0)
