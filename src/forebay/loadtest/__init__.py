"""Load tests to believe: scenarios as files, a run as a directory, three accounts that must agree."""

from forebay.loadtest._run import Run, write_report
from forebay.loadtest._scenario import Kill, Scenario, load_scenario
from forebay.loadtest._stack import Stack

__all__ = ["Kill", "Run", "Scenario", "Stack", "load_scenario", "write_report"]
