"""Quiver: durable Arrow store-and-forward on local disk, for many subscribers."""

from forebay.quiver._config import QuiverConfig
from forebay.quiver._cores import QuiverCore
from forebay.quiver._delivery import Delivery
from forebay.quiver._disk import Disk, DiskFile
from forebay.quiver._errors import DirectoryInUse, QuiverFailed, QuiverFull, UnknownSubscriber
from forebay.quiver._forward import Forwarded, Forwarder, read_forwarded
from forebay.quiver._inspect import DirectoryView, describe_segment
from forebay.quiver._local_disk import LocalDisk
from forebay.quiver._quiver import Quiver
from forebay.quiver._reading import SegmentView
from forebay.quiver._repair import Repaired, repair
from forebay.quiver._report import RecoveryReport
from forebay.quiver._selection import Selection
from forebay.quiver._stats import QuiverStats, SubscriberStats
from forebay.quiver._submission import Receipt

__all__ = [
    "Delivery",
    "DirectoryInUse",
    "DirectoryView",
    "Disk",
    "DiskFile",
    "Forwarded",
    "Forwarder",
    "LocalDisk",
    "Quiver",
    "QuiverConfig",
    "QuiverCore",
    "QuiverFailed",
    "QuiverFull",
    "QuiverStats",
    "Receipt",
    "RecoveryReport",
    "Repaired",
    "SegmentView",
    "Selection",
    "SubscriberStats",
    "UnknownSubscriber",
    "describe_segment",
    "read_forwarded",
    "repair",
]
