"""Loops that work for a while and tell the rate.

The clock is read between steps, so a step should take some microseconds at least: fast operations do a few
hundred units per step and say how many. The rate is taken over the time that really passed, last step
included. Processor time is that of this process with all its threads, without that of any server.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from benchmarks.harness.figure import Sample
from benchmarks.harness.suite import Variant

__all__ = ["async_variant", "timed", "timed_async", "variant"]


def timed(step: Callable[[], float], seconds: float) -> Sample:
    """Call `step`, which tells how many units it did, for that long."""
    spent = time.process_time()
    begin = time.perf_counter()
    end, units, now = begin + seconds, 0.0, begin
    while now < end:
        units += step()
        now = time.perf_counter()
    return _sample(units, now - begin, time.process_time() - spent)


async def timed_async(step: Callable[[], Awaitable[float]], seconds: float) -> Sample:
    """The same for a coroutine function."""
    spent = time.process_time()
    begin = time.perf_counter()
    end, units, now = begin + seconds, 0.0, begin
    while now < end:
        units += await step()
        now = time.perf_counter()
    return _sample(units, now - begin, time.process_time() - spent)


def _sample(units: float, seconds: float, cpu_s: float) -> Sample:
    return Sample(units / seconds, (), cpu_s / units * 1e6 if units else None)


def variant(step: Callable[[], float], unit: str) -> Variant:
    """A variant that repeats `step`."""
    return Variant(lambda seconds: timed(step, seconds), unit)


def async_variant(runner: asyncio.Runner, step: Callable[[], Awaitable[float]], unit: str) -> Variant:
    """A variant that repeats `step` on the loop of `runner`."""
    return Variant(lambda seconds: runner.run(timed_async(step, seconds)), unit)
