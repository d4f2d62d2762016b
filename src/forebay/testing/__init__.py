"""The shipped test kit: a simulated world, faults, history checkers, and real servers.

What runs in the simulated world is re-exported here. What needs the real one is imported by its full name
(`forebay.testing.servers`, `forebay.testing.proxy`, `forebay.testing.kill`), so that this import stays cheap.
"""

from forebay.testing.actor import Actor, ActorCrashed, SimClock
from forebay.testing.checkers import CHECKERS, Problem, check
from forebay.testing.faults import (
    FAULT_KINDS,
    INSTANT,
    S3_LIKE,
    Constant,
    Faults,
    Latencies,
    LogNormal,
    Uniform,
)
from forebay.testing.history import Call, History, Status
from forebay.testing.sim_coordinator import SimCoordinator
from forebay.testing.sim_loop import Deadlock, Forbidden, SimLoop, SimulationError, StepLimit, TimeLimit
from forebay.testing.sim_store import SimStore
from forebay.testing.trace import Event, RequestCount, Requests
from forebay.testing.world import World, run_seeds, seeds

__all__ = [
    "CHECKERS",
    "FAULT_KINDS",
    "INSTANT",
    "S3_LIKE",
    "Actor",
    "ActorCrashed",
    "Call",
    "Constant",
    "Deadlock",
    "Event",
    "Faults",
    "Forbidden",
    "History",
    "Latencies",
    "LogNormal",
    "Problem",
    "RequestCount",
    "Requests",
    "SimClock",
    "SimCoordinator",
    "SimLoop",
    "SimStore",
    "SimulationError",
    "Status",
    "StepLimit",
    "TimeLimit",
    "Uniform",
    "World",
    "check",
    "run_seeds",
    "seeds",
]
