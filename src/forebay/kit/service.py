"""Things that run in the background: started, stopped, and asked how they are.

Every engine has chores (compaction, retention, heartbeats) and every door has listeners. They share one small
contract, so that a process can start them in order, stop them in reverse, and answer one health request for
all of them. `health` never waits and never raises: it reports what is known already.

Nothing here makes a thread, and all waiting goes through the clock that is handed in.
"""

from __future__ import annotations

import abc
import asyncio
import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from forebay.errors import UsageError

__all__ = ["Health", "HealthStatus", "Service", "ServiceGroup"]


class HealthStatus(enum.StrEnum):
    """How a service is, in one word."""

    HEALTHY = "healthy"
    """It does what it is there for."""
    DEGRADED = "degraded"
    """Something went wrong and may pass by itself."""
    FAILED = "failed"
    """It does not do its work and needs somebody to look."""
    STOPPED = "stopped"
    """It does not run, as asked."""


@dataclass(frozen=True, slots=True)
class Health:
    """How a service is, why, and what else is known."""

    status: HealthStatus
    reasons: tuple[str, ...] = ()
    """One line each. Empty where it is healthy."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Plain data for people and dashboards."""

    def as_json(self) -> dict[str, Any]:
        """Plain data, ready for `json.dumps`."""
        return {"status": self.status.value, "reasons": list(self.reasons), "details": dict(self.details)}


class Service(abc.ABC):
    """Something that runs until it is stopped. A stopped service may be started again."""

    name: str
    """For messages and health reports; unique within its group."""

    @abc.abstractmethod
    async def start(self) -> None:
        """Begin. A service that cannot start leaves nothing running behind and raises."""

    @abc.abstractmethod
    async def stop(self) -> None:
        """End, and return when nothing runs any more. Stopping what does not run succeeds."""

    @abc.abstractmethod
    def health(self) -> Health:
        """How it is right now."""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()


class ServiceGroup(Service):
    """Services that start in order and stop in reverse. A group is a service, so groups nest."""

    def __init__(self, name: str, services: Iterable[Service]) -> None:
        self.name = name
        self._services = list(services)
        names = [service.name for service in self._services]
        if len(set(names)) < len(names):
            raise UsageError(
                f"two services of group {name!r} share a name: {names}", hint="rename one of them"
            )
        self._started: list[Service] = []
        self._running = False
        # A stop that comes while the group is starting waits its turn, so that it sees all that was started.
        self._turn = asyncio.Lock()

    async def start(self) -> None:
        """Start all, in order. If one fails, those before it are stopped again and its error is raised."""
        async with self._turn:
            if self._running or self._started:
                raise UsageError(f"group {self.name!r} runs already", hint="stop it first")
            try:
                for service in self._services:
                    await service.start()
                    self._started.append(service)
                self._running = True
            except (Exception, asyncio.CancelledError) as error:
                for problem in await self._stop_started():
                    error.add_note(f"while stopping what was started: {problem!r}")
                raise

    async def stop(self) -> None:
        """Stop all that was started, last first, also where one of them fails; then raise what went wrong."""
        async with self._turn:
            problems = await self._stop_started()
        if len(problems) == 1:
            raise problems[0]
        if problems:
            raise ExceptionGroup(f"services of group {self.name!r} did not stop cleanly", problems)

    async def _stop_started(self) -> list[Exception]:
        self._running = False
        problems: list[Exception] = []
        while self._started:
            try:
                await self._started[-1].stop()
            except Exception as error:
                problems.append(error)
            # Not reached when this task is cancelled: a second call goes on where this one was interrupted.
            self._started.pop()
        return problems

    def health(self) -> Health:
        """The worst of its services. One that stopped while others run is a reason for concern."""
        reports = {service.name: _ask(service) for service in self._services}
        statuses = {report.status for report in reports.values()}
        details = {"services": {name: report.as_json() for name, report in reports.items()}}
        if not self._running and statuses <= {HealthStatus.STOPPED}:
            return Health(HealthStatus.STOPPED, (), details)
        reasons = [
            f"{name}: {reason}"
            for name, report in reports.items()
            for reason in report.reasons or _plain_reason(report.status)
        ]
        return Health(_worst(statuses), tuple(reasons), details)


def _ask(service: Service) -> Health:
    try:
        return service.health()
    except Exception as error:
        return Health(HealthStatus.FAILED, (f"its health cannot be told: {error!r}",))


def _plain_reason(status: HealthStatus) -> tuple[str, ...]:
    return () if status is HealthStatus.HEALTHY else (status.value,)


def _worst(statuses: set[HealthStatus]) -> HealthStatus:
    if HealthStatus.FAILED in statuses:
        return HealthStatus.FAILED
    return HealthStatus.HEALTHY if statuses <= {HealthStatus.HEALTHY} else HealthStatus.DEGRADED
