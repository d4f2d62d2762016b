"""`python -m forebay.cli` is the `forebay` command, for places where scripts are not on the path."""

from __future__ import annotations

from forebay.cli import main

if __name__ == "__main__":
    main()
