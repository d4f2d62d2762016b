"""Brokers as real processes: started by the command, stopped by signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

START_SECONDS_MAX = 120


@dataclass(slots=True)
class BrokerProcess:
    """One broker, and how to reach it."""

    process: subprocess.Popen[str]
    url: str

    def call(self, path: str, message: Any | None = None, *, timeout_s: float = 60) -> tuple[int, Any]:
        data = None if message is None else json.dumps(message).encode()
        request = urllib.request.Request(self.url + path, data)
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())

    def produce(self, topic: str, partition: int, records: list[str], **more: Any) -> tuple[int, Any]:
        batch = {"topic": topic, "partition": partition, "records": records, **more}
        return self.call("/produce", {"topic_partitions": [batch]})

    def read_all(self, topic: str, partition: int) -> list[str]:
        values: list[str] = []
        offset = 1
        while True:
            place = {"topic": topic, "partition": partition, "fetch_offset": offset}
            status, answer = self.call("/consume", {"topic_partitions": [place]})
            assert status == 200, answer
            [result] = answer["results"]
            if not result["records"]:
                return values
            values += [record["value"] for record in result["records"]]
            offset = result["next_offset"]

    def terminate(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=60)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(timeout=60)


@contextmanager
def broker_process(
    *words: str, environment: dict[str, str] | None = None, files_max: int | None = None
) -> Iterator[BrokerProcess]:
    """`forebay serve` on a free port, ready; killed at the end if it still runs."""
    command = [sys.executable, "-m", "forebay.cli", "serve", "--port", "0", "--output", "json", *words]
    if files_max is not None:
        command = ["sh", "-c", f'ulimit -n {files_max} && exec "$@"', "sh", *command]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(environment or {})},
    )
    assert process.stdout is not None and process.stderr is not None
    try:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        yield BrokerProcess(process, json.loads(line)["url"])
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(timeout=60)
        process.stdout.close()
        process.stderr.close()
