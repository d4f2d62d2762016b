"""The one registry that all figures of the project are entered in."""

from __future__ import annotations

from benchmarks.harness import Suite

__all__ = ["suite"]

suite = Suite()
