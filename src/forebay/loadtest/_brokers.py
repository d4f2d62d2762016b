"""The brokers of a run: started as processes of their own, sampled, killed or stopped by their own ids."""

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

__all__ = ["BrokerRun", "start_broker"]

START_S_MAX = 120.0
"""Seconds until a broker must say its address."""
STOP_S_MAX = 30.0
"""Seconds a broker has to stop before it is killed."""
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(slots=True)
class BrokerRun:
    """One broker: ours, or one that was there."""

    name: str
    url: str
    process: asyncio.subprocess.Process | None = None
    killed: bool = False
    last: dict[str, Any] = field(default_factory=dict)
    """The last metrics it told."""

    async def sample(self) -> dict[str, Any]:
        """Its metrics and what the kernel says of its process; what cannot be had is left out."""
        found: dict[str, Any] = {"broker": self.name, "alive": False}
        with contextlib.suppress(ForebayError):
            async with Client(self.url) as client:
                self.last = await client.session.get(PATHS.METRICS, dict)
                found |= {"alive": True, **_totals(self.last)}
        if self.process is not None and self.process.returncode is None:
            found |= _process(self.process.pid)
        return found

    async def kill(self) -> None:
        """SIGKILL: no goodbye."""
        if self.process is not None and self.process.returncode is None:
            self.killed = True
            self.process.kill()
            await self.process.wait()

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL where that takes too long."""
        if self.process is None or self.process.returncode is not None:
            return
        self.process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self.process.wait(), STOP_S_MAX)
        except TimeoutError:
            self.process.kill()
            await self.process.wait()


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
    return BrokerRun(name, url, process)


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
        "request_dollars": billing.get("request_dollars"),
    }


def _process(pid: int) -> dict[str, float]:
    """CPU seconds and resident bytes, on Linux."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return {}
    ticks = int(fields[11]) + int(fields[12])
    return {"cpu_s": ticks / TICKS_PER_S, "rss_bytes": int(fields[21]) * PAGE_BYTES}
