"""Whether a store or a coordinator answers.

The question is asked by a child process that is killed when its time is over. A client library may wait for a
lost server in threads that nothing can cancel, and the doctor must end whatever they do. The URL goes through
a pipe, not through the arguments, because it may hold a secret and arguments are for everyone to see.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Literal

from forebay.cli.doctor.check import Check, Status

__all__ = ["answers"]

ANSWER_SECONDS_MAX = 4.0
"""Seconds a store or a coordinator has to answer one small read, the start of Python included."""

Kind = Literal["store", "coordinator"]


def answers(kind: Kind, url: str) -> Check:
    """Ask one small question and judge by the answer."""
    command = [sys.executable, "-m", "forebay.cli.doctor.question", kind]
    try:
        done = subprocess.run(
            command, input=url, capture_output=True, text=True, timeout=ANSWER_SECONDS_MAX, check=False
        )
        found = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return Check(
            kind,
            Status.FAILED,
            f"no answer in {ANSWER_SECONDS_MAX:g} s",
            "see whether it runs and the address is right",
        )
    except ValueError:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        return Check(kind, Status.FAILED, f"could not be asked: {last[0]}")
    return Check(kind, Status(found["status"]), found["detail"], found["hint"])
