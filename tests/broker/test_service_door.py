"""The door of a background service: what a probe and a scraper get, and what nobody gets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping

import pytest

from forebay.broker import ServiceDoor
from forebay.broker._http import Request, Response
from forebay.kit import Health, HealthStatus, MetricsRegistry, Service
from forebay.kit.clock import SystemClock


class _Patient(Service):
    """Is as it is told to be."""

    name = "patient"

    def __init__(self, status: HealthStatus) -> None:
        self.status = status

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    def health(self) -> Health:
        if self.status is HealthStatus.STOPPED:
            raise RuntimeError("a secret of the process")
        return Health(self.status, ("a reason",), {"targets": 3})


async def _ask(
    door: ServiceDoor, path: str, method: str = "GET", headers: Mapping[str, str] | None = None
) -> Response:
    answered: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
    work = door.take(Request(method, path, headers or {}), answered.set_result)
    if work is not None:
        await work
    return await answered


@pytest.mark.parametrize(
    ("status", "code"),
    [(HealthStatus.HEALTHY, 200), (HealthStatus.DEGRADED, 200), (HealthStatus.FAILED, 503)],
)
async def test_a_probe_sees_by_the_status_whether_the_service_works(status: HealthStatus, code: int) -> None:
    door = ServiceDoor(_Patient(status), MetricsRegistry(), clock=SystemClock())
    response = await _ask(door, "/health")
    document = json.loads(response.body)
    assert response.status == code
    assert (document["service"], document["status"], document["reasons"]) == (
        "patient",
        status.value,
        ["a reason"],
    )


async def test_metrics_are_those_of_the_service() -> None:
    metrics = MetricsRegistry()
    metrics.counter("log.compaction.passes", "Passes").inc(7)
    door = ServiceDoor(_Patient(HealthStatus.HEALTHY), metrics, clock=SystemClock())
    document = json.loads((await _ask(door, "/metrics?ignored=1")).body)
    assert document["series"]["counters"]["log.compaction.passes"][0]["value"] == 7
    text = (await _ask(door, "/metrics/prometheus")).body
    assert b"log_compaction_passes_total 7.0" in text


async def test_nothing_else_is_there_and_a_defect_tells_no_secrets() -> None:
    door = ServiceDoor(_Patient(HealthStatus.STOPPED), MetricsRegistry(), clock=SystemClock())
    assert (await _ask(door, "/topics")).status == 404
    refused = await _ask(door, "/metrics", "DELETE")
    assert refused.status == 405 and ("Allow", "GET") in refused.headers
    broken = await _ask(door, "/health")
    assert broken.status == 500 and b"secret" not in broken.body
