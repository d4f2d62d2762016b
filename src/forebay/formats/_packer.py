"""A compiled packer of record blocks, where one is installed: fastparquet's `pack_byte_array`.

Finding out the lengths of a list of records costs more in Python than copying them: 40 ns each, so that a
block of small records takes three times as long as a plain `join`. fastparquet has the very function, and it
is as fast as the `join`. It is optional and is never imported as a package, which would bring pandas along:
only its extension module is loaded. Without it everything works, slower.

Its reverse, `unpack_byte_array`, does not check bounds and is not used.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TypeAlias

__all__ = ["Packer", "load_packer"]

Packer: TypeAlias = Callable[[list[bytes]], bytes]

_PACKAGE, _MODULE = "fastparquet", "speedups"
_SAMPLE, _PACKED = [b"", b"ab"], b"\0\0\0\0\2\0\0\0ab"


@cache
def load_packer() -> Packer | None:
    """The packer, or None where there is none that works."""
    try:
        spec = importlib.util.find_spec(_PACKAGE)
        for place in (spec.submodule_search_locations or ()) if spec is not None else ():
            for suffix in importlib.machinery.EXTENSION_SUFFIXES:
                path = Path(place) / f"{_MODULE}{suffix}"
                if path.exists():
                    return _checked(path)
    except (ImportError, AttributeError, ValueError):
        pass
    return None


def _checked(path: Path) -> Packer | None:
    name = f"{_PACKAGE}.{_MODULE}"
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    packer: Packer = module.pack_byte_array
    return packer if packer(_SAMPLE) == _PACKED else None
