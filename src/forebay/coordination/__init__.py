"""Versioned keys: one seam to memory, an embedded database and Oxia."""

from forebay.coordination._api import (
    Coordinator,
    Delete,
    DeleteRange,
    Operation,
    Put,
    Record,
    Session,
    Watch,
    WriteResult,
    children,
)
from forebay.coordination._memory import MemoryCoordinator
from forebay.coordination._memory_state import MemoryState
from forebay.kit.conditions import ABSENT, ANY

__all__ = [
    "ABSENT",
    "ANY",
    "Coordinator",
    "Delete",
    "DeleteRange",
    "MemoryCoordinator",
    "MemoryState",
    "Operation",
    "Put",
    "Record",
    "Session",
    "Watch",
    "WriteResult",
    "children",
]
