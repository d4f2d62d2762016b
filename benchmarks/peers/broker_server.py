"""Servers that the figures of the broker are measured on, as processes of their own.

    python -m benchmarks.peers.broker_server decode      a broker that only decodes bodies; prints its URL
    python -m benchmarks.peers.broker_server produce     a broker

Both are whole brokers on a log in memory, with routes, authorization, limits and metrics. In the first one
POST /produce decodes a body into its message and answers a fixed text: what producing would cost if there
were no log.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forebay.broker import Broker

__all__ = ["FLUSH_DELAY_MS"]

FLUSH_DELAY_MS = 20


def _only_decoding(broker: Broker) -> None:
    """Have POST /produce do nothing but decode."""
    from forebay.broker._bodies import decode_json
    from forebay.broker._http import Reply, Response
    from forebay.broker._routes import Call, Router
    from forebay.formats.http_messages import JSON, ProduceRequest

    answer = json.dumps({"results": [], "success_count": 1, "error_count": 0}).encode()

    def decode(call: Call, reply: Reply) -> None:
        decode_json(call.request.body, ProduceRequest)
        reply(Response(200, answer, JSON))

    app = broker.app
    app._router = Router(
        replace(route, begin=decode) if route.path == "/produce" else route for route in app._router.routes
    )


async def _serve(*, only_decoding: bool) -> None:
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
        if only_decoding:
            _only_decoding(broker)
        print(broker.url, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    import uvloop

    from forebay.broker import calm_collector

    calm_collector()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as _runner:
        _runner.run(_serve(only_decoding=sys.argv[1] == "decode"))
