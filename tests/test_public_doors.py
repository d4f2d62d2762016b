"""One public door per room: what a package says it offers is what it offers."""

from __future__ import annotations
import __future__

import ast
import importlib
import inspect
import pkgutil
from pathlib import Path
from types import ModuleType

import pytest

import forebay

SOURCE = Path(forebay.__path__[0])
ROOMS = [
    "forebay",
    *(f"forebay.{info.name}" for info in pkgutil.iter_modules(forebay.__path__) if info.ispkg),
]
MODULES = sorted(path for path in SOURCE.rglob("*.py") if not path.stem.endswith(("_pb2", "_pb2_grpc")))


def module_id(path: Path) -> str:
    return str(path.relative_to(SOURCE))


def sort_key(name: str) -> tuple[int, str]:
    """Constants, then classes, then the rest, as the linter sorts them."""
    return (0 if name.isupper() else 1 if name[:1].isupper() else 2), name


def bound_names(room: ModuleType) -> set[str]:
    return {
        name
        for name, value in vars(room).items()
        if not name.startswith("_")
        and not inspect.ismodule(value)
        and not isinstance(value, __future__._Feature)
    }


def test_the_rooms_are_found() -> None:
    assert {"forebay.kit", "forebay.storage", "forebay.coordination", "forebay.testing"} <= set(ROOMS)


@pytest.mark.parametrize("name", ROOMS)
def test_a_room_offers_exactly_what_it_says(name: str) -> None:
    room = importlib.import_module(name)
    offered = [entry for entry in getattr(room, "__all__", []) if entry != "__version__"]
    assert len(set(offered)) == len(offered), "a name comes twice"
    for entry in offered:
        getattr(room, entry)  # some are looked up when they are first asked for
    assert bound_names(room) == set(offered)


@pytest.mark.parametrize("name", ROOMS)
def test_what_a_room_offers_is_sorted(name: str) -> None:
    offered = getattr(importlib.import_module(name), "__all__", [])
    assert list(offered) == sorted(offered, key=sort_key)


@pytest.mark.parametrize("name", ROOMS)
def test_everything_a_room_offers_can_be_imported_by_name(name: str) -> None:
    room = importlib.import_module(name)
    for entry in getattr(room, "__all__", []):
        getattr(room, entry)


@pytest.mark.parametrize("path", MODULES, ids=module_id)
def test_every_module_says_what_it_is(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text())), f"{module_id(path)} has no docstring"


def test_the_kit_offers_everything_its_public_modules_do() -> None:
    offered = set(importlib.import_module("forebay.kit").__all__)
    for path in sorted((SOURCE / "kit").glob("[a-z]*.py")):
        module = importlib.import_module(f"forebay.kit.{path.stem}")
        assert set(module.__all__) <= offered, path.stem
