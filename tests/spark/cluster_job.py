"""One job for every kind of Spark: where it runs is said from outside, by the environment or `spark-submit`.

python -m tests.spark.cluster_job STORE COORDINATOR FOLDER     (or the file itself, submitted)

Reads a topic, streams it into another and from there into a queue, exports it and verifies everything. The
last line tells what came out, as digests of all rows in order.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from typing import Any

import forebay.spark


def digest(table: Any) -> str:
    """Of all rows and columns, in the order of the rows' contents; and how many rows there are."""
    rows = sorted(map(repr, table.to_pylist()))
    return f"{len(rows)}:{hashlib.sha256(repr(rows).encode()).hexdigest()}"


def finished(writer: Any) -> None:
    """Run a stream to its end. Spark gives a new Python ten seconds, which is little on a machine under
    load; nothing has run then."""
    for attempt in range(5):
        try:
            writer.start().awaitTermination()
        except Exception as error:
            if "failed to connect back" not in str(error) or attempt == 4:
                raise
        else:
            return


def work(spark: Any, store: str, coordinator: str, folder: str) -> dict[str, str]:
    """Everything, on this session."""

    def place(step: Any) -> Any:
        step = step.option("path", store)
        return step.option("coordinator", coordinator) if coordinator != store else step

    reader = place(spark.read.format("forebay").option("subscribe", "in").option("minPartitions", 6))
    found = {"read": digest(reader.load().toArrow())}
    stream = place(spark.readStream.format("forebay").option("subscribe", "in").option("minPartitions", 6))
    stream = stream.option("startingOffsets", "earliest").option("maxOffsetsPerTrigger", 300).load()
    sink = place(stream.select("key", "value").writeStream.format("forebay").option("topic", "out"))
    sink = sink.option("partitions", 3).option("checkpointLocation", f"file://{folder}/checkpoint")
    finished(sink.trigger(availableNow=True))
    written = place(spark.read.format("forebay").option("subscribe", "out")).load()
    found["sink"] = digest(written.select("key", "value", "partition").toArrow())
    queue = written.select("value").write.format("forebay").mode("append").option("engine", "buffer")
    queue.option("path", store).save()
    waiting = spark.read.format("forebay").option("engine", "buffer").option("path", store).load()
    found["queue"] = digest(waiting.select("value").toArrow())
    return found | exported(spark, store, None if coordinator == store else coordinator, folder)


def main(store: str, coordinator: str, folder: str) -> None:
    """In a process of its own."""
    settings: dict[str, Any] = json.loads(os.environ.get("FOREBAY_TEST_CONF", "{}"))
    spark = forebay.spark.session("cluster-job", **settings)
    print("found " + json.dumps(work(spark, store, coordinator, folder)), flush=True)  # noqa: T201
    spark.stop()


def exported(spark: Any, store: str, coordinator: str | None, folder: str) -> dict[str, str]:
    """The export and a job, by tasks of this Spark."""
    import pyarrow.dataset as ds

    from forebay.spark.export import ExportConfig, SourceSpec, TargetSpec, export
    from forebay.spark.jobs import Place, verify

    target = f"{folder}/table"
    config = ExportConfig(SourceSpec.parse("in", store, coordinator), TargetSpec.parse(f"parquet:{target}"))
    report = export(config, spark=spark)
    table = ds.dataset(target, format="parquet", exclude_invalid_files=True, ignore_prefixes=["_"])
    facts = verify(Place(store, coordinator), spark=spark)
    records = sum(each.records for each in facts.partitions)
    return {"export": f"{report.rows} {digest(table.to_table())}", "verify": f"{facts.ok} {records}"}


if __name__ == "__main__":
    main(*sys.argv[1:])
