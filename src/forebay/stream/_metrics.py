"""What a tier counts, by stream. Without a registry it counts into one of its own, which nobody reads.

stream.fragments_uploaded{stream}    fragments put into the bucket or adopted there
stream.bytes_uploaded{stream}        bytes of their chunks
stream.roots_written{stream}         roots swapped in
stream.fragments_removed{stream}     fragments removed by retention
stream.requests_repeated{stream}     requests to the store that were tried again
stream.lag_bytes{stream}             bytes of chunks that no root holds yet
stream.lag_records{stream}           offsets that no root holds yet
stream.lag_seconds{stream}           age of the oldest chunk that no root holds yet
stream.lag_alarm{stream}             1 while a lag is above its bound, else 0
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from forebay.kit.metrics import MetricsRegistry

if TYPE_CHECKING:
    from forebay.stream._tier import StreamTier

__all__ = ["TierMetrics"]

_LABELS = ("stream",)


class TierMetrics:
    """The series of one stream."""

    def __init__(self, registry: MetricsRegistry | None, stream: str) -> None:
        registry = registry or MetricsRegistry()
        counters = {
            "fragments": ("stream.fragments_uploaded", "Fragments put into the bucket or adopted there"),
            "bytes": ("stream.bytes_uploaded", "Bytes of chunks put into the bucket"),
            "roots": ("stream.roots_written", "Manifest roots swapped in"),
            "removed": ("stream.fragments_removed", "Fragments removed by retention"),
            "repeated": ("stream.requests_repeated", "Requests to the store that were tried again"),
        }
        self._counters = {
            name: registry.counter(title, text, _LABELS).labels(stream)
            for name, (title, text) in counters.items()
        }
        self._counted = dict.fromkeys(counters, 0)
        lags = {
            "bytes": ("stream.lag_bytes", "Bytes of chunks that no root holds yet"),
            "records": ("stream.lag_records", "Offsets that no root holds yet"),
            "seconds": ("stream.lag_seconds", "Age of the oldest chunk that no root holds yet"),
            "alarm": ("stream.lag_alarm", "1 while a lag is above its bound, else 0"),
        }
        self._lags = {
            name: registry.gauge(title, text, _LABELS).labels(stream) for name, (title, text) in lags.items()
        }

    def update(self, tier: StreamTier) -> None:
        """Take over what the tier has counted since the last time, and how far behind it is."""
        totals = {
            "fragments": tier.progress.fragments,
            "bytes": tier.progress.bytes,
            "roots": tier.progress.roots,
            "removed": tier.progress.removed,
            "repeated": tier.remote.calls.retries,
        }
        for name, total in totals.items():
            self._counters[name].inc(total - self._counted[name])
            self._counted[name] = total
        lag = tier.lag()
        self._lags["bytes"].set(lag.bytes)
        self._lags["records"].set(lag.records)
        self._lags["seconds"].set(lag.age_ms / 1000)
        self._lags["alarm"].set(1 if lag.alarms(tier.config) else 0)
