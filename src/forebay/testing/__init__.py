"""The shipped test kit: a simulated world, faults, history checkers, and real servers."""
