"""A port: one giver, one or more destinations, and a rule."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from forebay.dataflow._metrics import DataflowMetrics
from forebay.dataflow._parcels import Parcel, Refused, Sink
from forebay.errors import ForebayError, NotDone

__all__ = ["Broadcast", "Counted", "RoundRobin", "port"]


class Counted:
    """An exporter that gets its data from a receiver, or takes turns with others: one that is passed by, and
    only it, has failed. For one that is alone behind a store the pump counts."""

    def __init__(self, name: str, sink: Sink, metrics: DataflowMetrics) -> None:
        self._name = name
        self._sink = sink
        self._metrics = metrics

    async def take(self, parcel: Parcel) -> None:
        """Hand it over, and count what came of it."""
        metrics, signal = self._metrics, parcel.signal
        try:
            await self._sink.take(parcel)
        except Refused as error:
            metrics.rejected.labels(self._name, signal).inc(error.items)
            metrics.exported.labels(self._name, signal).inc(parcel.items - error.items)
            raise
        except Exception:
            metrics.failures.labels(self._name).inc()
            raise
        metrics.exported.labels(self._name, signal).inc(parcel.items)


class Broadcast:
    """Everybody gets everything; safe when all of them have it."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = sinks

    async def take(self, parcel: Parcel) -> None:
        """Hand it to all, wait for all, then raise what went wrong: what may pass before what is for good."""
        outcomes = await asyncio.gather(*(sink.take(parcel) for sink in self._sinks), return_exceptions=True)
        problems = [each for each in outcomes if isinstance(each, BaseException)]
        # Whoever hears of a refusal gives up, and the other destination would never get it.
        for problem in sorted(problems, key=lambda each: isinstance(each, Refused)):
            raise problem


class RoundRobin:
    """They take turns. One that certainly did not take it passes its turn on."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = sinks
        self._turn = 0

    async def take(self, parcel: Parcel) -> None:
        """Hand it to the next one that takes it. Raises the last error where nobody does."""
        first, self._turn = self._turn, (self._turn + 1) % len(self._sinks)
        problem: ForebayError | None = None
        for step in range(len(self._sinks)):
            try:
                return await self._sinks[(first + step) % len(self._sinks)].take(parcel)
            except NotDone as error:
                problem = error
        assert problem is not None
        raise problem


def port(sinks: Sequence[Sink], strategy: str) -> Sink:
    """The destinations as one."""
    if len(sinks) == 1:
        return sinks[0]
    return RoundRobin(sinks) if strategy == "round_robin" else Broadcast(sinks)
