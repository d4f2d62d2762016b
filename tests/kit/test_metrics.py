from __future__ import annotations

import gc
import math
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import LimitExceeded, UsageError
from forebay.kit import metrics
from forebay.kit.metrics import BYTES_BUCKETS, OTHER, SECONDS_BUCKETS, Histogram, MetricsRegistry

FAMILY_KINDS = ["counter", "gauge", "histogram"]


@pytest.fixture
def registry() -> MetricsRegistry:
    return MetricsRegistry()


@pytest.fixture
def eager_thread_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def in_threads(count: int, work: Callable[[], None]) -> None:
    together = threading.Barrier(count)

    def run() -> None:
        together.wait()
        work()

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_asking_again_returns_the_same_family_and_series(registry: MetricsRegistry) -> None:
    first = registry.counter("log.appends", "Batches committed", labels=("topic",))
    again = registry.counter("log.appends", "Another text", labels=["topic"])
    assert again is first
    assert again.help == "Batches committed"
    assert first.labels("orders") is again.labels(topic="orders")
    assert first.labels("orders") is not first.labels("refunds")


def test_registries_do_not_count_into_each_other() -> None:
    one, two = MetricsRegistry(), MetricsRegistry()
    one.counter("a", "A").inc(5)
    assert two.counter("a", "A").labels().value == 0


def test_counters_count_whole_numbers_exactly(registry: MetricsRegistry) -> None:
    counter = registry.counter("log.bytes_written", "Bytes")
    counter.inc()
    counter.add(2**60)
    assert counter.labels().value == 2**60 + 1


@pytest.mark.parametrize("amount", [-1, -0.5, float("nan")])
def test_counters_never_shrink(registry: MetricsRegistry, amount: float) -> None:
    counter = registry.counter("a", "A")
    counter.inc(3)
    with pytest.raises(UsageError, match="cannot grow by"):
        counter.inc(amount)
    assert counter.labels().value == 3


def test_gauges_go_both_ways(registry: MetricsRegistry) -> None:
    gauge = registry.gauge("queue_length", "Waiting")
    gauge.set(10)
    gauge.inc()
    gauge.dec(4)
    gauge.add(-2)
    assert gauge.labels().value == 5


def test_a_gauge_function_is_asked_at_every_reading(registry: MetricsRegistry) -> None:
    queue = [1, 2, 3]
    gauge = registry.gauge_function("queue_length", "Waiting", lambda: len(queue))
    assert gauge.labels().value == 3
    queue.clear()
    assert gauge.labels().value == 0


def test_the_latest_gauge_function_counts_and_set_replaces_it(registry: MetricsRegistry) -> None:
    registry.gauge_function("queue_length", "Waiting", lambda: 1)
    gauge = registry.gauge_function("queue_length", "Waiting", lambda: 2)
    assert gauge.labels().value == 2
    gauge.set(7)
    assert gauge.labels().value == 7


def test_histograms_count_into_inclusive_buckets(registry: MetricsRegistry) -> None:
    histogram = registry.histogram("sizes", "Sizes", buckets=[1, 10, 100])
    for value in (0, 1, 1.5, 10, 100, 101, 5_000):
        histogram.observe(value)
    now = histogram.labels().value
    assert now.bounds == (1.0, 10.0, 100.0)
    assert now.cumulative == (2, 4, 5)
    assert now.count == 7
    assert now.sum == 5_213.5


def test_nan_is_not_observed(registry: MetricsRegistry) -> None:
    histogram = registry.histogram("sizes", "Sizes")
    with pytest.raises(UsageError, match="NaN"):
        histogram.observe(float("nan"))
    assert histogram.labels().value.count == 0


@pytest.mark.parametrize("bounds", [SECONDS_BUCKETS, BYTES_BUCKETS])
def test_ready_made_buckets_are_accepted(registry: MetricsRegistry, bounds: tuple[float, ...]) -> None:
    assert registry.histogram("sizes", "Sizes", buckets=bounds).bounds == bounds


@pytest.mark.parametrize(
    "bounds", [[], [1, 1], [2, 1], [float("inf")], [1, float("nan")], [float("nan"), 1]], ids=str
)
def test_buckets_must_ascend_and_be_finite(registry: MetricsRegistry, bounds: list[float]) -> None:
    with pytest.raises(UsageError, match="buckets of metric 'sizes'"):
        registry.histogram("sizes", "Sizes", buckets=bounds)


def test_buckets_are_limited(registry: MetricsRegistry) -> None:
    with pytest.raises(LimitExceeded, match="BUCKETS_MAX"):
        registry.histogram("sizes", "Sizes", buckets=range(metrics.BUCKETS_MAX + 1))


