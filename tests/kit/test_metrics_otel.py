"""The OpenTelemetry view: what a reader collects is what the registry holds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from forebay.kit import MetricsRegistry, otel_view

pytest.importorskip("opentelemetry.sdk.metrics")

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, MetricsData, NumberDataPoint

Points = dict[str, list[tuple[float, dict[str, object]]]]


@pytest.fixture
def reader() -> InMemoryMetricReader:
    return InMemoryMetricReader()


@pytest.fixture
def provider(reader: InMemoryMetricReader) -> Iterator[MeterProvider]:
    provider = MeterProvider(metric_readers=[reader], shutdown_on_exit=False)
    yield provider
    provider.shutdown()


def collected(reader: InMemoryMetricReader) -> Points:
    data = reader.get_metrics_data()
    found: Points = {}
    if isinstance(data, MetricsData):
        for resource in data.resource_metrics:
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    found[metric.name] = [
                        (point.value, dict(point.attributes or {}))
                        for point in metric.data.data_points
                        if isinstance(point, NumberDataPoint)
                    ]
    return found


def test_counters_and_gauges_are_collected_with_their_labels(
    reader: InMemoryMetricReader, provider: MeterProvider
) -> None:
    registry = MetricsRegistry({"instance": "a"})
    registry.counter("log.appends", "Batches", ("topic",)).labels("orders").inc(3)
    registry.gauge("log.pending", "Waiting").set(7)
    otel_view(registry, provider.get_meter("forebay"))
    assert collected(reader) == {
        "log.appends": [(3, {"instance": "a", "topic": "orders"})],
        "log.pending": [(7, {"instance": "a"})],
    }


def test_histogram_is_its_count_sum_and_buckets(
    reader: InMemoryMetricReader, provider: MeterProvider
) -> None:
    registry = MetricsRegistry()
    family = registry.histogram("log.seconds", "Time", buckets=(1.0, 2.0))
    for value in (0.5, 1.5, 9.0):
        family.observe(value)
    otel_view(registry, provider.get_meter("forebay"))
    found = collected(reader)
    assert found["log.seconds.count"] == [(3, {})]
    assert found["log.seconds.sum"] == [(11.0, {})]
    assert found["log.seconds.bucket"] == [(1, {"le": "1.0"}), (2, {"le": "2.0"}), (3, {"le": "+Inf"})]


def test_later_families_are_taken_in_by_refresh_and_once(
    reader: InMemoryMetricReader, provider: MeterProvider
) -> None:
    registry = MetricsRegistry()
    view = otel_view(registry, provider.get_meter("forebay"))
    registry.counter("log.late", "Later").inc()
    assert "log.late" not in collected(reader)
    view.refresh()
    view.refresh()
    assert collected(reader)["log.late"] == [(1, {})]


def test_gauge_that_fails_costs_only_itself(reader: InMemoryMetricReader, provider: MeterProvider) -> None:
    registry = MetricsRegistry()

    def broken() -> float:
        raise ValueError("no")

    registry.gauge_function("log.broken", "Broken", broken)
    registry.gauge("log.endless", "Infinite").set(float("inf"))
    registry.counter("log.fine", "Fine").inc()
    otel_view(registry, provider.get_meter("forebay"))
    found = collected(reader)
    assert found["log.fine"] == [(1, {})]
    assert not found.get("log.broken")
    assert not found.get("log.endless")
