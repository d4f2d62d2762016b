"""What an `oxia://` URL says: where the service is, and how long a call may take.

    oxia://host:port/namespace?timeout_ms=10000&tls=true

The host may be any server of a cluster: it tells who leads which shard. Options that are not known are
refused by name, because a misspelt deadline that is silently ignored shows itself only in the worst hour.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from forebay.errors import InvalidUrl

__all__ = ["OxiaConfig", "parse_url"]

DEFAULT_PORT = 6648
DEFAULT_NAMESPACE = "default"
TIMEOUT_MS_MIN = 10
"""Shortest `timeout_ms`: below it a healthy server would be taken for a silent one."""
TIMEOUT_MS_MAX = 600_000
"""Longest `timeout_ms`: ten minutes."""
REQUESTS_IN_FLIGHT_MAX = 256
"""Most `requests_in_flight`: more would only queue in the server."""
_HINT = "write it as oxia://host:port/namespace?timeout_ms=10000"


@dataclass(frozen=True, slots=True)
class OxiaConfig:
    """How to reach one namespace of an Oxia cluster."""

    address: str
    """`host:port` of the service."""
    namespace: str = DEFAULT_NAMESPACE
    """The namespace all keys live in. A standalone server has only `default`."""
    timeout_ms: int = 10_000
    """Milliseconds for one call with everything it needs: finding the leader, waiting for room, retries of
    reads. 10 to 600,000."""
    tls: bool = False
    """Whether to encrypt, with the certificate authorities of the system."""
    requests_in_flight: int = 8
    """Requests sent on one shard's write stream before the first of them is answered. More hide a slow
    network better, fewer make larger requests. 1 to 256."""

    def __post_init__(self) -> None:
        if not TIMEOUT_MS_MIN <= self.timeout_ms <= TIMEOUT_MS_MAX:
            raise InvalidUrl(
                f"timeout_ms={self.timeout_ms} is out of bounds",
                hint=f"take {TIMEOUT_MS_MIN} to {TIMEOUT_MS_MAX} milliseconds",
            )
        if not 1 <= self.requests_in_flight <= REQUESTS_IN_FLIGHT_MAX:
            raise InvalidUrl(
                f"requests_in_flight={self.requests_in_flight} is out of bounds",
                hint=f"take 1 to {REQUESTS_IN_FLIGHT_MAX}",
            )

    @property
    def timeout_s(self) -> float:
        """The timeout in seconds."""
        return self.timeout_ms / 1000


def parse_url(url: str) -> OxiaConfig:
    """The configuration in an `oxia://` URL, or `InvalidUrl`."""
    parts = urlsplit(url)
    if parts.scheme != "oxia":
        raise InvalidUrl(f"{url!r} is not an oxia:// URL", hint=_HINT)
    if parts.username is not None or parts.password is not None:
        raise InvalidUrl("an oxia:// URL takes no user name and no password", hint=_HINT)
    if parts.fragment:
        raise InvalidUrl(f"an oxia:// URL has no part after '#': {parts.fragment!r}", hint=_HINT)
    namespace = unquote(parts.path.removeprefix("/"))
    if "/" in namespace.removesuffix("/") or not namespace.isprintable() or not namespace.isascii():
        raise InvalidUrl(f"{namespace!r} is not the name of an Oxia namespace", hint=_HINT)
    return OxiaConfig(
        _address(url), namespace.removesuffix("/") or DEFAULT_NAMESPACE, **_options(parts.query)
    )


def _address(url: str) -> str:
    parts = urlsplit(url)
    try:
        port = parts.port if parts.port is not None else DEFAULT_PORT
    except ValueError:
        raise InvalidUrl(f"the port of {parts.netloc!r} is not a number up to 65535", hint=_HINT) from None
    if not parts.hostname or port == 0:
        raise InvalidUrl(f"{url!r} names no server", hint=_HINT)
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{host}:{port}"


def _options(query: str) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name in options:
            raise InvalidUrl(f"the option {name!r} is given twice", hint="keep one of them")
        if name in ("timeout_ms", "requests_in_flight"):
            options[name] = _number(name, value)
        elif name == "tls":
            options[name] = _flag(name, value)
        else:
            raise InvalidUrl(
                f"unknown option {name!r}", hint="known are timeout_ms, tls and requests_in_flight"
            )
    return options


def _number(name: str, value: str) -> int:
    if not (value.isascii() and value.isdigit()):
        raise InvalidUrl(f"{name}={value!r} is not a number", hint="write digits only")
    return int(value[:20])


def _flag(name: str, value: str) -> bool:
    if value not in ("true", "false"):
        raise InvalidUrl(f"{name}={value!r} is neither true nor false", hint="write true or false")
    return value == "true"
