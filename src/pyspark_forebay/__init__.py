"""How Spark finds the data source `forebay` by itself.

Spark imports every top-level module named `pyspark_*` at the first format it does not know, in a process of
its own, and registers what they call `DefaultSource`. So this one imports nothing else.
"""

from forebay.spark._source import ForebaySource as DefaultSource

__all__ = ["DefaultSource"]
