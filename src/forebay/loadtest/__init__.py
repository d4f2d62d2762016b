"""Load tests to believe: scenarios as files, a run as a directory, three accounts that must agree."""

from forebay.loadtest._run import Run, write_report
from forebay.loadtest._scenario import Kill, Scenario, load_scenario

__all__ = ["Kill", "Run", "Scenario", "load_scenario", "write_report"]
