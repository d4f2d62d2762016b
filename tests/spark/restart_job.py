"""A streaming job in a process of its own, to be killed: from topic `in` to topic `out`, a few rows at a
time.

python -m tests.spark.restart_job STORE COORDINATOR CHECKPOINT MASTER
"""

from __future__ import annotations

import sys
from typing import Any

import forebay.spark


def main(store: str, coordinator: str, checkpoint: str, master: str) -> None:
    """Run to the end of the log."""
    conf: dict[str, Any] = {"spark.master": master, "spark.driver.memory": "1g"}
    spark = forebay.spark.session("restart", fast_start=True, **conf)
    reader = spark.readStream.format("forebay").option("path", store).option("subscribe", "in")
    writer = (
        reader.option("coordinator", coordinator)
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", 40)
        .option("minPartitions", 3)
        .load()
        .select("key", "value")
        .writeStream.format("forebay")
        .option("path", store)
        .option("coordinator", coordinator)
        .option("topic", "out")
        .option("partitions", 3)
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
    )
    writer.start().awaitTermination()
    print("done", flush=True)  # noqa: T201 - told to the test
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
