"""A registry as OpenTelemetry instruments: asynchronous ones, which ask the registry when a reader collects.

    provider = MeterProvider(metric_readers=[PeriodicExportingMetricReader(OTLPMetricExporter())])
    otel_view(registry, provider.get_meter("forebay"))

Counters become observable counters, gauges observable gauges. OpenTelemetry has no observable histogram, so a
histogram becomes two observable counters, `NAME.count` and `NAME.sum`, and one more, `NAME.bucket`, with the
label `le` as in Prometheus: everything a backend needs for rates and quantiles, without recording each
observation twice.

The package is an extra and imported where it is used. Families that come into being later are taken in by
`refresh`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from forebay.errors import Unsupported
from forebay.kit.metrics import AnyFamily, CounterFamily, Gauge, GaugeFamily, HistogramFamily, MetricsRegistry

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Meter, Observation

__all__ = ["OtelView", "otel_view"]

Callback = Callable[["CallbackOptions"], Iterable["Observation"]]


def otel_view(registry: MetricsRegistry, meter: Meter) -> OtelView:
    """Offer every family of the registry to the meter; raises `Unsupported` without the extra `otel`."""
    view = OtelView(registry, meter)
    view.refresh()
    return view


class OtelView:
    """A registry that a meter looks at."""

    def __init__(self, registry: MetricsRegistry, meter: Meter) -> None:
        try:
            from opentelemetry.metrics import Observation
        except ImportError as error:
            raise Unsupported("OpenTelemetry is not installed", hint="pip install 'forebay[otel]'") from error
        self._registry = registry
        self._meter = meter
        self._observation = Observation
        self._known: set[str] = set()

    def refresh(self) -> None:
        """Take in the families that are new since the last call."""
        for family in self._registry.families():
            if family.name not in self._known:
                self._known.add(family.name)
                self._add(family)

    def _add(self, family: AnyFamily) -> None:
        meter, text = self._meter, family.help
        if isinstance(family, CounterFamily):
            meter.create_observable_counter(family.name, [self._counter(family)], description=text)
        elif isinstance(family, GaugeFamily):
            meter.create_observable_gauge(family.name, [self._gauge(family)], description=text)
        else:
            for part in ("count", "sum", "bucket"):
                meter.create_observable_counter(
                    f"{family.name}.{part}", [self._histogram(family, part)], description=text
                )

    def _labels(self, family: AnyFamily, values: tuple[str, ...], **more: str) -> dict[str, Any]:
        labels = dict(zip(family.label_names, values, strict=True))
        return {**self._registry.constant_labels, **labels, **more}

    def _counter(self, family: CounterFamily) -> Callback:
        def look(_: CallbackOptions) -> Iterable[Observation]:
            return [
                self._observation(series.value, self._labels(family, values))
                for values, series in family.series()
            ]

        return look

    def _gauge(self, family: GaugeFamily) -> Callback:
        def look(_: CallbackOptions) -> Iterable[Observation]:
            found = []
            for values, series in family.series():
                value = self._value(series)
                if value is not None:
                    found.append(self._observation(value, self._labels(family, values)))
            return found

        return look

    def _value(self, series: Gauge) -> float | None:
        """None where the function behind the gauge fails: one bad gauge must not cost the export."""
        try:
            value = series.value
        except Exception:
            self._registry.count_problem(
                "metrics.function_failures", "Gauge functions that raised when they were read"
            )
            return None
        return value if math.isfinite(value) else None

    def _histogram(self, family: HistogramFamily, part: str) -> Callback:
        def look(_: CallbackOptions) -> Iterable[Observation]:
            found = []
            for values, series in family.series():
                now = series.value
                if part == "bucket":
                    bounds = [*map(str, now.bounds), "+Inf"]
                    counts = [*now.cumulative, now.count]
                    found += [
                        self._observation(count, self._labels(family, values, le=bound))
                        for bound, count in zip(bounds, counts, strict=True)
                    ]
                else:
                    number = now.count if part == "count" else now.sum
                    found.append(self._observation(number, self._labels(family, values)))
            return found

        return look
