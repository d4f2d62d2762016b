"""Three accounts of one run, held together: what clients meant, what brokers counted, what is there.

For every record that a client was told is durable there must be exactly one in the log, at the offset that
was told. A record whose outcome nobody knows may be there once or not at all; one that certainly failed must
not be there; nothing else may be there. Brokers must have counted what is in the log; one that was killed
took the end of its count with it, and then the difference is said to be explained, not equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from forebay.loadtest._ledger import ACKED, FAILED, UNKNOWN

__all__ = ["InLog", "reconcile"]


@dataclass(slots=True)
class InLog:
    """What was read back from one partition, in order."""

    streams: list[npt.NDArray[np.uint64]] = field(default_factory=list)
    numbers: list[npt.NDArray[np.uint64]] = field(default_factory=list)
    offsets: list[npt.NDArray[np.int64]] = field(default_factory=list)
    strangers: int = 0

    def joined(self) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
        """All of it."""
        if not self.streams:
            empty = np.empty(0, np.uint64)
            return empty, empty, np.empty(0, np.int64)
        return np.concatenate(self.streams), np.concatenate(self.numbers), np.concatenate(self.offsets)


def reconcile(
    ledger: Mapping[str, npt.NDArray[Any]],
    log: Mapping[int, InLog],
    brokers: Mapping[str, float | None],
    killed: set[str],
) -> dict[str, Any]:
    """The comparison, and in `differences` a sentence for everything that does not fit."""
    found = _against_log(ledger, log)
    differences = [
        f"{found[name]:,} {text}"
        for name, text in (
            ("lost", "records were acknowledged and are not in the log"),
            ("misplaced", "records are not at the offset that was told"),
            ("duplicated", "records are in the log more than once"),
            ("resurrected", "records were reported as not appended and are in the log"),
            ("strangers", "records in the log were not sent by this run"),
            ("out_of_order", "records stand before an earlier one of their stream"),
        )
        if found[name]
    ]
    counted = sum(value or 0 for value in brokers.values())
    unexplained, explained = int(counted) - found["records_in_log"], ""
    if unexplained and killed and unexplained < 0:
        explained = f"{', '.join(sorted(killed))} was killed, and the end of its count with it"
    elif unexplained:
        differences.append(
            f"brokers counted {int(counted):,} records, the log has {found['records_in_log']:,}"
        )
    return {
        "exact": not differences,
        "differences": differences,
        **found,
        "records_counted_by_brokers": int(counted),
        "brokers": dict(brokers),
        "broker_difference": unexplained,
        "broker_difference_explained": explained,
    }


def _against_log(ledger: Mapping[str, npt.NDArray[Any]], log: Mapping[int, InLog]) -> dict[str, int]:
    outcome, counts = ledger["outcome"], ledger["count"].astype(np.int64)
    expected = _expand(ledger)
    seen_keys, seen_offsets, seen_partitions, strangers, out_of_order = [], [], [], 0, 0
    for partition, part in log.items():
        streams, numbers, offsets = part.joined()
        strangers += part.strangers
        good = streams != np.uint64(2**64 - 1)
        keys = _keys(streams[good], numbers[good])
        out_of_order += _descents(streams[good], numbers[good])
        seen_keys.append(keys)
        seen_offsets.append(offsets[good])
        seen_partitions.append(np.full(len(keys), partition, np.int64))
    keys = np.concatenate(seen_keys) if seen_keys else np.empty(0, np.uint64)
    places = np.concatenate(seen_offsets) if seen_offsets else np.empty(0, np.int64)
    partitions = np.concatenate(seen_partitions) if seen_partitions else np.empty(0, np.int64)
    unique, index, times = np.unique(keys, return_index=True, return_counts=True)
    at = np.searchsorted(unique, expected["keys"])
    at_safe = np.minimum(at, max(len(unique) - 1, 0))
    there = (
        (at < len(unique)) & (unique[at_safe] == expected["keys"]) if len(unique) else np.zeros(len(at), bool)
    )
    acked, failed, unknown = (expected["outcome"] == each for each in (ACKED, FAILED, UNKNOWN))
    told = np.zeros(len(there), bool)
    told[there] = (places[index][at[there]] == expected["offset"][there]) & (
        partitions[index][at[there]] == expected["partition"][there]
    )
    ours = np.isin(unique, expected["keys"])
    return {
        "records_meant": int(counts.sum()),
        "records_acked": int(counts[outcome == ACKED].sum()),
        "records_failed": int(counts[outcome == FAILED].sum()),
        "records_unknown": int(counts[outcome == UNKNOWN].sum()),
        "records_unknown_in_log": int((unknown & there).sum()),
        "records_in_log": len(keys) + strangers,
        "lost": int((acked & ~there).sum()),
        "misplaced": int((acked & there & ~told).sum()),
        "duplicated": int((times > 1).sum()),
        "resurrected": int((failed & there).sum()),
        "strangers": strangers + int((~ours).sum()),
        "out_of_order": out_of_order,
    }


def _keys(streams: npt.NDArray[np.uint64], numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Stream and number as one number: a stream sends far fewer than 2**40 records."""
    keys: npt.NDArray[np.uint64] = streams << np.uint64(40) | numbers
    return keys


def _expand(ledger: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
    """A line per record from a line per request."""
    counts = ledger["count"].astype(np.int64)
    rows = np.repeat(np.arange(len(counts)), counts)
    begins = np.cumsum(counts) - counts
    inside = np.arange(len(rows)) - begins[rows]
    numbers = ledger["first"][rows] + inside.astype(np.uint64)
    return {
        "keys": _keys(ledger["stream"][rows], numbers),
        "outcome": ledger["outcome"][rows],
        "offset": ledger["start_offset"][rows] + inside,
        "partition": ledger["partition"][rows].astype(np.int64),
    }


def _descents(streams: npt.NDArray[np.uint64], numbers: npt.NDArray[np.uint64]) -> int:
    """Records of a partition that stand behind a later one of their own stream."""
    order = np.argsort(streams, kind="stable")
    same = streams[order][1:] == streams[order][:-1]
    return int((same & (numbers[order][1:] <= numbers[order][:-1])).sum())
