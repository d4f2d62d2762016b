"""A plan, running: nodes are started from the end of the flow to its beginning, and stopped the other way.

Stopping: the receivers take nothing more and answer what is under way, all at once; the stores finish their
segments and hand on what the destinations take, for a while; then everything is closed. What was not handed
on is on disk and is handed on after the next start. A destination that is down ends the handing on at once.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Mapping
from types import TracebackType
from typing import Final, Self, TypeAlias

from forebay.dataflow._dispatch import Counted, port
from forebay.dataflow._grpc_receiver import GrpcReceiver
from forebay.dataflow._http_receiver import HttpReceiver
from forebay.dataflow._intake import STOP_GRACE_S, Intake
from forebay.dataflow._metrics import DataflowMetrics
from forebay.dataflow._otap_exporter import OtapExporter
from forebay.dataflow._otap_receiver import OtapReceiver
from forebay.dataflow._otlp_exporter import OtlpExporter
from forebay.dataflow._parcels import Sink
from forebay.dataflow._parquet import ParquetExporter
from forebay.dataflow._persistence import Persistence
from forebay.dataflow._plan import Node, Plan
from forebay.dataflow._settings import (
    OtapExporterSettings,
    OtapReceiverSettings,
    OtlpExporterSettings,
    OtlpReceiverSettings,
    ParquetSettings,
    PersistenceSettings,
)
from forebay.errors import ForebayError, UsageError
from forebay.kit.clock import Clock, SystemClock
from forebay.kit.ids import IdSource
from forebay.kit.metrics import MetricsRegistry
from forebay.quiver import QuiverFailed, QuiverStats

__all__ = ["Dataflow"]

_log = logging.getLogger(__name__)

DRAIN_S: Final = 10.0
"""How long a stop tries to hand on what is there."""

_Receiver: TypeAlias = GrpcReceiver | HttpReceiver | OtapReceiver
_Exporter: TypeAlias = OtlpExporter | OtapExporter | ParquetExporter
_Part: TypeAlias = _Receiver | Persistence | _Exporter
_PROTOCOLS: Final = {GrpcReceiver: "grpc", HttpReceiver: "http", OtapReceiver: "otap"}


class Dataflow:
    """Everything a file describes. Use it with `async with`, or with `start` and `stop`."""

    def __init__(
        self,
        plan: Plan,
        *,
        clock: Clock | None = None,
        randomness: random.Random | None = None,
        ids: IdSource | None = None,
        metrics: MetricsRegistry | None = None,
        drain_s: float = DRAIN_S,
    ) -> None:
        self._plan = plan
        self._clock = clock or SystemClock()
        self._random = randomness or random.SystemRandom()
        self._ids = ids or IdSource()
        self._registry = metrics or MetricsRegistry()
        self._metrics = DataflowMetrics(self._registry)
        self._drain_s = drain_s
        self._receivers: dict[str, list[_Receiver]] = {}
        self._stores: dict[str, Persistence] = {}
        self._started: list[_Part] = []
        self._failure: QuiverFailed | None = None
        self._has_failed = asyncio.Event()
        self._is_hurried = asyncio.Event()

    async def failure(self) -> QuiverFailed:
        """Wait until a store can take nothing more until it is opened again, and say why."""
        await self._has_failed.wait()
        assert self._failure is not None
        return self._failure

    @property
    def addresses(self) -> dict[str, dict[str, str]]:
        """Where each receiver listens: `{"otlp_receiver": {"grpc": "127.0.0.1:4317"}}`."""
        return {
            name: {_PROTOCOLS[type(each)]: str(each.address) for each in parts}
            for name, parts in self._receivers.items()
        }

    def stats(self) -> dict[str, QuiverStats]:
        """What is in each store now."""
        return {name: store.quiver.stats() for name, store in self._stores.items()}

    async def start(self) -> None:
        """Start all. If one fails, those before it are stopped again and its error is raised."""
        if self._started:
            raise UsageError("the dataflow runs already", hint="stop it first")
        sinks: dict[str, Sink] = {}
        try:
            for node in reversed(self._plan.nodes.values()):
                for part in self._parts(node, sinks):
                    await part.start()
                    self._started.append(part)
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Stop all, receivers first."""
        receivers = [each for each in self._started if isinstance(each, _Receiver)]
        await asyncio.gather(*map(self._stop_receiver, receivers))
        for part in reversed([each for each in self._started if each not in receivers]):
            try:
                if isinstance(part, Persistence):
                    await part.drain(self._drain_s)
                await part.stop()
            except ForebayError as error:
                _log.warning("dataflow.stop.failed: %s", error)
        self._started.clear()

    async def _stop_receiver(self, receiver: _Receiver) -> None:
        stopping = asyncio.ensure_future(receiver.stop(STOP_GRACE_S))
        hurried = asyncio.ensure_future(self._is_hurried.wait())
        await asyncio.wait({stopping, hurried}, return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        if stopping.done():
            stopping.result()
            return
        stopping.cancel()
        await asyncio.wait({stopping})
        await receiver.stop(0)

    def hurry(self) -> None:
        """Do not wait for destinations when stopping, nor any longer where it has begun."""
        self._is_hurried.set()
        for store in self._stores.values():
            store.hurry()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def _parts(self, node: Node, sinks: dict[str, Sink]) -> list[_Part]:
        settings = node.settings
        if isinstance(settings, OtlpReceiverSettings | OtapReceiverSettings):
            return list(self._receiver(node, settings, sinks))
        part: Persistence | _Exporter
        if isinstance(settings, PersistenceSettings):
            part = self._stores[node.name] = self._persistence(node, sinks)
        elif isinstance(settings, ParquetSettings):
            part = ParquetExporter(settings, clock=self._clock, ids=self._ids)
        elif isinstance(settings, OtapExporterSettings):
            part = OtapExporter(node.name, settings, self._metrics)
        else:
            assert isinstance(settings, OtlpExporterSettings)
            part = OtlpExporter(node.name, settings, self._metrics)
        sinks[node.name] = part
        return [part]

    def _receiver(
        self, node: Node, settings: OtlpReceiverSettings | OtapReceiverSettings, sinks: Mapping[str, Sink]
    ) -> list[_Receiver]:
        sink = port([self._counted(name, sinks[name]) for name in node.destinations], node.strategy)
        intake = Intake(node.name, settings, sink, self._metrics)
        parts: list[_Receiver] = []
        if isinstance(settings, OtapReceiverSettings):
            parts.append(OtapReceiver(settings, intake))
        else:
            if settings.grpc is not None:
                parts.append(GrpcReceiver(settings, intake))
            if settings.http is not None:
                parts.append(HttpReceiver(settings, intake))
        self._receivers[node.name] = parts
        return parts

    def _counted(self, name: str, sink: Sink) -> Sink:
        return sink if isinstance(sink, Persistence) else Counted(name, sink, self._metrics)

    def _persistence(self, node: Node, sinks: Mapping[str, Sink]) -> Persistence:
        alone = sum(isinstance(each.settings, PersistenceSettings) for each in self._plan.nodes.values()) == 1
        return Persistence(
            node,
            sinks,
            clock=self._clock,
            randomness=self._random,
            # Quiver's gauges have no label for the store, so that several stores must not share them.
            registry=self._registry if alone else MetricsRegistry(),
            metrics=self._metrics,
            on_failure=self._fail,
        )

    def _fail(self, error: QuiverFailed) -> None:
        self._failure = self._failure or error
        self._has_failed.set()
