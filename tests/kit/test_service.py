from __future__ import annotations

import asyncio
import json

import pytest

from forebay.errors import Unavailable, UsageError
from forebay.kit.service import Health, HealthStatus, Service, ServiceGroup


class Recorded(Service):
    """Writes down what happens to it; fails or waits where told."""

    def __init__(
        self,
        name: str,
        journal: list[str],
        *,
        start_error: Exception | None = None,
        stop_error: Exception | None = None,
    ) -> None:
        self.name = name
        self.report = Health(HealthStatus.STOPPED)
        self.stop_gate: asyncio.Event | None = None
        self.start_gate: asyncio.Event | None = None
        self._journal = journal
        self._start_error = start_error
        self._stop_error = stop_error

    async def start(self) -> None:
        self._journal.append(f"start {self.name}")
        if self.start_gate is not None:
            await self.start_gate.wait()
        if self._start_error is not None:
            raise self._start_error
        self.report = Health(HealthStatus.HEALTHY)

    async def stop(self) -> None:
        self._journal.append(f"stop {self.name}")
        if self.stop_gate is not None:
            await self.stop_gate.wait()
        self.report = Health(HealthStatus.STOPPED)
        if self._stop_error is not None:
            raise self._stop_error

    def health(self) -> Health:
        return self.report


class Mute(Recorded):
    def health(self) -> Health:
        raise RuntimeError("no idea")


@pytest.fixture
def journal() -> list[str]:
    return []


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_services_start_in_order_and_stop_in_reverse(journal: list[str]) -> None:
    async with ServiceGroup("all", [Recorded(name, journal) for name in "abc"]) as group:
        assert group.health().status is HealthStatus.HEALTHY
    assert journal == ["start a", "start b", "start c", "stop c", "stop b", "stop a"]
    assert group.health().status is HealthStatus.STOPPED


async def test_when_one_cannot_start_those_before_it_are_stopped(journal: list[str]) -> None:
    broken = Recorded("c", journal, start_error=Unavailable("port taken"))
    group = ServiceGroup(
        "all", [Recorded("a", journal), Recorded("b", journal), broken, Recorded("d", journal)]
    )
    with pytest.raises(Unavailable, match="port taken"):
        await group.start()
    assert journal == ["start a", "start b", "start c", "stop b", "stop a"]
    assert group.health().status is HealthStatus.STOPPED


async def test_trouble_while_undoing_a_start_is_noted_on_the_first_error(journal: list[str]) -> None:
    stuck = Recorded("a", journal, stop_error=RuntimeError("stuck"))
    broken = Recorded("b", journal, start_error=Unavailable("port taken"))
    with pytest.raises(Unavailable) as caught:
        await ServiceGroup("all", [stuck, broken]).start()
    assert any("stuck" in note for note in caught.value.__notes__)


async def test_a_start_that_is_cancelled_stops_what_was_started(journal: list[str]) -> None:
    slow = Recorded("b", journal)
    slow.start_gate = asyncio.Event()
    group = ServiceGroup("all", [Recorded("a", journal), slow])
    task = asyncio.create_task(group.start())
    await turns()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert journal == ["start a", "start b", "stop a"]


async def test_one_that_cannot_stop_does_not_keep_the_others_running(journal: list[str]) -> None:
    stuck = Recorded("b", journal, stop_error=RuntimeError("stuck"))
    group = ServiceGroup("all", [Recorded("a", journal), stuck, Recorded("c", journal)])
    await group.start()
    with pytest.raises(RuntimeError, match="stuck"):
        await group.stop()
    assert journal[3:] == ["stop c", "stop b", "stop a"]
    await group.stop()
    assert len(journal) == 6


async def test_several_that_cannot_stop_are_all_told_of(journal: list[str]) -> None:
    group = ServiceGroup("all", [Recorded(name, journal, stop_error=OSError(name)) for name in "ab"])
    await group.start()
    with pytest.raises(ExceptionGroup) as caught:
        await group.stop()
    assert [str(error) for error in caught.value.exceptions] == ["b", "a"]


