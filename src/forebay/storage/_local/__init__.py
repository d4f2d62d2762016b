"""Durable local files with compare-and-set between threads and processes.

The parts, from the ground up: `_errors` names what the operating system said, `_directories` makes new
directories survive a power cut, `_locks` holds the stripes and sweeps what killed writers left, `_files` is
the store as plain blocking functions, `_walk` lists in byte order, `_store` runs all of it under asyncio.
"""

from forebay.storage._local._store import LocalStore

__all__ = ["LocalStore"]
