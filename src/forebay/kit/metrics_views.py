"""A registry as Prometheus text and as plain JSON data.

The text is made by the prometheus-client library, through a collector on a private registry, so that escaping
and number formats are the library's business. It is imported at the first use: it takes longer to load than
all of the kit, and most processes never render a page.

JSON has no NaN and no infinity. A gauge that is one of these is `null`, and a histogram lists its finite
bounds only: `count` says what the bucket of infinity would.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from forebay.kit._metric_names import prometheus_name
from forebay.kit.metrics import (
    AnyFamily,
    CounterFamily,
    Gauge,
    GaugeFamily,
    HistogramValue,
    MetricsRegistry,
)

if TYPE_CHECKING:
    from prometheus_client.core import Metric

__all__ = ["PROMETHEUS_CONTENT_TYPE", "as_json", "prometheus_text"]

PROMETHEUS_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Content type to serve `prometheus_text` with."""
_QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


def prometheus_text(registry: MetricsRegistry) -> str:
    """Every series in the Prometheus text format."""
    from prometheus_client import CollectorRegistry, generate_latest

    private = CollectorRegistry(auto_describe=False)
    private.register(_Collector(registry))
    return generate_latest(private).decode()


def as_json(registry: MetricsRegistry) -> dict[str, Any]:
    """Every series as plain data, ready for `json.dumps`."""
    view: dict[str, Any] = {
        "labels": dict(registry.constant_labels),
        "counters": {},
        "gauges": {},
        "histograms": {},
    }
    for family in registry.families():
        if isinstance(family, CounterFamily):
            view["counters"][family.name] = [
                {"labels": _labels(family, values), "value": _number(series.value)}
                for values, series in family.series()
            ]
        elif isinstance(family, GaugeFamily):
            view["gauges"][family.name] = [
                {"labels": _labels(family, values), "value": _number(value)}
                for values, value in _gauge_values(registry, family)
            ]
        else:
            view["histograms"][family.name] = [
                {"labels": _labels(family, values), **_histogram_json(series.value)}
                for values, series in family.series()
            ]
    return view


class _Collector:
    """What prometheus-client asks at every rendering."""

    def __init__(self, registry: MetricsRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterable[Metric]:
        for family in self._registry.families():
            metric = self._metric(family)
            if metric.samples:
                yield metric

    def _metric(self, family: AnyFamily) -> Metric:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
        from prometheus_client.utils import floatToGoString

        constant = tuple(self._registry.constant_labels.values())
        labels = (*self._registry.constant_labels, *family.label_names)
        if isinstance(family, CounterFamily):
            counter = CounterMetricFamily(prometheus_name(family.name, "counter"), family.help, labels=labels)
            for values, series in family.series():
                counter.add_metric([*constant, *values], series.value)
            return counter
        if isinstance(family, GaugeFamily):
            gauge = GaugeMetricFamily(prometheus_name(family.name, "gauge"), family.help, labels=labels)
            for values, value in _gauge_values(self._registry, family):
                gauge.add_metric([*constant, *values], value)
            return gauge
        histogram = HistogramMetricFamily(
            prometheus_name(family.name, "histogram"), family.help, labels=labels
        )
        for values, spread in family.series():
            now = spread.value
            bounds = [*now.bounds, math.inf]
            buckets = zip(map(floatToGoString, bounds), [*now.cumulative, now.count], strict=True)
            histogram.add_metric([*constant, *values], list(buckets), now.sum)
        return histogram


def _gauge_values(registry: MetricsRegistry, family: GaugeFamily) -> Iterator[tuple[tuple[str, ...], float]]:
    """Values of the gauges that have one. A function that fails costs its own series, not the page."""
    for values, gauge in family.series():
        value = _ask(registry, gauge)
        if value is not None:
            yield values, value


def _ask(registry: MetricsRegistry, gauge: Gauge) -> float | None:
    try:
        return float(gauge.value)
    except Exception:
        registry.count_problem("metrics.function_failures", "Gauge functions that raised when they were read")
        return None


def _labels(family: AnyFamily, values: tuple[str, ...]) -> dict[str, str]:
    return dict(zip(family.label_names, values, strict=True))


def _number(value: float) -> float | int | None:
    """A value that JSON can hold: whole numbers without a fraction, None for what is not finite."""
    plain = float(value)
    if not math.isfinite(plain):
        return None
    return int(value) if plain.is_integer() else plain


def _histogram_json(now: HistogramValue) -> dict[str, Any]:
    buckets = zip(now.bounds, now.cumulative, strict=True)
    return {
        "count": now.count,
        "sum": _number(now.sum),
        "buckets": [{"le": bound, "count": count} for bound, count in buckets],
        **{name: now.quantile(share) for name, share in _QUANTILES.items()},
    }
