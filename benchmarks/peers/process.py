"""A peer's program: a line of JSON in is a turn, a line of JSON out its rate."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.harness import Sample, Variant

__all__ = ["PeerFailed", "PeerProcess"]

END_TIMEOUT_S = 10


class PeerFailed(Exception):
    """The program ended or answered something else."""


class PeerProcess:
    """A context manager around one running program."""

    def __init__(self, python: Path, program: Path, *arguments: str) -> None:
        self._command = [str(python), str(program), *arguments]

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # The program ends with its input; one that does not is ended.
        try:
            self._process.communicate(timeout=END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()

    def run(self, seconds: float, **options: object) -> Sample:
        """One turn."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"seconds": seconds, **options}) + "\n")
            self._process.stdin.flush()
            return Sample(float(json.loads(self._process.stdout.readline())["rate"]))
        except (OSError, ValueError, KeyError) as error:
            self._process.kill()
            _, words = self._process.communicate()
            raise PeerFailed(f"{Path(self._command[1]).name} gave no rate: {words[-500:]}") from error

    def variant(self, unit: str, **options: object) -> Variant:
        """`run` as a variant."""
        return Variant(lambda seconds: self.run(seconds, **options), unit)
