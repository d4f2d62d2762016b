"""Where a broker is: from a URL to host, port, path and TLS."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from urllib.parse import urlsplit

from forebay.errors import InvalidUrl, UsageError

__all__ = ["Address", "parse_address"]

PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Address:
    """One broker."""

    host: str
    port: int
    path: str
    """In front of every path of a request; empty or with a slash at its beginning and none at its end."""
    tls: ssl.SSLContext | None

    @property
    def authority(self) -> str:
        """Host and port, as the Host header wants them."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{'http' if self.tls is None else 'https'}://{self.authority}{self.path}"


def parse_address(url: str, ca: str | os.PathLike[str] | None = None) -> Address:
    """The address behind `http://host:port` or `https://...`; `ca` is a file of certificates to trust."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise InvalidUrl(f"{url[:200]!r}: {error}", hint="as http://127.0.0.1:8080") from error
    if parts.scheme not in PORTS or not parts.hostname:
        raise InvalidUrl(f"{url[:200]!r} is not the URL of a broker", hint="as http://127.0.0.1:8080")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise InvalidUrl(
            "the URL of a broker has a host, a port and a path, nothing else",
            hint="pass the token as token=...",
        )
    if any(not 0x21 <= ord(letter) <= 0x7E for letter in parts.hostname + parts.path):
        raise InvalidUrl(f"{url[:200]!r} has letters that a URL may not have", hint="percent-encode them")
    return Address(
        parts.hostname, port or PORTS[parts.scheme], parts.path.rstrip("/"), _tls(parts.scheme, ca)
    )


def _tls(scheme: str, ca: str | os.PathLike[str] | None) -> ssl.SSLContext | None:
    if scheme == "http":
        if ca is not None:
            raise UsageError("certificates to trust, and a URL without TLS", hint="use https://")
        return None
    try:
        context = ssl.create_default_context(cafile=None if ca is None else os.fspath(ca))
    except (OSError, ssl.SSLError) as error:
        raise UsageError(f"{ca}: {error}", hint="a file with certificates in PEM form") from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context
