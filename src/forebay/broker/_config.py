"""How a broker is set up."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, TypeAlias

from forebay.broker._limits import HttpLimits
from forebay.errors import UsageError
from forebay.log import ProducerConfig, ReaderConfig, TailCacheConfig, WriterConfig

__all__ = ["ROLES", "BrokerConfig", "Role", "is_loopback"]

Role: TypeAlias = Literal["write", "read"]
ROLES: Final[tuple[Role, ...]] = ("write", "read")


@dataclass(frozen=True, slots=True)
class BrokerConfig:
    """A broker: who it is, what it does, how much it holds."""

    broker_id: str = "broker-1"
    """Name in health reports, metrics and `explain`. 1 to 64 characters."""
    host: str = "127.0.0.1"
    """Address to bind. Anything but loopback demands tokens."""
    port: int = 8080
    """Port to bind; 0: any free one."""
    roles: tuple[Role, ...] = ROLES
    """What it serves: `write` for /produce, `read` for /consume and /tail. At least one."""
    producer: ProducerConfig = field(default_factory=ProducerConfig)
    """When batches are flushed, and how much may wait before requests are refused."""
    writer: WriterConfig = field(default_factory=WriterConfig)
    reader: ReaderConfig = field(default_factory=ReaderConfig)
    tail_cache: TailCacheConfig = field(default_factory=TailCacheConfig)
    """How much of the newest records is kept for readers."""
    tail_cache_dir: Path | None = None
    """Directory that brokers of one machine share; None: each keeps its own tail in memory."""
    limits: HttpLimits = field(default_factory=HttpLimits)
    produce_timeout_ms: int = 120_000
    """Milliseconds after which a batch that is not durable is answered as an unknown outcome. At least 1."""
    stop_timeout_ms: int = 10_000
    """Milliseconds that a stop gives to requests under way. At least 0."""
    follow_linger_ms: int = 30_000
    """Milliseconds for which a partition is followed after its last waiting request. At least 0."""
    tail_heartbeat_ms: int = 5_000
    """Milliseconds between two signs of life of an event stream without records. At least 1."""
    require_tokens: bool = False
    """Whether every request needs a token, also on loopback."""
    insecure: bool = False
    """Whether requests without a token are served on any address."""
    token_refresh_ms: int = 2_000
    """Milliseconds after which a change of tokens has taken effect. At least 1."""
    compact: bool = False
    """Whether compaction, retention and vacuum run inside this broker."""
    storage_scan_ms: int = 600_000
    """Milliseconds between two listings of the store for the bytes in it, which happen only where the metrics
    are read. 0: never; at least 0."""
    scenario: dict[str, str] = field(default_factory=dict)
    """What a load test wants to see in the metrics of its brokers."""

    def __post_init__(self) -> None:
        if not 1 <= len(self.broker_id) <= 64:
            raise UsageError(f"broker id {self.broker_id[:64]!r}", hint="a name of 1 to 64 characters")
        if not self.roles or any(role not in ROLES for role in self.roles):
            raise UsageError(f"roles {self.roles}", hint="write, read or both")
        low = min(self.produce_timeout_ms, self.tail_heartbeat_ms, self.token_refresh_ms)
        if low < 1 or min(self.stop_timeout_ms, self.follow_linger_ms, self.storage_scan_ms) < 0:
            raise UsageError(f"not a usable configuration: {self}", hint="see the range under each field")

    @property
    def needs_tokens(self) -> bool:
        """Whether requests are served with a token only."""
        return self.require_tokens or not (self.insecure or is_loopback(self.host))


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address. A name counts only if it is `localhost`."""
    import ipaddress

    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
