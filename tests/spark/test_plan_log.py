"""Which task reads what: every record in one task, tasks alike, as many as there is work and room for."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from forebay.log import Span
from forebay.spark._log_plan import (
    LARGE_TASK,
    ROW_COST,
    TASK_COST_MAX,
    TASK_COST_MIN,
    TASKS_AIM,
    LogTask,
    bundled,
)
from forebay.spark._worker import SLOTS_VARIABLE

MIB = 1024 * 1024


def spans_of(sizes: Sequence[tuple[int, int]], topic: str = "t") -> list[Span]:
    """Neighbours of one partition, each of so many records and bytes."""
    found: list[Span] = []
    for records, size in sizes:
        start = found[-1].end if found else 0
        found.append(Span(topic, 0, start, start + records, size))
    return found


def costs(tasks: Sequence[LogTask], row_bytes: int) -> list[int]:
    """What each task costs where all rows are of one size."""
    return [sum((each.end - each.start) * (row_bytes + ROW_COST) for each in task.ranges) for task in tasks]


@given(
    sizes=st.lists(st.tuples(st.integers(1, 2_000_000), st.integers(0, 200 * MIB)), max_size=40),
    tasks_min=st.none() | st.integers(1, 50),
)
def test_every_record_is_in_one_task_in_order(sizes: list[tuple[int, int]], tasks_min: int | None) -> None:
    spans = spans_of(sizes, "one") + spans_of(sizes[::2], "two")
    tasks = list(bundled(spans, tasks_min))
    read = [each for task in tasks for each in task.ranges]
    for topic in ("one", "two"):
        position = 0
        for each in read:
            if each.topic == topic:
                assert each.start == position < each.end
                position = each.end
        assert position == sum(span.records for span in spans if span.topic == topic)
    if tasks_min is not None:
        assert len(tasks) >= min(tasks_min, sum(span.records for span in spans))


@pytest.mark.parametrize("slots", [1, 2, 3, 8])
def test_slots_that_are_known_get_a_large_and_a_small_task_each(
    monkeypatch: pytest.MonkeyPatch, slots: int
) -> None:
    monkeypatch.setenv(SLOTS_VARIABLE, str(slots))
    tasks = bundled(spans_of([(1_000 * slots, 1_000_000 * slots)] * 300))
    found, fuzz = costs(tasks, 1_000), 2 * 1_000 * slots * (1_000 + ROW_COST)
    assert len(found) == 2 * slots
    assert max(found[:slots]) - min(found[:slots]) <= fuzz
    assert all(abs(LARGE_TASK * each - found[0]) <= LARGE_TASK * fuzz for each in found[slots:])


def ended(tasks: Sequence[LogTask], speeds: Sequence[float]) -> float:
    """When the last task ends, where each slot takes the next one as it gets free; 1 is the best there is."""
    free = [(0.0, speed) for speed in speeds]
    work = costs(tasks, 1_000)
    for cost in work:
        began, speed = heapq.heappop(free)
        heapq.heappush(free, (began + cost / speed, speed))
    return max(free)[0] * sum(speeds) / sum(work)


@pytest.mark.parametrize("slots", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("megabytes", [100, 350, 1_000, 3_000, 5_000, 20_000])
def test_slots_end_together_whether_they_are_alike_or_not(
    monkeypatch: pytest.MonkeyPatch, slots: int, megabytes: int
) -> None:
    monkeypatch.setenv(SLOTS_VARIABLE, str(slots))
    tasks = bundled(spans_of([(1_000, 1_000_000)] * megabytes))
    if len(tasks) >= slots:
        assert ended(tasks, [1.0] * slots) < 1.1
    if len(tasks) > slots:
        assert ended(tasks, [0.7, *[1.0] * (slots - 1)]) < 1.25


@pytest.mark.parametrize("told", ["", "0", "many"])
def test_without_known_slots_there_are_tasks_for_most_machines(
    monkeypatch: pytest.MonkeyPatch, told: str
) -> None:
    monkeypatch.setenv(SLOTS_VARIABLE, told)
    assert len(list(bundled(spans_of([(4_000, 4_000 * 1_000)] * 250)))) == TASKS_AIM


def test_little_work_is_one_task_and_much_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SLOTS_VARIABLE, "2")
    [task] = bundled(spans_of([(10, 1_000)] * 100))
    assert [(each.start, each.end) for each in task.ranges] == [(0, 1_000)]
    # Small rows are work, however few bytes they are.
    tiny = list(bundled(spans_of([(10_000, 10_000)] * 500)))
    assert len(tiny) == 4
    assert min(costs(tiny, 1)) >= TASK_COST_MIN
    assert len(bundled(spans_of([(4_000, 4_000 * 1_000)] * 30))) == 2
    large = list(bundled(spans_of([(4_000, 4_000 * 1_000)] * 2_000)))
    assert len(large) > 4
    assert max(costs(large, 1_000)) <= TASK_COST_MAX + 4_000 * (1_000 + ROW_COST)


def test_a_small_number_asked_for_makes_no_tasks_that_are_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SLOTS_VARIABLE, "2")
    large = spans_of([(4_000, 4_000 * 1_000)] * 2_000)
    assert bundled(large, 2) == bundled(large)


def test_a_session_tells_its_slots_to_what_plans(spark: SparkSession) -> None:
    context = spark.sparkContext
    assert context.environment[SLOTS_VARIABLE] == str(context.defaultParallelism)
