"""A process that only serves keeps what it frees, where the C library can be told so."""

from __future__ import annotations

import subprocess
import sys

import pytest

FAULTS = """
import resource, sys
from forebay.broker import calm_collector
from forebay.kit.memory import keep_free_memory
if sys.argv[1] == "calm":
    calm_collector()
    if not keep_free_memory():
        sys.exit(77)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(200):
    bodies = [b"x" * 120_000 for _ in range(20)]
    del bodies
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def _faults(how: str) -> int:
    done = subprocess.run([sys.executable, "-c", FAULTS, how], check=False, capture_output=True, text=True)
    if done.returncode == 77:
        pytest.skip("the C library has no such bounds")
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_bodies_that_come_and_go_cost_no_page_faults() -> None:
    # Twenty bodies of thirty pages, once; without the bounds it is that many every time.
    assert _faults("calm") < 5_000
