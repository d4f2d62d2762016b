"""What every engine needs once: time, identity, retry, batching, limits, metrics, background services."""

from forebay.kit.batcher import Batcher, BatcherConfig, BatcherStats, Outcome, Tell, Ticket
from forebay.kit.clock import Clock, SystemClock
from forebay.kit.conditions import ABSENT, ANY, Condition
from forebay.kit.disk_writes import begin_write_out, write_out
from forebay.kit.ids import ULID_LENGTH, IdSource, ulid_time_ms
from forebay.kit.limits import Limit, format_bytes, parse_bytes, parse_duration_ms
from forebay.kit.memory import keep_free_memory
from forebay.kit.metrics import (
    BYTES_BUCKETS,
    METRICS_MAX,
    OTHER,
    SECONDS_BUCKETS,
    SERIES_PER_METRIC_MAX,
    Counter,
    CounterFamily,
    Family,
    Gauge,
    GaugeFamily,
    Histogram,
    HistogramFamily,
    HistogramValue,
    MetricsRegistry,
)
from forebay.kit.metrics_otel import OtelView, otel_view
from forebay.kit.metrics_views import PROMETHEUS_CONTENT_TYPE, as_json, prometheus_text
from forebay.kit.periodic import PeriodicConfig, PeriodicService
from forebay.kit.retry import RetryPolicy, retry
from forebay.kit.second_tries import SECOND_TRY_S, SecondTries
from forebay.kit.service import Health, HealthStatus, Service, ServiceGroup
from forebay.kit.turns import TURN_S_MAX, Turns

__all__ = [
    "ABSENT",
    "ANY",
    "BYTES_BUCKETS",
    "METRICS_MAX",
    "OTHER",
    "PROMETHEUS_CONTENT_TYPE",
    "SECONDS_BUCKETS",
    "SECOND_TRY_S",
    "SERIES_PER_METRIC_MAX",
    "TURN_S_MAX",
    "ULID_LENGTH",
    "Batcher",
    "BatcherConfig",
    "BatcherStats",
    "Clock",
    "Condition",
    "Counter",
    "CounterFamily",
    "Family",
    "Gauge",
    "GaugeFamily",
    "Health",
    "HealthStatus",
    "Histogram",
    "HistogramFamily",
    "HistogramValue",
    "IdSource",
    "Limit",
    "MetricsRegistry",
    "OtelView",
    "Outcome",
    "PeriodicConfig",
    "PeriodicService",
    "RetryPolicy",
    "SecondTries",
    "Service",
    "ServiceGroup",
    "SystemClock",
    "Tell",
    "Ticket",
    "Turns",
    "as_json",
    "begin_write_out",
    "format_bytes",
    "keep_free_memory",
    "otel_view",
    "parse_bytes",
    "parse_duration_ms",
    "prometheus_text",
    "retry",
    "ulid_time_ms",
    "write_out",
]
