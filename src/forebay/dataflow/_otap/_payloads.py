"""Services and types of tables, by their names and numbers in the protocol."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

__all__ = ["ALLOWED", "METHODS", "ROOTS", "PayloadType"]

_PACKAGE: Final = "opentelemetry.proto.experimental.arrow.v1"

METHODS: Final = {
    "traces": (f"{_PACKAGE}.ArrowTracesService", "ArrowTraces"),
    "logs": (f"{_PACKAGE}.ArrowLogsService", "ArrowLogs"),
    "metrics": (f"{_PACKAGE}.ArrowMetricsService", "ArrowMetrics"),
}
"""Service and method of each signal."""


class PayloadType(IntEnum):
    """Which table a payload is of."""

    RESOURCE_ATTRS = 1
    SCOPE_ATTRS = 2
    METRICS = 10
    NUMBER_POINTS = 11
    SUMMARY_POINTS = 12
    HISTOGRAM_POINTS = 13
    EXP_HISTOGRAM_POINTS = 14
    NUMBER_ATTRS = 15
    SUMMARY_ATTRS = 16
    HISTOGRAM_ATTRS = 17
    EXP_HISTOGRAM_ATTRS = 18
    NUMBER_EXEMPLARS = 19
    HISTOGRAM_EXEMPLARS = 20
    EXP_HISTOGRAM_EXEMPLARS = 21
    NUMBER_EXEMPLAR_ATTRS = 22
    HISTOGRAM_EXEMPLAR_ATTRS = 23
    EXP_HISTOGRAM_EXEMPLAR_ATTRS = 24
    METRIC_ATTRS = 26
    LOGS = 30
    LOG_ATTRS = 31
    SPANS = 40
    SPAN_ATTRS = 41
    SPAN_EVENTS = 42
    SPAN_LINKS = 43
    SPAN_EVENT_ATTRS = 44
    SPAN_LINK_ATTRS = 45


ROOTS: Final = {
    "traces": PayloadType.SPANS,
    "logs": PayloadType.LOGS,
    "metrics": PayloadType.METRICS,
}
"""The table without which there is no batch."""

_COMMON: Final = (PayloadType.RESOURCE_ATTRS, PayloadType.SCOPE_ATTRS)
# Type 25, multivariate metrics, is reserved in the protocol and has no definition.
ALLOWED: Final = {
    "traces": frozenset((*_COMMON, *(each for each in PayloadType if 40 <= each <= 45))),
    "logs": frozenset((*_COMMON, PayloadType.LOGS, PayloadType.LOG_ATTRS)),
    "metrics": frozenset((*_COMMON, *(each for each in PayloadType if 10 <= each <= 26))),
}
"""Tables that may come with each signal."""