def test_quantiles_interpolate_inside_a_bucket() -> None:
    histogram = Histogram((10.0, 20.0, 40.0))
    for value in range(1, 41):
        histogram.observe(value)
    now = histogram.value
    assert [now.quantile(share) for share in (0.25, 0.5, 0.75, 1.0)] == [10.0, 20.0, 30.0, 40.0]


def test_quantiles_of_nothing_are_unknown_and_those_above_the_last_bound_are_that_bound() -> None:
    histogram = Histogram((1.0, 2.0))
    assert histogram.value.quantile(0.5) is None
    histogram.observe(1_000)
    assert histogram.value.quantile(0.5) == 2.0


@given(st.lists(st.floats(0, 29), min_size=1, max_size=200), st.sampled_from([0.01, 0.5, 0.95, 0.99, 1.0]))
def test_a_quantile_lies_in_the_bucket_of_the_true_one(values: list[float], share: float) -> None:
    histogram = Histogram()
    for value in values:
        histogram.observe(value)
    estimate = histogram.value.quantile(share)
    assert estimate is not None
    true = sorted(values)[math.ceil(share * len(values)) - 1]
    place = next(place for place, bound in enumerate(SECONDS_BUCKETS) if true <= bound)
    lower, upper = (0.0, *SECONDS_BUCKETS)[place : place + 2]
    assert lower <= estimate <= upper


@pytest.mark.parametrize("first", FAMILY_KINDS)
@pytest.mark.parametrize("second", FAMILY_KINDS)
def test_a_name_has_one_kind(registry: MetricsRegistry, first: str, second: str) -> None:
    getattr(registry, first)("a.b", "Text")
    if first == second:
        getattr(registry, second)("a.b", "Text")
    else:
        with pytest.raises(UsageError, match=f"already a {first}, not a {second}"):
            getattr(registry, second)("a.b", "Text")


def test_a_name_has_one_set_of_labels_and_buckets(registry: MetricsRegistry) -> None:
    registry.histogram("a", "A", labels=("topic",), buckets=(1, 2))
    with pytest.raises(UsageError, match="already a histogram with labels topic"):
        registry.histogram("a", "A", labels=("topic", "partition"), buckets=(1, 2))
    with pytest.raises(UsageError, match="already a histogram") as caught:
        registry.histogram("a", "A", labels=("topic",), buckets=(1, 3))
    assert "one set of buckets" in caught.value.hint


@pytest.mark.parametrize(
    "name",
    [
        *["", "A", "aB", "1a", "_a", "a-b", "a b", "a:b", "a..b", ".a", "a.", "a.1b", "ä", "a\n", "a" * 201],
        *["flush_ms", "wait_milliseconds", "age_hours", "latency_us.max"],
        *["seconds_waited", "seconds.waited", "ratio_of_hits", "total_bytes", "a_total_bytes"],
    ],
)
def test_names_unfit_for_prometheus_or_with_the_wrong_unit_are_refused(
    registry: MetricsRegistry, name: str
) -> None:
    with pytest.raises(UsageError) as caught:
        registry.counter(name, "Text")
    assert caught.value.hint
    assert registry.families() == []


@pytest.mark.parametrize(
    "name",
    [
        *["buffer.batches_flushed", "buffer.bytes_flushed", "buffer.flush_duration_seconds"],
        *["quiver.gc.evictions_total", "cpu_seconds_total", "seconds", "quiver.core.bytes", "total"],
    ],
)
def test_names_of_the_engines_are_accepted(registry: MetricsRegistry, name: str) -> None:
    assert registry.counter(name, "Text").name == name


def test_only_counters_end_in_total(registry: MetricsRegistry) -> None:
    with pytest.raises(UsageError, match="ends in total"):
        registry.gauge("requests_total", "Text")


def test_a_metric_needs_a_help_text(registry: MetricsRegistry) -> None:
    with pytest.raises(UsageError, match="no help text"):
        registry.counter("a", " ")


@pytest.mark.parametrize(
    "labels",
    [("le",), ("quantile",), ("__name__",), ("1",), ("Topic",), ("a-b",), ("",), ("a", "a"), ("instance",)],
    ids=str,
)
def test_unfit_labels_are_refused(labels: tuple[str, ...]) -> None:
    registry = MetricsRegistry({"instance": "one"})
    with pytest.raises(UsageError, match="metric 'a'"):
        registry.counter("a", "A", labels=labels)


def test_one_string_is_not_a_set_of_labels(registry: MetricsRegistry) -> None:
    with pytest.raises(UsageError, match="one string") as caught:
        registry.counter("a", "A", labels="topic")
    assert caught.value.hint == "write labels=('topic',)"


