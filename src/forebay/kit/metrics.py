"""A registry of counters, gauges and histograms.

A registry belongs to whoever made it and is handed in; there is no global one, so two engines in one process,
or a thousand simulated ones, do not count into each other. `registry.counter(...)` may be called anywhere
with the same arguments and returns the same family, so that nobody has to pass families around.

    family = registry.counter("log.appends", "Batches committed", labels=("topic",))
    series = family.labels("orders")     # once: keep it
    series.inc()                         # on the hot path: a lock, an addition

**Names** are lower case, with dots between the parts and the unit last: `buffer.flush_duration_seconds`. They
stay so in the JSON view; for Prometheus dots become underscores and counters end in `_total`. Two names that
would become one there are refused. Time is in seconds.

**Labels are bounded.** Past `SERIES_PER_METRIC_MAX` label sets, further ones share one series whose values
are all `other`, and `metrics.series_overflowed` counts the lookups. An error was rejected: whoever produces
to one topic too many should lose a label, not a record.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Generic, TypeAlias, TypeVar

from forebay.errors import LimitExceeded, UsageError
from forebay.kit import _metric_names as names
from forebay.kit._metric_series import (
    BYTES_BUCKETS,
    SECONDS_BUCKETS,
    Counter,
    Gauge,
    Histogram,
    HistogramValue,
)

__all__ = [
    "BYTES_BUCKETS",
    "METRICS_MAX",
    "OTHER",
    "SECONDS_BUCKETS",
    "SERIES_PER_METRIC_MAX",
    "Counter",
    "CounterFamily",
    "Family",
    "Gauge",
    "GaugeFamily",
    "Histogram",
    "HistogramFamily",
    "HistogramValue",
    "MetricsRegistry",
]

METRICS_MAX: Final = 2_000
"""Most families in one registry."""
SERIES_PER_METRIC_MAX: Final = 1_000
"""Most label sets of one family before further ones share the series `other`."""
LABEL_VALUE_CHARS_MAX: Final = 200
"""Longest label value; the rest is cut off."""
BUCKETS_MAX: Final = 64
"""Most bounds of one histogram."""
OTHER: Final = "other"
"""Value of every label of the series that takes what is over the limit."""

Series = TypeVar("Series", Counter, Gauge, Histogram)


class Family(Generic[Series]):
    """All series of one name: one per set of label values, or a single one without labels."""

    def __init__(
        self, registry: MetricsRegistry, name: str, help_text: str, label_names: tuple[str, ...]
    ) -> None:
        self.name = name
        self.help = help_text
        self.label_names = label_names
        self._registry = registry
        self._lock = threading.RLock()
        self._series: dict[tuple[str, ...], Series] = {}
        if not label_names:
            self._series[()] = self._make()

    def _make(self) -> Series:
        raise NotImplementedError

    def labels(self, *values: object, **named: object) -> Series:
        """The series with these label values, in the order of the label names or by name. Keep it."""
        key = self._key(values, named)
        series = self._series.get(key)
        return self._add(key) if series is None else series

    def remove(self, *values: object, **named: object) -> None:
        """Forget a series, so that a deleted topic does not count against the limit. No error if gone."""
        with self._lock:
            self._series.pop(self._key(values, named), None)

    def series(self) -> list[tuple[tuple[str, ...], Series]]:
        """Label values and series, in the order they were first asked for."""
        with self._lock:
            return list(self._series.items())

    def _key(self, values: tuple[object, ...], named: Mapping[str, object]) -> tuple[str, ...]:
        if named:
            if values or named.keys() != set(self.label_names):
                raise self._wrong_labels()
            values = tuple(named[name] for name in self.label_names)
        elif len(values) != len(self.label_names):
            raise self._wrong_labels()
        return tuple([_label_value(value) for value in values])

    def _add(self, key: tuple[str, ...]) -> Series:
        with self._lock:
            if key not in self._series and len(self._series) >= self._registry.series_per_metric_max:
                self._registry.count_problem("metrics.series_overflowed", "Lookups past the limit of series")
                key = (OTHER,) * len(self.label_names)
            series = self._series.get(key)
            if series is None:
                series = self._series[key] = self._make()
            return series

    def _only(self) -> Series:
        try:
            return self._series[()]
        except KeyError:
            raise self._wrong_labels() from None

    def _wrong_labels(self) -> UsageError:
        wanted = ", ".join(self.label_names) or "none"
        return UsageError(
            f"metric {self.name!r} has other labels: {wanted}", hint="call labels(...) with these"
        )


class CounterFamily(Family[Counter]):
    """Counters of one name. Without labels it can be counted on directly."""

    def _make(self) -> Counter:
        return Counter()

    def inc(self, amount: float = 1) -> None:
        """`inc` of the one series without labels."""
        self._only().inc(amount)

    add = inc


class GaugeFamily(Family[Gauge]):
    """Gauges of one name. Without labels it can be set directly."""

    def _make(self) -> Gauge:
        return Gauge()

    def set(self, value: float) -> None:
        """`set` of the one series without labels."""
        self._only().set(value)

    def inc(self, amount: float = 1) -> None:
        """`inc` of the one series without labels."""
        self._only().inc(amount)

    add = inc

    def dec(self, amount: float = 1) -> None:
        """`dec` of the one series without labels."""
        self._only().dec(amount)

    def set_function(self, function: Callable[[], float]) -> None:
        """`set_function` of the one series without labels."""
        self._only().set_function(function)


class HistogramFamily(Family[Histogram]):
    """Histograms of one name. Without labels it can be observed into directly."""

    def __init__(
        self,
        registry: MetricsRegistry,
        name: str,
        help_text: str,
        label_names: tuple[str, ...],
        bounds: tuple[float, ...],
    ) -> None:
        self.bounds = bounds
        super().__init__(registry, name, help_text, label_names)

    def _make(self) -> Histogram:
        return Histogram(self.bounds)

    def observe(self, value: float) -> None:
        """`observe` of the one series without labels."""
        self._only().observe(value)


AnyFamily: TypeAlias = CounterFamily | GaugeFamily | HistogramFamily
F = TypeVar("F", CounterFamily, GaugeFamily, HistogramFamily)


class MetricsRegistry:
    """The families of one process, engine or test."""

    def __init__(
        self,
        constant_labels: Mapping[str, str] | None = None,
        *,
        series_per_metric_max: int = SERIES_PER_METRIC_MAX,
    ) -> None:
        if series_per_metric_max < 1:
            raise UsageError(f"series_per_metric_max is {series_per_metric_max}", hint="it is at least 1")
        self.constant_labels = dict(constant_labels or {})
        """Labels that every series carries, such as the instance."""
        names.check_labels("the registry", tuple(self.constant_labels))
        self.series_per_metric_max = series_per_metric_max
        self._lock = threading.RLock()
        self._families: dict[str, AnyFamily] = {}
        self._exposed: dict[str, str] = {}

    def counter(self, name: str, help_text: str, labels: Sequence[str] = ()) -> CounterFamily:
        """The counters of this name, made at the first call."""
        return self._register(CounterFamily(self, name, help_text, _names(labels)))

    def gauge(self, name: str, help_text: str, labels: Sequence[str] = ()) -> GaugeFamily:
        """The gauges of this name, made at the first call."""
        return self._register(GaugeFamily(self, name, help_text, _names(labels)))

    def gauge_function(self, name: str, help_text: str, function: Callable[[], float]) -> GaugeFamily:
        """A gauge that asks `function` when it is read. A later call under the same name replaces it."""
        family = self.gauge(name, help_text)
        family.set_function(function)
        return family

    def histogram(
        self,
        name: str,
        help_text: str,
        labels: Sequence[str] = (),
        buckets: Sequence[float] = SECONDS_BUCKETS,
    ) -> HistogramFamily:
        """The histograms of this name, made at the first call. `buckets` are ascending upper bounds."""
        bounds = tuple(float(bound) for bound in buckets)
        ascending = all(low < high for low, high in itertools.pairwise(bounds))
        if not bounds or not ascending or not all(map(math.isfinite, bounds)):
            raise UsageError(
                f"buckets of metric {name!r} are {bounds}",
                hint="give at least one bound, ascending; infinity is added",
            )
        if len(bounds) > BUCKETS_MAX:
            raise LimitExceeded("BUCKETS_MAX", limit=BUCKETS_MAX, actual=len(bounds), hint="use fewer bounds")
        return self._register(HistogramFamily(self, name, help_text, _names(labels), bounds))

    def families(self) -> list[AnyFamily]:
        """Every family, by name."""
        with self._lock:
            return [self._families[name] for name in sorted(self._families)]

    def count_problem(self, name: str, help_text: str) -> None:
        """Count something that went wrong inside the metrics themselves."""
        self.counter(name, help_text).inc()

    def _register(self, family: F) -> F:
        with self._lock:
            existing = self._families.get(family.name)
            if existing is None:
                self._add(family)
                return family
        if not isinstance(existing, type(family)) or _shape(existing) != _shape(family):
            raise UsageError(
                f"metric {family.name!r} is already a {_described(existing)}, not a {_described(family)}",
                hint="use one kind, one set of labels and one set of buckets per name",
            )
        return existing

    def _add(self, family: AnyFamily) -> None:
        names.check_name(family.name, counter=isinstance(family, CounterFamily))
        names.check_help(family.name, family.help)
        names.check_labels(f"metric {family.name!r}", (*self.constant_labels, *family.label_names))
        if len(self._families) >= METRICS_MAX:
            raise LimitExceeded("METRICS_MAX", limit=METRICS_MAX, actual=METRICS_MAX + 1, hint="use labels")
        exposed = names.exposed(family.name, _kind(family))
        for name in exposed:
            if name in self._exposed:
                both = f"{family.name!r} and {self._exposed[name]!r}"
                raise UsageError(
                    f"metrics {both} would both be {name!r} in Prometheus",
                    hint="choose a name that differs by more than dots and suffixes",
                )
        self._exposed.update(dict.fromkeys(exposed, family.name))
        self._families[family.name] = family


def _label_value(value: object) -> str:
    text = str(value)[:LABEL_VALUE_CHARS_MAX]
    # A lone surrogate, as in file names that are not UTF-8, would cost the whole page of the Prometheus view.
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _names(labels: Sequence[str]) -> tuple[str, ...]:
    # A single string is a sequence too, of one-letter labels.
    if isinstance(labels, str):
        raise UsageError(f"labels are {labels!r}, one string", hint=f"write labels=({labels!r},)")
    return tuple(labels)


def _kind(family: AnyFamily) -> names.Kind:
    if isinstance(family, CounterFamily):
        return "counter"
    return "gauge" if isinstance(family, GaugeFamily) else "histogram"


def _shape(family: AnyFamily) -> tuple[object, ...]:
    return family.label_names, family.bounds if isinstance(family, HistogramFamily) else ()


def _described(family: AnyFamily) -> str:
    labels = f" with labels {', '.join(family.label_names)}" if family.label_names else ""
    return f"{_kind(family)}{labels}"
