"""Commands meet what is damaged, or left over from before: they name it, and do the rest."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forebay import connect
from forebay.coordination import open_coordinator
from forebay.log._keys import PartitionKeys

Run = Callable[..., Any]
KEYS = PartitionKeys("orders", 0)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A topic of two partitions with two records each."""
    with connect(tmp_path / "data") as bay, bay.producer() as producer:
        for partition in (0, 1):
            producer.send("orders", [b"a", b"b"], partition=partition).result(timeout=60)
    return tmp_path / "data"


def put_control(data: Path, value: bytes) -> None:
    async def put() -> None:
        async with open_coordinator(data) as coordinator:
            await coordinator.put(KEYS.control, value, partition_key=KEYS.partition_key)

    asyncio.run(put())


def test_a_reset_moves_the_others_and_names_the_damaged_partition(forebay: Run, data: Path) -> None:
    put_control(data, b"torn")
    ran = forebay("groups", "reset", "g", "--to", "latest", "--topic", "orders", "--data", data, "-o", "json")
    assert ran.code == 1 and KEYS.control in ran.err
    assert [(each["partition"], each["after"]) for each in ran.documents] == [(1, 3)]


def test_verify_and_describe_know_what_a_late_request_left(forebay: Run, data: Path) -> None:
    assert forebay("topics", "delete", "orders", "--yes", "--data", data).code == 0
    assert forebay("topics", "create", "orders", "--data", data).code == 0
    pending = {"append_id": "x", "start_offset": 1, "end_offset": 2, "msg_count": 2, "entry_type": "WAL"}
    pending |= {"data_key": "d", "encoding": "e", "created_at_ms": 1}
    late = {"log_state": "OPEN", "sequence_counter": 3, "pending": pending}
    put_control(data, json.dumps(late).encode())
    verified = forebay("log", "verify", "--topic", "orders", "--data", data)
    assert verified.code == 0 and f"orders:0: left over: {KEYS.control}" in verified.out
    [shown] = forebay("topics", "describe", "orders", "--data", data, "-o", "json").document["partitions"]
    assert shown["records"] == shown["not_compacted"] == 0
    assert shown["earliest"] == shown["next"] == shown["cursor"] == 3
