"""`python -m benchmarks`."""

from __future__ import annotations

import sys

from benchmarks.command import main

# Spawned workers import this module under another name and must not start over.
if __name__ == "__main__":
    sys.exit(main())
