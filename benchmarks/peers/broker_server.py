"""Servers that the figures of the broker are measured on, as processes of their own.

    python -m benchmarks.peers.broker_server decode      only decodes bodies; prints its URL
    python -m benchmarks.peers.broker_server produce     a broker on a log in memory

The first is the broker's own HTTP server with a handler that decodes a body into its message and answers a
fixed text: what producing would cost if there were no log.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys

__all__ = ["FLUSH_DELAY_MS"]

FLUSH_DELAY_MS = 20


async def _decode_only() -> None:
    from forebay.broker._bodies import decode_json
    from forebay.broker._errors import refusal
    from forebay.broker._http import Reply, Request, Response
    from forebay.broker._limits import HttpLimits
    from forebay.broker._server import HttpServer, Refuser
    from forebay.formats.http_messages import JSON, ProduceRequest
    from forebay.kit.clock import SystemClock

    answer = json.dumps({"results": [], "success_count": 1, "error_count": 0}).encode()

    def handler(request: Request, reply: Reply) -> None:
        decode_json(request.body, ProduceRequest)
        reply(Response(200, answer, JSON))

    class Refusing(Refuser):
        def refused(self, status: int, kind: str, message: str, hint: str) -> Response:
            return refusal(status, kind, message, hint, "")

    server = HttpServer(handler, Refusing(), clock=SystemClock(), limits=HttpLimits())
    host, port = await server.start("127.0.0.1", 0)
    print(f"http://{host}:{port}", flush=True)
    await asyncio.Event().wait()


async def _produce() -> None:
    from forebay._connect import Parts
    from forebay.broker import Broker, BrokerConfig
    from forebay.coordination import MemoryCoordinator
    from forebay.kit.clock import SystemClock
    from forebay.kit.ids import IdSource
    from forebay.kit.metrics import MetricsRegistry
    from forebay.log import ProducerConfig
    from forebay.storage import MemoryStore

    class Forgetful(MemoryStore):
        """Gigabytes of benchmark data must not fill the memory: only the newest objects stay."""

        async def put(self, key: str, data: bytes, *more: object) -> str:  # type: ignore[override]
            version = await super().put(key, data, *more)  # type: ignore[arg-type]
            kept.append(key)
            if len(kept) > 20:
                await super().delete([kept.pop(0)])
            return version

    kept: list[str] = []
    clock = SystemClock()
    ids = IdSource(clock)
    parts = Parts(Forgetful(clock, ids), MemoryCoordinator(), clock, ids, random.Random(1), MetricsRegistry())
    config = BrokerConfig(port=0, producer=ProducerConfig(batch_max_delay_ms=FLUSH_DELAY_MS))
    async with Broker(parts, config) as broker:
        print(broker.url, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    import uvloop

    from forebay.broker import calm_collector

    calm_collector()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as _runner:
        _runner.run(_decode_only() if sys.argv[1] == "decode" else _produce())