def test_unfit_constant_labels_are_refused() -> None:
    with pytest.raises(UsageError, match="the registry"):
        MetricsRegistry({"le": "1"})


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("counter", "a.b"), ("counter", "a_b")),
        (("counter", "a"), ("counter", "a_total")),
        (("histogram", "a"), ("counter", "a.count")),
        (("gauge", "a.sum"), ("histogram", "a")),
    ],
)
def test_names_that_fall_together_in_prometheus_are_refused(
    registry: MetricsRegistry, first: tuple[str, str], second: tuple[str, str]
) -> None:
    getattr(registry, first[0])(first[1], "Text")
    with pytest.raises(UsageError, match="would both be"):
        getattr(registry, second[0])(second[1], "Text")


def test_labels_must_be_given_all_and_by_one_way(registry: MetricsRegistry) -> None:
    family = registry.counter("a", "A", labels=("topic", "partition"))
    assert family.labels("orders", 0) is family.labels(partition="0", topic="orders")
    wrong: list[Callable[[], object]] = [
        family.labels,
        lambda: family.labels("orders"),
        lambda: family.labels("orders", 0, 1),
        lambda: family.labels("orders", partition=0),
        lambda: family.labels(topic="orders"),
        lambda: family.labels(topic="orders", partition=0, more=1),
        family.inc,
    ]
    for call in wrong:
        with pytest.raises(UsageError, match="topic, partition"):
            call()


def test_past_the_limit_label_sets_share_the_series_other() -> None:
    registry = MetricsRegistry(series_per_metric_max=3)
    family = registry.counter("a", "A", labels=("topic", "partition"))
    for partition in range(10):
        family.labels("orders", partition).inc()
    values = {labels: series.value for labels, series in family.series()}
    assert values == {("orders", "0"): 1, ("orders", "1"): 1, ("orders", "2"): 1, (OTHER, OTHER): 7}
    assert registry.counter("metrics.series_overflowed", "").labels().value == 7
    family.labels("orders", 1).inc()
    assert family.labels("orders", 1).value == 2


def test_a_removed_series_makes_room() -> None:
    registry = MetricsRegistry(series_per_metric_max=1)
    family = registry.gauge("a", "A", labels=("topic",))
    family.labels("old").set(1)
    family.remove("old")
    family.remove(topic="never there")
    family.labels("new").set(2)
    assert [labels for labels, _ in family.series()] == [("new",)]


def test_families_are_limited(registry: MetricsRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "METRICS_MAX", 2)
    registry.counter("a", "A")
    registry.counter("b", "B")
    with pytest.raises(LimitExceeded, match="METRICS_MAX"):
        registry.counter("c", "C")
    registry.counter("a", "A")


def test_a_registry_without_room_for_any_series_is_refused() -> None:
    with pytest.raises(UsageError, match="series_per_metric_max"):
        MetricsRegistry(series_per_metric_max=0)


def test_long_label_values_are_cut(registry: MetricsRegistry) -> None:
    family = registry.counter("a", "A", labels=("topic",))
    assert family.labels("x" * 100_000) is family.labels("x" * metrics.LABEL_VALUE_CHARS_MAX)


class Yielding(float):
    """A one that lets other threads run between the reading and the writing of what it is added to."""

    def __radd__(self, other: float) -> float:
        time.sleep(0)
        return other + 1.0


@pytest.mark.usefixtures("eager_thread_switches")
def test_threads_lose_no_counts(registry: MetricsRegistry) -> None:
    one = Yielding(1)
    counter = registry.counter("a", "A", labels=("worker",))
    gauge = registry.gauge("b", "B")
    histogram = registry.histogram("c", "C", buckets=(1,))

    def work() -> None:
        for turn in range(200):
            counter.labels(turn % 7).inc(one)
            gauge.inc(one)
            histogram.observe(one)

    in_threads(4, work)
    assert sum(series.value for _, series in counter.series()) == 800
    assert gauge.labels().value == 800
    now = histogram.labels().value
    assert (now.count, now.sum, now.cumulative) == (800, 800, (800,))


@pytest.mark.usefixtures("eager_thread_switches")
def test_threads_that_ask_at_once_get_one_family() -> None:
    registry = MetricsRegistry()
    found: list[object] = []
    in_threads(8, lambda: found.append(registry.counter("a", "A").labels()))
    assert len(set(map(id, found))) == 1


def test_counting_inside_a_signal_handler_does_not_deadlock(registry: MetricsRegistry) -> None:
    counter = registry.counter("signals", "Signals").labels()
    before = signal.signal(signal.SIGUSR1, lambda *_: counter.inc())
    try:
        with counter._lock:
            signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert counter.value == 1


def test_a_registry_goes_with_its_owner() -> None:
    local = MetricsRegistry()
    local.counter("a", "A").inc()
    gone = weakref.ref(local)
    del local
    gc.collect()
    assert gone() is None
