"""Figures, not impressions: every number here is a ratio of two things measured in the same run.

Rates of one machine say little about another, and rates of one minute say little about the next: the disk
below a virtual machine may be ten times faster at noon. So each benchmark measures what it claims and what it
is compared with in turns, round after round, there and back, and a figure is the median of the ratios of the
rounds, with the lowest and the highest beside it. A target that is missed is shown as missed.

    python -m benchmarks                  all of them, kept under benchmarks/results/<machine>/
    python -m benchmarks local-cas s3     some of them
    python -m benchmarks --quick          a short look; kept apart, never over a full run
    python -m benchmarks --list           what there is

`harness/` knows how to measure, keep and draw; `figures/` says what is measured, a module per part of the
house; `peers/` holds programs that run somebody else's client for comparison.
"""