async def test_an_interrupted_stop_can_be_taken_up_again(journal: list[str]) -> None:
    slow = Recorded("b", journal)
    slow.stop_gate = asyncio.Event()
    group = ServiceGroup("all", [Recorded("a", journal), slow])
    await group.start()
    task = asyncio.create_task(group.stop())
    await turns()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    slow.stop_gate.set()
    await group.stop()
    assert journal[2:] == ["stop b", "stop b", "stop a"]


async def test_a_stop_during_the_start_stops_all_of_it(journal: list[str]) -> None:
    slow = Recorded("b", journal)
    slow.start_gate = asyncio.Event()
    group = ServiceGroup("all", [Recorded("a", journal), slow])
    starting = asyncio.create_task(group.start())
    await turns()
    stopping = asyncio.create_task(group.stop())
    await turns()
    slow.start_gate.set()
    await asyncio.gather(starting, stopping)
    assert journal == ["start a", "start b", "stop b", "stop a"]


async def test_a_group_starts_again_after_a_stop_but_not_twice(journal: list[str]) -> None:
    group = ServiceGroup("all", [Recorded("a", journal)])
    await group.stop()
    await group.start()
    with pytest.raises(UsageError, match="runs already"):
        await group.start()
    await group.stop()
    await group.start()
    await group.stop()
    assert journal == ["start a", "stop a"] * 2


async def test_groups_nest(journal: list[str]) -> None:
    inner = ServiceGroup("inner", [Recorded("a", journal), Recorded("b", journal)])
    async with ServiceGroup("outer", [inner, Recorded("c", journal)]) as outer:
        details = outer.health().details["services"]["inner"]["details"]
        assert details["services"]["a"]["status"] == "healthy"
    assert journal == ["start a", "start b", "start c", "stop c", "stop b", "stop a"]


def test_two_services_of_one_name_are_refused(journal: list[str]) -> None:
    with pytest.raises(UsageError, match="share a name"):
        ServiceGroup("all", [Recorded("a", journal), Recorded("a", journal)])


async def test_an_empty_group_is_healthy_while_it_runs() -> None:
    group = ServiceGroup("all", [])
    assert group.health().status is HealthStatus.STOPPED
    async with group:
        assert group.health() == Health(HealthStatus.HEALTHY, (), {"services": {}})
    assert group.health().status is HealthStatus.STOPPED


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        ("healthy healthy", "healthy"),
        ("healthy degraded", "degraded"),
        ("degraded failed", "failed"),
        ("healthy failed", "failed"),
        ("failed stopped", "failed"),
        ("healthy stopped", "degraded"),
        ("stopped stopped", "degraded"),
    ],
)
async def test_a_running_group_is_as_well_as_its_worst_service(
    journal: list[str], statuses: str, expected: str
) -> None:
    services = [Recorded("a", journal), Recorded("b", journal)]
    async with ServiceGroup("all", services) as group:
        for service, status in zip(services, statuses.split(), strict=True):
            service.report = Health(HealthStatus(status))
        health = group.health()
        assert health.status == expected
        assert len(health.reasons) == sum(status != "healthy" for status in statuses.split())


async def test_reasons_name_their_service_and_the_report_is_json(journal: list[str]) -> None:
    sick = Recorded("compactor", journal)
    async with ServiceGroup("all", [Recorded("a", journal), sick]) as group:
        sick.report = Health(HealthStatus.DEGRADED, ("2 failed in a row",), {"passes": 7})
        report = group.health().as_json()
    assert json.loads(json.dumps(report)) == {
        "status": "degraded",
        "reasons": ["compactor: 2 failed in a row"],
        "details": {
            "services": {
                "a": {"status": "healthy", "reasons": [], "details": {}},
                "compactor": {
                    "status": "degraded",
                    "reasons": ["2 failed in a row"],
                    "details": {"passes": 7},
                },
            }
        },
    }


async def test_a_service_that_cannot_tell_its_health_counts_as_failed(journal: list[str]) -> None:
    async with ServiceGroup("all", [Mute("mute", journal), Recorded("b", journal)]) as group:
        health = group.health()
    assert health.status is HealthStatus.FAILED
    assert health.reasons == ("mute: its health cannot be told: RuntimeError('no idea')",)
