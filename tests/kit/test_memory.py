"""What is freed stays with the process: the next block of the same size takes no page from the kernel."""

from __future__ import annotations

import subprocess
import sys

import pytest

# In a process of its own: what is told to the allocator holds until the process ends.
PROGRAM = """
import resource, sys, threading
from forebay.kit.memory import keep_free_memory
one_heap = sys.argv[1] == "one"
if not keep_free_memory(512 << 20, one_heap=one_heap):
    sys.exit("no such allocator")
def use():
    block = bytearray(64 << 20)
    block[::4096] = b"1" * len(block[::4096])
def run():
    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
use()
run()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    use()
    run()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
PAGES = 8 * (64 << 20) // 4096


def faults(heaps: str) -> int:
    done = subprocess.run([sys.executable, "-c", PROGRAM, heaps], capture_output=True, text=True, check=False)
    if "no such allocator" in done.stderr:
        pytest.skip("another C library")
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_one_heap_keeps_large_blocks_for_every_thread() -> None:
    assert faults("one") < PAGES // 20


def test_otherwise_large_blocks_go_back_as_they_are_freed() -> None:
    assert faults("many") > PAGES // 2
