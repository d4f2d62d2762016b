"""Our client as a program of its own, beside Kafka's `ProducerPerformance`: one line of JSON in, one out.

`http_producer.py URL TOPIC`; a line `{"records": N, "records_per_s": R}` is a turn: N records of 1 KiB in
sends of 100, by turns to four partitions, R of them a second or (0) as fast as there is room. Latency counts
from when a send was due until it was durable. The answer also tells the processor time of the client.
"""

from __future__ import annotations

import asyncio
import json
import random
import resource
import sys
import time

import numpy as np

from forebay.client import ProducerConfig
from forebay.client.aio import Producer, Receipt, connect
from forebay.errors import Backpressure

RECORD_BYTES = 1024
PER_SEND = 100
PARTITIONS = 4


async def turn(out: Producer, topic: str, records: int, rate: float) -> dict[str, float]:
    payload = random.Random(1).randbytes(RECORD_BYTES)
    block = [payload] * PER_SEND
    latencies: list[float] = []
    begin, spent = time.perf_counter(), cpu_s()
    for number in range(records // PER_SEND):
        due = begin + number * PER_SEND / rate if rate else time.perf_counter()
        wait = due - time.perf_counter()
        if wait > 0:
            await asyncio.sleep(wait)
        while True:
            try:
                receipt = out.send(topic, block, partition=number % PARTITIONS)
                break
            except Backpressure:
                await out.room()
        note(receipt, due, latencies)
        if number % 50 == 0:
            await asyncio.sleep(0)
    await out.flush()
    elapsed = time.perf_counter() - begin
    return {
        "records_per_s": records / elapsed,
        "p50_ms": float(np.percentile(latencies, 50)) * 1000,
        "p99_ms": float(np.percentile(latencies, 99)) * 1000,
        "cpu_us_per_record": (cpu_s() - spent) / records * 1e6,
    }


def note(receipt: Receipt, due: float, latencies: list[float]) -> None:
    receipt._future.add_done_callback(lambda _: latencies.append(time.perf_counter() - due))


def cpu_s() -> float:
    spent = resource.getrusage(resource.RUSAGE_SELF)
    return spent.ru_utime + spent.ru_stime


async def main(url: str, topic: str) -> None:
    config = ProducerConfig(linger_ms=5, batch_bytes=1024 * 1024, pending_bytes_max=32 * 1024 * 1024)
    loop = asyncio.get_running_loop()
    async with connect(url) as bay, bay.producer(config) as out:
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            asked = json.loads(line)
            print(json.dumps(await turn(out, topic, asked["records"], asked["records_per_s"])), flush=True)


if __name__ == "__main__":
    import uvloop

    uvloop.run(main(*sys.argv[1:3]))
