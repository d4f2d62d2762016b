"""Requests with everything in them that OTAP can say, and a form of them in which order does not count."""

from __future__ import annotations

import random
from typing import Any

from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

BEGIN = 1_700_000_000_000_000_000
_GROUPS = {
    "traces": ("resource_spans", "scope_spans", "spans"),
    "logs": ("resource_logs", "scope_logs", "log_records"),
    "metrics": ("resource_metrics", "scope_metrics", "metrics"),
}

_REQUESTS: dict[str, Any] = {
    "traces": ExportTraceServiceRequest,
    "logs": ExportLogsServiceRequest,
    "metrics": ExportMetricsServiceRequest,
}


def sample(signal: str, number: int = 0, items: int = 6) -> Any:
    """Request `number` of a stream: later ones have other texts, and columns that the first has not."""
    return {"traces": _traces, "logs": _logs, "metrics": _metrics}[signal](number, items)


def fill_attributes(attributes: Any, salt: str, rich: bool = True) -> None:
    """An attribute of every type, some of them the same for everybody."""
    attributes.add(key="text").value.string_value = f"text {salt}"
    attributes.add(key="same").value.string_value = "the same"
    attributes.add(key="none")
    attributes.add(key="zero").value.int_value = 0
    attributes.add(key="empty").value.string_value = ""
    if not rich:
        return
    attributes.add(key="int").value.int_value = -(2**63)
    attributes.add(key="double").value.double_value = 2.5
    attributes.add(key="yes").value.bool_value = True
    attributes.add(key="no").value.bool_value = False
    attributes.add(key="bytes").value.bytes_value = b"\x00\xff" + salt.encode()
    values = attributes.add(key="list").value.array_value.values
    values.add().string_value = "a"
    values.add().int_value = 300
    values.add().int_value = -70_000
    values.add().double_value = 0.1
    values.add().bool_value = False
    values.add().bytes_value = b"b" * 30
    values.add()
    pairs = attributes.add(key="map").value.kvlist_value.values
    pairs.add(key="inner").value.string_value = "ä" * 40
    pairs.add(key="list").value.array_value.values.add().int_value = 5


def fill_group(resource_group: Any, scope_group: Any, salt: str) -> None:
    """What resource and scope say about themselves."""
    resource_group.schema_url = f"https://example.org/{salt}"
    resource_group.resource.dropped_attributes_count = 3
    fill_attributes(resource_group.resource.attributes, salt, rich=False)
    scope_group.schema_url = "https://example.org/scope"
    scope_group.scope.name, scope_group.scope.version = f"library {salt}", "1.2"
    fill_attributes(scope_group.scope.attributes, "scope", rich=False)


def _groups(request: Any, signal: str, number: int) -> Any:
    """Two resources, the first with two scopes, and one that says nothing."""
    outer, middle, inner = _GROUPS[signal]
    for name in (f"a{number}", f"b{number}"):
        resource_group = getattr(request, outer).add()
        for scope in range(2 if name[0] == "a" else 1):
            scope_group = getattr(resource_group, middle).add()
            fill_group(resource_group, scope_group, f"{name}.{scope}") if not scope else None
            scope_group.scope.name = f"{name}.{scope}"
            yield getattr(scope_group, inner)
    yield getattr(getattr(getattr(request, outer).add(), middle).add(), inner)


def _traces(number: int, items: int) -> Any:
    request = ExportTraceServiceRequest()
    for group, spans in enumerate(_groups(request, "traces", number)):
        for index in range(items):
            span = spans.add(
                trace_id=bytes([number + 1, group, index]) + b"t" * 13,
                span_id=bytes([index + 1]) * 8,
                name=f"GET /{index % 3}/{number}",
                kind=index % 6,
                start_time_unix_nano=BEGIN + index,
                end_time_unix_nano=BEGIN + index * 1_000,
            )
            if index % 2:
                span.parent_span_id = b"p" * 8
                span.trace_state, span.flags = "a=b", 257
                span.dropped_attributes_count, span.dropped_events_count, span.dropped_links_count = 1, 2, 3
                span.status.code, span.status.message = 2, f"failed {number}"
                fill_attributes(span.attributes, f"{group}.{index}", rich=number > 0)
            for name in ("begin", "begin", f"event {number}")[: index % 4]:
                event = span.events.add(
                    name=name, time_unix_nano=BEGIN + index, dropped_attributes_count=index
                )
                fill_attributes(event.attributes, name, rich=False)
            for link in range(index % 3):
                made = span.links.add(
                    trace_id=b"l" * 16, span_id=bytes([link]) * 8, trace_state="x=y", flags=1
                )
                made.attributes.add(key="link").value.int_value = link
    return request


