"""A scenario: one TOML file that says what is run. With every default, it goes into the run directory.

Unknown names are refused, so that a misspelt setting is an error and not a default.
"""

from __future__ import annotations

import dataclasses
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from forebay.errors import UsageError
from forebay.loadtest._records import HEADER_BYTES

__all__ = ["Kill", "Scenario", "load_scenario"]


@dataclass(frozen=True, slots=True)
class Kill:
    """A broker that dies during the run, without a warning."""

    broker: int
    """Number of the broker, from 1."""
    at_s: float
    """Seconds after the start of the load. At least 0."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is run, and against what."""

    name: str
    """Part of the name of the run directory: letters, digits, `-` and `_`."""
    duration_s: float = 10.0
    """Seconds of load. Above 0."""
    seed: int = 1
    """For owner sets and payloads."""
    brokers: int = 1
    """Brokers to start. 1 to 64; ignored where `urls` names some."""
    urls: list[str] = field(default_factory=list)
    """Brokers that run already; empty: the run starts its own."""
    store: str = ""
    """Store of the started brokers; empty: a directory inside the run directory."""
    coordinator: str = ""
    """Their coordinator, where a store is named."""
    serve_options: list[str] = field(default_factory=list)
    """Further options of `forebay serve`, as `["--batch-max-delay-ms", "20"]`."""
    topic: str = "loadtest"
    """The topic, made anew."""
    partitions: int = 4
    """Its partitions. 1 to 1,000."""
    owners: int = 2
    """Brokers that may take a partition's requests; at most all of them. At least 1."""
    selection: str = "round_robin"
    """Which of them is asked next: `round_robin` or `least_inflight`."""
    record_bytes: int = 1024
    """Bytes of a record. 32 to 1 MiB."""
    records_per_request: int = 100
    """Records of a request. 1 to 100,000."""
    rate_bytes_per_s: int = 0
    """Bytes of records offered in all, as a steady rate; 0: as much as is answered."""
    peak_share: float = 0.0
    """In place of `rate_bytes_per_s`: offer this share of the peak, which is measured first. 0 (off) to 1."""
    peak_s: float = 15.0
    """Seconds for which the peak is measured. Above 0."""
    processes: int = 1
    """Generator processes. 1 to 64."""
    streams: int = 8
    """Requests that each process keeps under way. 1 to 250."""
    body: str = "frame"
    """`frame`: msgpack with whole batches; `json`: text."""
    give_up_s: float = 30.0
    """Seconds after which a request that nobody answered is given up. Above 0."""
    sample_s: float = 1.0
    """Seconds between two samples of clients and brokers. Above 0."""
    kills: list[Kill] = field(default_factory=list)
    """Brokers that die."""
    keep: bool = False
    """Whether started brokers go on after the run, until `forebay bench down`."""

    def __post_init__(self) -> None:
        _check(
            self.name and all(letter.isalnum() or letter in "-_" for letter in self.name), "name", self.name
        )
        for name, low, high in (
            ("brokers", 1, 64),
            ("partitions", 1, 1000),
            ("owners", 1, 64),
            ("record_bytes", HEADER_BYTES, 1 << 20),
            ("records_per_request", 1, 100_000),
            ("rate_bytes_per_s", 0, 1 << 40),
            ("processes", 1, 64),
            ("streams", 1, 250),
        ):
            _check(low <= getattr(self, name) <= high, name, getattr(self, name))
        for name in ("duration_s", "give_up_s", "sample_s", "peak_s"):
            _check(getattr(self, name) > 0, name, getattr(self, name))
        _check(0 <= self.peak_share <= 1, "peak_share", self.peak_share)
        _check(not (self.peak_share and self.rate_bytes_per_s), "peak_share", "given beside rate_bytes_per_s")
        _check(self.selection in ("round_robin", "least_inflight"), "selection", self.selection)
        _check(self.body in ("frame", "json"), "body", self.body)
        for kill in self.kills:
            _check(not self.urls and 1 <= kill.broker <= self.brokers and kill.at_s >= 0, "kills", kill)

    @property
    def request_bytes(self) -> int:
        """Bytes of the records of one request."""
        return self.record_bytes * self.records_per_request

    @classmethod
    def from_resolved(cls, found: object) -> Scenario:
        """The scenario that `resolved` told."""
        try:
            return msgspec.convert(found, cls)
        except msgspec.ValidationError as error:
            raise UsageError(f"this is no resolved scenario: {error}") from error

    def resolved(self) -> dict[str, Any]:
        """Every setting, with its value."""
        return dataclasses.asdict(self)


def _check(good: object, name: str, value: object) -> None:
    if not good:
        raise UsageError(f"{name} is {value!r}", hint="docs/how-to/load-test.md lists settings and ranges")


def load_scenario(path: Path, changes: dict[str, str] | None = None) -> Scenario:
    """Read a scenario file; `changes` are settings from the command line, as text."""
    try:
        found = tomllib.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", hint="name a scenario file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is no TOML: {error}") from error
    found.setdefault("name", path.stem)
    for name, text in (changes or {}).items():
        try:
            found[name] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            found[name] = text
    known = {each.name for each in dataclasses.fields(Scenario)}
    strange = sorted(found.keys() - known)
    if strange:
        raise UsageError(
            f"{path}: there is no setting {strange[0]!r}", hint=f"known are {', '.join(sorted(known))}"
        )
    try:
        return msgspec.convert(found, Scenario)
    except msgspec.ValidationError as error:
        raise UsageError(f"{path}: {error}") from error
