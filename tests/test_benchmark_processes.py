"""Processor time of the processes of a benchmark, whatever becomes of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace

from benchmarks.figures._processes import Process, ProcessTimes, processes


def test_processor_time_of_who_vanished_is_counted_once() -> None:
    """A child that its parent waits for moves to the parent; one that nobody waits for is remembered."""
    times = ProcessTimes(1)
    daemon, worker = Process(1, 5, own=10, taken=0), Process(2, 6, own=300, taken=0)
    times.see({2: daemon, 3: worker})
    times.see({2: daemon})
    assert times._kept == 300
    times.see({2: daemon, 3: replace(worker, began=9)})
    times.see({2: replace(daemon, taken=320)})
    assert times._kept == 300
    times.see({2: replace(daemon, taken=320), 4: worker})
    times.see({2: replace(daemon, taken=320), 4: replace(worker, began=12, own=1)})
    assert times._kept == 600


def test_processor_time_never_runs_backwards() -> None:
    times = ProcessTimes(os.getpid())
    # The middle process leaves its child to the kernel, as Spark's daemons do.
    program = (
        "import os, signal, sys, time; signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        "if os.fork() == 0:\n"
        "    while time.process_time() < 0.1: pass\n"
        "    os.write(1, b'x')\n"
        "sys.stdin.read()"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as middle:
        assert middle.stdout is not None and middle.stdout.read(1) == b"x"
        before = times.seconds()
        assert before >= 0.1
        [busy] = [number for number, process in processes().items() if process.parent == middle.pid]
        os.kill(busy, signal.SIGKILL)
        while busy in processes():
            pass
        assert times.seconds() >= before
        assert times.seconds(aside=middle.pid) <= times.seconds()
        middle.kill()