def _logs(number: int, items: int) -> Any:
    request = ExportLogsServiceRequest()
    bodies: list[dict[str, Any]] = [
        {"string_value": f"body {number}"},
        {"int_value": 7},
        {"double_value": -0.5},
        {"bool_value": False},
        {"bytes_value": b"\x00"},
        {"string_value": ""},
    ]
    for group, records in enumerate(_groups(request, "logs", number)):
        for index in range(items):
            log = records.add(time_unix_nano=BEGIN + index, observed_time_unix_nano=BEGIN + 2 * index)
            if index % 7 != 6:
                for name, value in bodies[index % 6].items():
                    setattr(log.body, name, value)
            if index % 2:
                log.trace_id, log.span_id, log.flags = b"t" * 16, b"s" * 8, 1
                log.severity_number, log.severity_text = 9 + index % 4, "INFO"
                log.event_name, log.dropped_attributes_count = f"event {number}", 4
                fill_attributes(log.attributes, f"{group}.{index}", rich=number > 0)
            if number and index == 3:
                log.body.kvlist_value.values.add(key="k").value.int_value = number
    return request


def _metrics(number: int, items: int) -> Any:
    request = ExportMetricsServiceRequest()
    for group, metrics in enumerate(_groups(request, "metrics", number)):
        for index in range(items):
            metric = metrics.add(
                name=f"metric {index}", description=f"about {number}", unit="ms" if index else ""
            )
            fill_attributes(metric.metadata, "meta", rich=False) if index == 1 else None
            _METRICS[index % 6](metric, f"{group}.{index}", number)
    return request


def _gauge(metric: Any, salt: str, number: int) -> None:
    for value in (0, number, -5):
        point = metric.gauge.data_points.add(
            as_int=value, time_unix_nano=BEGIN, start_time_unix_nano=BEGIN - 1
        )
        fill_attributes(point.attributes, salt, rich=number > 0)
    metric.gauge.data_points.add(as_double=0.0, time_unix_nano=BEGIN)
    metric.gauge.data_points.add(flags=1, time_unix_nano=BEGIN)


def _sum(metric: Any, salt: str, number: int) -> None:
    metric.sum.aggregation_temporality, metric.sum.is_monotonic = 2, True
    point = metric.sum.data_points.add(as_double=1.5 + number, time_unix_nano=BEGIN)
    for value in (1.5, 1.5, 2.5):
        exemplar = point.exemplars.add(
            time_unix_nano=BEGIN, as_double=value, span_id=b"e" * 8, trace_id=b"e" * 16
        )
        exemplar.filtered_attributes.add(key="user").value.string_value = salt
    point.exemplars.add(time_unix_nano=BEGIN, as_int=3)


def _histogram(metric: Any, salt: str, number: int) -> None:
    metric.histogram.aggregation_temporality = 1
    point = metric.histogram.data_points.add(
        count=6,
        sum=12.5,
        min=0.5,
        max=7.5,
        bucket_counts=[1, 2, 3],
        explicit_bounds=[1.0, 5.0],
        time_unix_nano=BEGIN,
    )
    fill_attributes(point.attributes, salt, rich=False)
    point.exemplars.add(time_unix_nano=BEGIN, as_double=7.5)
    metric.histogram.data_points.add(count=2**64 - 1, time_unix_nano=BEGIN)


def _exponential(metric: Any, salt: str, number: int) -> None:
    metric.exponential_histogram.aggregation_temporality = 2
    point = metric.exponential_histogram.data_points.add(
        count=9, sum=3.0, scale=-2, zero_count=1, zero_threshold=0.25, min=-1.0, max=4.0, time_unix_nano=BEGIN
    )
    point.positive.offset = 4
    point.positive.bucket_counts.extend([1, 0, number])
    point.negative.offset = -3
    point.negative.bucket_counts.extend([2])
    fill_attributes(point.attributes, salt, rich=False)


def _summary(metric: Any, salt: str, number: int) -> None:
    point = metric.summary.data_points.add(count=4, sum=8.0 + number, time_unix_nano=BEGIN)
    point.quantile_values.add(quantile=0.5, value=2.0)
    point.quantile_values.add(quantile=1.0, value=4.0)
    point.attributes.add(key="s").value.string_value = salt


_METRICS = (_gauge, _sum, _histogram, _exponential, _summary, lambda *_: None)


def random_request(signal: str, seed: int, items: int, words: int) -> Any:
    """A request of random content, with texts from so many words."""
    return _Random(random.Random(f"{signal} {seed}"), words).request(signal, items)


