"""Killed drivers and killed workers, on one machine, on a cluster of processes, over a real bucket and
Oxia."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from tests.spark.bed import fill, run, stream

import forebay

RECORDS = 400
WAIT_S = 500


def job(store: str, coordinator: str, checkpoint: Path, master: str) -> subprocess.Popen[str]:
    """The job, in a group of its own: the JVM and the workers go with it."""
    arguments = [store, coordinator, str(checkpoint), master]
    return subprocess.Popen(
        [sys.executable, "-m", "tests.spark.restart_job", *arguments],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def end(process: subprocess.Popen[str]) -> None:
    """Kill the whole family, by the group it leads."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def counted(store: str, coordinator: str | None, topic: str) -> Counter[bytes]:
    with forebay.connect(store, coordinator=coordinator) as bay:
        if topic not in {each.topic for each in bay.topics.list()}:
            return Counter()
        return Counter(bay.read(topic).read_all()["value"].to_pylist())


def killed_and_restarted(store: str, coordinator: str | None, tmp_path: Path, master: str) -> None:
    """Kill the job with rows in the sink and more to come; start it again; every record is there once."""
    given = coordinator or store
    first = job(store, given, tmp_path / "checkpoint", master)
    try:
        deadline = time.monotonic() + WAIT_S
        while not counted(store, coordinator, "out") and time.monotonic() < deadline:
            assert first.poll() is None, first.communicate()[0]
            time.sleep(0.2)
    finally:
        end(first)
    seen = counted(store, coordinator, "out")
    assert seen, "nothing was written in time"
    second = job(store, given, tmp_path / "checkpoint", master)
    try:
        told, _ = second.communicate(timeout=WAIT_S)
    finally:
        end(second)
    assert "done" in told, told
    assert counted(store, coordinator, "out") == counted(store, coordinator, "in")


@pytest.mark.timeout(1200)
def test_a_killed_driver_repeats_and_loses_nothing(java: None, tmp_path: Path) -> None:
    data = tmp_path / "data"
    for partition in range(3):
        values = [b"%d-%d" % (partition, number) for number in range(RECORDS)]
        fill(data, "in", partition, values, partitions=3, keys=values)
    killed_and_restarted(str(data), None, tmp_path, "local[2,3]")


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_a_cluster_over_a_bucket_and_oxia_repeats_and_loses_nothing(
    java: None, seaweed: Any, oxia: Any, tmp_path: Path
) -> None:
    store, coordinator = seaweed.url("spark-restart"), oxia.url()
    with forebay.connect(store, coordinator=coordinator) as bay:
        bay.topics.create("in", partitions=2)
        with bay.producer() as out:
            for partition in range(2):
                out.send(
                    "in", [b"%d-%d" % (partition, number) for number in range(RECORDS)], partition=partition
                )
    killed_and_restarted(store, coordinator, tmp_path, "local-cluster[2,1,1024]")


def test_a_killed_worker_is_replaced_and_nothing_is_repeated(spark: SparkSession, tmp_path: Path) -> None:
    data, marker = tmp_path / "data", tmp_path / "marker"
    fill(data, "in", 0, [b"%d" % number for number in range(200)])

    def fatal(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import os
        import signal

        for batch in batches:
            yield batch
            if not marker.exists():
                marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)

    frame = (
        stream(spark, data, subscribe="in", minPartitions=4).select("value").mapInArrow(fatal, "value binary")
    )
    writer = frame.writeStream.format("forebay").option("path", str(data)).option("topic", "out")
    run(writer, tmp_path)
    assert marker.exists()
    assert counted(str(data), None, "out") == counted(str(data), None, "in")
