"""The tenants of the storage seam. A new one is a line in `TENANTS` and a class in `tenants.py`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

# Helpers are imported as `tests.storage...`, here and in spawned processes, wherever pytest was started.
sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.storage.tenants import (
    FaultServerTenant,
    LocalTenant,
    MemoryTenant,
    SeaweedTenant,
    SimulatedTenant,
    Tenant,
)

TENANTS = [
    pytest.param("memory", id="memory"),
    pytest.param("local", id="local"),
    pytest.param("simulated", id="simulated"),
    pytest.param("fault-server", id="fault-server"),
    pytest.param("seaweed", id="seaweed", marks=pytest.mark.real_server("seaweed")),
]


@pytest.fixture(params=TENANTS)
def tenant(request: pytest.FixtureRequest, tmp_path: Path) -> Tenant:
    """One store after the other, each empty."""
    match request.param:
        case "memory":
            return MemoryTenant()
        case "local":
            return LocalTenant(tmp_path / "objects")
        case "simulated":
            return SimulatedTenant()
        case "fault-server":
            return FaultServerTenant()
        case _:
            return SeaweedTenant(request.getfixturevalue("seaweed"))
