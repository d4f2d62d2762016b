"""Dataflow: receivers, a durable buffer on disk, exporters, wired by a YAML file."""

from forebay.dataflow._document import FILE_BYTES_MAX
from forebay.dataflow._flow import Dataflow
from forebay.dataflow._metrics_page import MetricsPage
from forebay.dataflow._plan import Node, Plan, check, load
from forebay.dataflow._problems import DataflowInvalid, Problem

__all__ = [
    "FILE_BYTES_MAX",
    "Dataflow",
    "DataflowInvalid",
    "MetricsPage",
    "Node",
    "Plan",
    "Problem",
    "check",
    "load",
]
