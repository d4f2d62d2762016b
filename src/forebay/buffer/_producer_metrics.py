"""What a producer tells of its inner life, under the names of the Go producer: `buffer.producer.` and so on.

Numbers that describe a state are read from the batcher when somebody asks for them, through a weak reference:
metrics neither cost anything on the way of a record nor keep a producer alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from forebay.buffer._metrics import BufferMetrics
from forebay.errors import OutcomeUnknown
from forebay.kit.batcher import Batcher
from forebay.kit.metrics import Histogram

__all__ = ["ProducerMetrics"]


class ProducerMetrics:
    """The series of one producer beside those that all roles have."""

    def __init__(self, common: BufferMetrics) -> None:
        self._common = common
        self.append_block = self._histogram("appendch_block_seconds", "Time that a call waited for room")
        self.encode_busy = common.gauge("producer.encode_workers_busy", "Batches being encoded")
        self.encode_duration = self._histogram("encode_duration_seconds", "Encoding of a batch")
        self.upload_duration = self._histogram("upload_duration_seconds", "Upload of a batch")
        self.append_batches = common.count_histogram(
            "producer.manifest_append_batch_size", "Batches handed to a commit at once"
        )
        self.append_duration = self._histogram(
            "manifest_append_duration_seconds", "From handing batches to a commit to its answer"
        )
        self.head_of_line_block = self._histogram(
            "head_of_line_block_seconds", "Time from a batch's upload until its commit began"
        )
        self._outcomes = {
            outcome: common.labelled_counter(
                "producer.batch_outcome", "Batches by how they ended", "outcome", outcome
            )
            for outcome in ("committed", "failed", "unknown")
        }

    def watch(self, batcher: Batcher[Any, Any, Any]) -> None:
        """Show the state of this batcher."""
        weak = weakref.ref(batcher)

        def show(name: str, help_text: str, number: Callable[[Batcher[Any, Any, Any]], float]) -> None:
            def now() -> float:
                alive = weak()
                return 0.0 if alive is None else number(alive)

            self._common.gauge(f"producer.{name}", help_text).set_function(now)

        show("upload_workers_busy", "Uploads under way", lambda it: it.uploading)
        show("halted", "1 once the producer was cancelled and takes no more", lambda it: float(it.aborted))
        show("inflight_bytes", "Bytes accepted and not durable yet", lambda it: it.pending_bytes)
        show("inflight_batches", "Batches closed and not durable yet", lambda it: it.batches_unanswered)
        show("queue_depth", "Batches closed that wait for an upload", lambda it: it.batches_waiting)
        show(
            "oldest_unflushed_batch_age_seconds",
            "Age of the oldest batch that is not durable yet",
            lambda it: it.oldest_age_s(),
        )

    def ended(self, answer: object) -> None:
        """One batch has ended so."""
        if isinstance(answer, OutcomeUnknown):
            self._outcomes["unknown"].inc()
        else:
            self._outcomes["failed" if isinstance(answer, Exception) else "committed"].inc()

    def _histogram(self, name: str, help_text: str) -> Histogram:
        return self._common.histogram(f"producer.{name}", help_text)
