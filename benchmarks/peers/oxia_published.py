"""The published Oxia client for Python, as a program of its own: `oxia_published.py HOST:PORT`.

Runs in the peer's environment, so it imports nothing of ours. Reads lines `{"seconds": S, "threads": N}`,
puts for that long (the client is synchronous; N threads share it), and prints `{"rate": puts per second}`.
"""

from __future__ import annotations

import json
import sys
import threading
import time

import oxia

KEYS = 100
VALUE = bytes(100)


def put_for(client: oxia.Client, seconds: float, name: int, counts: list[int]) -> None:
    end, done = time.perf_counter() + seconds, 0
    while time.perf_counter() < end:
        client.put(f"bench/published/{name}-{done % KEYS}", VALUE)
        done += 1
    counts.append(done)


def turn(client: oxia.Client, seconds: float, threads: int) -> float:
    counts: list[int] = []
    begin = time.perf_counter()
    workers = [
        threading.Thread(target=put_for, args=(client, seconds, name, counts)) for name in range(threads)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return sum(counts) / (time.perf_counter() - begin)


def main() -> None:
    client = oxia.Client(sys.argv[1])
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps({"rate": turn(client, asked["seconds"], asked["threads"])}), flush=True)
    client.close()


if __name__ == "__main__":
    main()