class _Random:
    def __init__(self, randomness: random.Random, words: int) -> None:
        self._random = randomness
        self._words = words

    def request(self, signal: str, items: int) -> Any:
        outer, middle, inner = _GROUPS[signal]
        request = _REQUESTS[signal]()
        fill = {"traces": self._span, "logs": self._log, "metrics": self._metric}[signal]
        for _ in range(self._random.randint(1, 4)):
            resource_group = getattr(request, outer).add(schema_url=self._random.choice(["", "u"]))
            self._attributes(resource_group.resource.attributes)
            for _ in range(self._random.randint(1, 3)):
                scope_group = getattr(resource_group, middle).add(schema_url=self._random.choice(["", "u"]))
                scope_group.scope.name = self._random.choice(["", "n", "m"])
                self._attributes(scope_group.scope.attributes)
                for _ in range(items):
                    fill(getattr(scope_group, inner).add())
        return request

    def _word(self, letter: str) -> str:
        return f"{letter}{self._random.randrange(self._words)}"

    def _attributes(self, attributes: Any, most: int = 5) -> None:
        for _ in range(self._random.randrange(most)):
            value = attributes.add(key=self._random.choice(["a", "b", "c", self._word("k")])).value
            kind = self._random.randrange(9)
            if kind < 3:
                value.string_value = self._word("v")
            elif kind == 3:
                value.int_value = self._random.choice([0, -1, 2**63 - 1, self._random.randrange(self._words)])
            elif kind == 4:
                value.double_value = self._random.choice([0.0, 1.5, float("inf"), self._random.random()])
            elif kind == 5:
                value.bool_value = self._random.random() < 0.5
            elif kind == 6:
                value.bytes_value = self._random.randbytes(self._random.randrange(4))
            elif kind == 7:
                value.array_value.values.add().int_value = self._random.randrange(5)
            else:
                value.kvlist_value.values.add(key="x").value.string_value = "y"

    def _span(self, span: Any) -> None:
        span.trace_id, span.span_id = self._random.randbytes(16), self._random.randbytes(8)
        span.name, span.kind = self._word("n"), self._random.randrange(6)
        span.start_time_unix_nano = self._random.randrange(2**62)
        span.end_time_unix_nano = span.start_time_unix_nano + self._random.randrange(10**9)
        self._attributes(span.attributes)
        if self._random.random() < 0.3:
            span.parent_span_id = self._random.randbytes(8)
        for _ in range(self._random.randrange(3)):
            event = span.events.add(name=self._random.choice("abc"), time_unix_nano=5)
            self._attributes(event.attributes, 3)
        for _ in range(self._random.randrange(2)):
            link = span.links.add(trace_id=self._random.choice([b"a", b"b"]) * 16, span_id=b"c" * 8)
            self._attributes(link.attributes, 3)

    def _log(self, log: Any) -> None:
        log.time_unix_nano, log.severity_number = self._random.randrange(2**62), self._random.randrange(25)
        self._attributes(log.attributes)
        if self._random.random() < 0.8:
            log.body.string_value = self._word("b")

    def _metric(self, metric: Any) -> None:
        metric.name = self._word("n")
        kind = self._random.choice(["gauge", "sum", "histogram", "summary"])
        data = getattr(metric, kind)
        data.SetInParent()
        if kind in ("sum", "histogram"):
            data.aggregation_temporality = self._random.choice([1, 2])
        for _ in range(self._random.randrange(4)):
            point = data.data_points.add(time_unix_nano=7)
            self._attributes(point.attributes)
            if kind in ("histogram", "summary"):
                point.count, point.sum = 3, self._random.random()
            else:
                self._number(point)
                for _ in range(self._random.randrange(3)):
                    exemplar = point.exemplars.add(time_unix_nano=3)
                    self._number(exemplar)
                    self._attributes(exemplar.filtered_attributes, 3)

    def _number(self, holder: Any) -> None:
        if self._random.random() < 0.5:
            holder.as_int = self._random.randint(1, 3)
        else:
            holder.as_double = self._random.choice([1.5, 2.5])


def canonical(signal: str, *requests: Any) -> list[str]:
    """Every item with its resource and scope, as text, all of it sorted."""
    outer, middle, inner = _GROUPS[signal]
    found = []
    for request in requests:
        for resource in getattr(request, outer):
            for scope in getattr(resource, middle):
                groups = (
                    resource.schema_url,
                    _plain(resource.resource),
                    scope.schema_url,
                    _plain(scope.scope),
                )
                found += [repr((*groups, _plain(item))) for item in getattr(scope, inner)]
    return sorted(found)


def _plain(message: Any) -> Any:
    return _sorted(MessageToDict(message, preserving_proto_field_name=True))


def _sorted(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        # A value that says nothing is the same as none.
        return {name: _sorted(each, name) for name, each in sorted(value.items()) if each != {}}
    if isinstance(value, list):
        inner = [_sorted(each) for each in value]
        return inner if key in ("values", "bucket_counts", "explicit_bounds") else sorted(inner, key=repr)
    return value
