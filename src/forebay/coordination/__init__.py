"""Versioned keys: one seam to memory, an embedded database and Oxia."""

from forebay.coordination._api import (
    KEY_BYTES_MAX,
    SCAN_RECORDS_MAX,
    SESSION_TIMEOUT_MS_MAX,
    SESSION_TIMEOUT_MS_MIN,
    VALUE_BYTES_MAX,
    WRITE_BYTES_MAX,
    WRITE_OPERATIONS_MAX,
    Coordinator,
    Delete,
    DeleteRange,
    Operation,
    Put,
    Record,
    Session,
    Watch,
    When,
    WriteResult,
    children,
    directory_of,
    validate_key,
)
from forebay.coordination._memory import MemoryCoordinator
from forebay.coordination._memory_state import MemoryState
from forebay.coordination._open import is_there, open_coordinator
from forebay.coordination._sqlite import SqliteCoordinator
from forebay.kit.conditions import ABSENT, ANY

__all__ = [
    "ABSENT",
    "ANY",
    "KEY_BYTES_MAX",
    "SCAN_RECORDS_MAX",
    "SESSION_TIMEOUT_MS_MAX",
    "SESSION_TIMEOUT_MS_MIN",
    "VALUE_BYTES_MAX",
    "WRITE_BYTES_MAX",
    "WRITE_OPERATIONS_MAX",
    "Coordinator",
    "Delete",
    "DeleteRange",
    "MemoryCoordinator",
    "MemoryState",
    "Operation",
    "Put",
    "Record",
    "Session",
    "SqliteCoordinator",
    "Watch",
    "When",
    "WriteResult",
    "children",
    "directory_of",
    "is_there",
    "open_coordinator",
    "validate_key",
]
