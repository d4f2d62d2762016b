"""What a dataflow counts."""

from __future__ import annotations

from forebay.kit.metrics import MetricsRegistry

__all__ = ["DataflowMetrics"]


class DataflowMetrics:
    """The families of one process."""

    def __init__(self, registry: MetricsRegistry) -> None:
        node_signal = ("node", "signal")
        self.requests = registry.counter(
            "dataflow.receiver.requests_total", "Requests answered with success", node_signal
        )
        self.items = registry.counter(
            "dataflow.receiver.items_total", "Spans, log records and metrics in them", node_signal
        )
        self.bytes = registry.counter("dataflow.receiver.bytes_total", "Bytes of them", node_signal)
        self.refused = registry.counter(
            "dataflow.receiver.refused_total", "Requests refused, by reason", ("node", "reason")
        )
        self.pending = registry.gauge("dataflow.receiver.pending_bytes", "Bytes under way", ("node",))
        self.exported = registry.counter(
            "dataflow.exporter.items_total", "Items handed to the destination", node_signal
        )
        self.failures = registry.counter(
            "dataflow.exporter.failures_total",
            "Deliveries to be tried again, by the store or by the sender",
            ("node",),
        )
        self.rejected = registry.counter(
            "dataflow.exporter.rejected_total", "Items the destination will never take", node_signal
        )
