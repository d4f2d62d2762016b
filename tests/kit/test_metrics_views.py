from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

from forebay.kit.metrics import MetricsRegistry
from forebay.kit.metrics_views import PROMETHEUS_CONTENT_TYPE, as_json, prometheus_text


@pytest.fixture
def registry() -> MetricsRegistry:
    registry = MetricsRegistry({"instance": "broker-1"})
    registry.counter("buffer.batches_flushed", "Batches flushed").inc(3)
    writes = registry.counter("buffer.manifest_writes", "Manifest writes", labels=("role",))
    writes.labels("producer").inc(2)
    writes.labels("consumer").inc()
    registry.gauge("buffer.queue_length", "Entries waiting").set(4.5)
    duration = registry.histogram("buffer.flush_duration_seconds", "Flushes", buckets=(0.1, 1, 10))
    for value in (0.05, 0.5, 0.5, 20):
        duration.observe(value)
    return registry


def parsed(registry: MetricsRegistry) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(prometheus_text(registry))
        for sample in family.samples
    }


def key(name: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return name, frozenset(labels.items())


def test_prometheus_reads_back_every_sample(registry: MetricsRegistry) -> None:
    one = {"instance": "broker-1"}
    buckets = {"0.1": 1, "1.0": 3, "10.0": 3, "+Inf": 4}
    assert parsed(registry) == {
        key("buffer_batches_flushed_total", **one): 3,
        key("buffer_manifest_writes_total", role="producer", **one): 2,
        key("buffer_manifest_writes_total", role="consumer", **one): 1,
        key("buffer_queue_length", **one): 4.5,
        **{key("buffer_flush_duration_seconds_bucket", le=le, **one): n for le, n in buckets.items()},
        key("buffer_flush_duration_seconds_count", **one): 4,
        key("buffer_flush_duration_seconds_sum", **one): 21.05,
    }


def test_prometheus_text_has_help_and_type_of_every_family(registry: MetricsRegistry) -> None:
    lines = prometheus_text(registry).splitlines()
    assert "# HELP buffer_batches_flushed_total Batches flushed" in lines
    assert "# TYPE buffer_batches_flushed_total counter" in lines
    assert "# TYPE buffer_queue_length gauge" in lines
    assert "# TYPE buffer_flush_duration_seconds histogram" in lines
    assert not any("." in line.split("{")[0] for line in lines if not line.startswith("#"))


def test_a_counter_named_total_is_not_doubled() -> None:
    registry = MetricsRegistry()
    registry.counter("quiver.gc.evictions_total", "Evictions").inc()
    assert parsed(registry) == {key("quiver_gc_evictions_total"): 1}
    assert list(as_json(registry)["counters"]) == ["quiver.gc.evictions_total"]


def test_label_values_of_any_kind_survive_the_text_format() -> None:
    registry = MetricsRegistry()
    family = registry.gauge("a", "Text with \\ and\nnewline", labels=("topic",))
    values = ['quo"te', "back\\slash", "new\nline", "grün", "{le=1}", ""]
    for number, value in enumerate(values):
        family.labels(value).set(number)
    assert parsed(registry) == {key("a", topic=value): n for n, value in enumerate(values)}


def test_a_label_value_that_is_not_unicode_costs_itself_not_the_page() -> None:
    registry = MetricsRegistry()
    registry.gauge("a", "A", labels=("file",)).labels("odd\udcff").set(1)
    assert parsed(registry) == {key("a", file="odd?"): 1}


@pytest.mark.parametrize("value", [float("inf"), float("-inf")])
def test_infinite_gauges_are_numbers_in_prometheus_and_null_in_json(value: float) -> None:
    registry = MetricsRegistry()
    registry.gauge("a", "A").set(value)
    assert parsed(registry) == {key("a"): value}
    assert as_json(registry)["gauges"] == {"a": [{"labels": {}, "value": None}]}


def test_a_failing_gauge_function_costs_its_series_not_the_page() -> None:
    registry = MetricsRegistry()
    registry.gauge_function("bad", "Bad", lambda: 1 / 0)
    registry.gauge_function("good", "Good", lambda: 1)
    assert parsed(registry) == {key("good"): 1}
    assert as_json(registry)["gauges"] == {"bad": [], "good": [{"labels": {}, "value": 1}]}
    assert registry.counter("metrics.function_failures", "").labels().value == 2


def test_a_gauge_function_that_returns_no_number_counts_as_failing() -> None:
    registry = MetricsRegistry()
    registry.gauge_function("bad", "Bad", lambda: "many")  # type: ignore[arg-type, return-value]
    assert parsed(registry) == {}
    assert registry.counter("metrics.function_failures", "").labels().value == 1


def test_an_empty_registry_is_an_empty_page() -> None:
    assert prometheus_text(MetricsRegistry()) == ""


def test_a_family_without_series_is_not_on_the_page() -> None:
    registry = MetricsRegistry()
    registry.counter("a", "A", labels=("topic",))
    assert prometheus_text(registry) == ""


def test_the_global_registry_of_the_library_is_left_alone(registry: MetricsRegistry) -> None:
    prometheus_text(registry)
    assert not any(metric.name.startswith("buffer") for metric in REGISTRY.collect())


def test_the_content_type_is_the_one_of_the_library() -> None:
    from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4

    assert PROMETHEUS_CONTENT_TYPE == CONTENT_TYPE_PLAIN_0_0_4


def test_json_view_keeps_dots_and_says_everything(registry: MetricsRegistry) -> None:
    view = as_json(registry)
    assert view["labels"] == {"instance": "broker-1"}
    assert view["counters"] == {
        "buffer.batches_flushed": [{"labels": {}, "value": 3}],
        "buffer.manifest_writes": [
            {"labels": {"role": "producer"}, "value": 2},
            {"labels": {"role": "consumer"}, "value": 1},
        ],
    }
    assert view["gauges"] == {"buffer.queue_length": [{"labels": {}, "value": 4.5}]}
    [histogram] = view["histograms"]["buffer.flush_duration_seconds"]
    assert histogram == {
        "labels": {},
        "count": 4,
        "sum": 21.05,
        "buckets": [{"le": 0.1, "count": 1}, {"le": 1.0, "count": 3}, {"le": 10.0, "count": 3}],
        "p50": pytest.approx(0.55),
        "p95": 10.0,
        "p99": 10.0,
    }


def test_json_view_is_strict_json_and_a_copy(registry: MetricsRegistry) -> None:
    registry.histogram("empty_seconds", "Empty")
    view: dict[str, Any] = as_json(registry)
    assert json.loads(json.dumps(view, allow_nan=False)) == view
    registry.counter("buffer.batches_flushed", "").inc()
    view["labels"]["instance"] = "changed"
    assert view["counters"]["buffer.batches_flushed"][0]["value"] == 3
    assert registry.constant_labels == {"instance": "broker-1"}


def test_large_counters_stay_exact_in_json() -> None:
    registry = MetricsRegistry()
    registry.counter("a.bytes", "Bytes").inc(2**60 + 1)
    assert as_json(registry)["counters"]["a.bytes"][0]["value"] == 2**60 + 1


def test_numbers_of_numpy_become_plain_ones() -> None:
    import numpy as np

    registry = MetricsRegistry()
    registry.counter("a", "A").inc(np.int64(3))  # type: ignore[arg-type]
    registry.gauge("b", "B").set(np.float32(0.5))  # type: ignore[arg-type]
    view = as_json(registry)
    assert json.loads(json.dumps(view)) == view


def test_importing_the_kit_does_not_load_the_prometheus_library() -> None:
    script = "import sys, forebay.kit; sys.exit('prometheus_client' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=120, check=False).returncode == 0
