"""The settings of each kind of node, read from its `config`.

Where the engine has a setting of its own (`QuiverConfig`), the file's keys are translated into it here, and a
combination that the engine refuses is a problem of the file, with a line.
"""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import SplitResult, urlsplit

from forebay.dataflow._problems import shown
from forebay.dataflow._section import Section
from forebay.errors import UsageError
from forebay.quiver import QuiverConfig

__all__ = [
    "Address",
    "OtapExporterSettings",
    "OtapReceiverSettings",
    "OtlpExporterSettings",
    "OtlpReceiverSettings",
    "ParquetSettings",
    "PersistenceSettings",
    "Tls",
    "parse_address",
]

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
HOUR_MS: Final = 3_600_000
DAY_MS: Final = 24 * HOUR_MS
WAL_FILE_BYTES_MAX: Final = 16 * MIB
"""Largest file of the WAL; smaller where `wal.max_size` is small."""
LEASE_MS: Final = HOUR_MS
"""Exporters live in the process that leases to them, and their calls have timeouts of their own; a lease
that lapses while a slow link is at work would only send everything twice."""
HEADERS_MAX: Final = 64
"""Most headers an exporter sends with its calls."""
PARQUET_CODECS: Final = ("zstd", "snappy", "gzip", "lz4", "none")
ARROW_CODECS: Final = ("none", "lz4", "zstd")
_HEADER_NAME: Final = re.compile(r"[a-z0-9_.\-]{1,100}", re.ASCII)
_DEFAULT_PORTS: Final = {"http": 4317, "https": 443}
"""Other clients of OTLP take 443 for `https`, whatever they are written in. For `http` they do not agree, and
none of their ports is one at which such a server listens."""
_PORT: Final = re.compile(r"[0-9]{1,5}", re.ASCII)
_HOST: Final = re.compile(r"[A-Za-z0-9._\-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]", re.ASCII)


@dataclass(frozen=True, slots=True)
class Address:
    """Where to listen."""

    host: str
    port: int
    """0 takes a free one."""

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Tls:
    """The certificate of a server."""

    cert_file: Path
    key_file: Path
    client_ca_file: Path | None
    """With it, clients need a certificate signed by one of these."""


@dataclass(frozen=True, slots=True)
class OtlpReceiverSettings:
    """`urn:otel:otlp:receiver`."""

    grpc: Address | None
    """`listening_addr`; 127.0.0.1:4317 where neither address is given."""
    http: Address | None
    """`http_listening_addr`; no HTTP where it is not given."""
    requests_max: int
    """`response_stream_channel_size`: requests under way at once, 1 to 65,536, default 256."""
    request_bytes_max: int
    """`max_request_size`: bytes of one request after decompression, 1 KiB to 64 MiB, default 4 MiB."""
    pending_bytes_max: int
    """`max_pending_size`: bytes of all requests under way, at least one request, default 64 MiB."""
    tls: Tls | None

    @classmethod
    def read(cls, section: Section) -> OtlpReceiverSettings:
        """From `config`."""
        grpc = _address(section, "listening_addr")
        http = _address(section, "http_listening_addr")
        if not section.has("listening_addr") and not section.has("http_listening_addr"):
            grpc = Address("127.0.0.1", 4317)
        request_bytes = section.bytes("max_request_size", 4 * MIB, KIB, 64 * MIB)
        return cls(
            grpc=grpc,
            http=http,
            requests_max=section.integer("response_stream_channel_size", 256, 1, 65_536),
            request_bytes_max=request_bytes,
            pending_bytes_max=section.bytes("max_pending_size", 64 * MIB, request_bytes, 64 * GIB),
            tls=_tls(section),
        )


@dataclass(frozen=True, slots=True)
class OtapReceiverSettings:
    """`urn:otel:otap:receiver`."""

    address: Address
    """`listening_addr`."""
    requests_max: int
    """`response_stream_channel_size`: batches under way at once, 1 to 65,536, default 256."""
    request_bytes_max: int
    """`max_request_size`: bytes of one batch, as it comes and with all dictionaries written out, 1 KiB to
    64 MiB, default 16 MiB."""
    pending_bytes_max: int
    """`max_pending_size`: bytes of all batches under way, as OTLP, at least one batch, default 64 MiB."""
    tls: Tls | None

    @classmethod
    def read(cls, section: Section) -> OtapReceiverSettings:
        """From `config`."""
        address = _address(section, "listening_addr")
        if not section.has("listening_addr") and section.is_mapping:
            section.complain("", "the key listening_addr is missing", "as in 127.0.0.1:4319")
        request_bytes = section.bytes("max_request_size", 16 * MIB, KIB, 64 * MIB)
        return cls(
            address=address or Address("127.0.0.1", 0),
            requests_max=section.integer("response_stream_channel_size", 256, 1, 65_536),
            request_bytes_max=request_bytes,
            pending_bytes_max=section.bytes("max_pending_size", 64 * MIB, request_bytes, 64 * GIB),
            tls=_tls(section),
        )


@dataclass(frozen=True, slots=True)
class PersistenceSettings:
    """`urn:otap:processor:persistence`."""

    path: Path
    """Directory of the store; relative ones start at the working directory."""
    quiver: QuiverConfig

    @classmethod
    def read(cls, section: Section) -> PersistenceSettings:
        """From `config`."""
        path = Path(section.text("path"))
        quiver = _quiver(section)
        return cls(path, quiver)


@dataclass(frozen=True, slots=True)
class OtlpExporterSettings:
    """`urn:otel:otlp:exporter`."""

    target: str
    """Host and port of `grpc_endpoint`."""
    is_tls: bool
    """Whether the endpoint begins with https."""
    compression: str
    """`compression_method`: none or gzip, default none."""
    timeout_ms: int
    """`timeout` of one call, 10 ms to an hour, default 15 s."""
    request_bytes_max: int
    """`max_request_size`: requests are joined up to so many bytes, 1 KiB to 64 MiB, default 2 MiB."""
    headers: tuple[tuple[str, str], ...]
    """`headers`: sent with every call, as for authentication."""
    ca_file: Path | None
    """`ca_file`: certificates to trust instead of those of the system."""

    @classmethod
    def read(cls, section: Section) -> OtlpExporterSettings:
        """From `config`."""
        compression = section.choice("compression_method", ("none", "gzip"), "none")
        return cls(**_destination(section), compression=compression)


@dataclass(frozen=True, slots=True)
class OtapExporterSettings(OtlpExporterSettings):
    """`urn:otel:otap:exporter`."""

    payload_compression: str
    """`arrow.payload_compression`: none, lz4 or zstd for the buffers of Arrow, default zstd."""

    @classmethod
    def read(cls, section: Section) -> OtapExporterSettings:
        """From `config`."""
        method = section.choice("compression_method", ("none", "gzip", "zstd"), "none")
        arrow = section.section("arrow")
        payload = arrow.choice("payload_compression", ARROW_CODECS, "none" if method == "gzip" else "zstd")
        arrow.finish()
        if method == "zstd":
            # The bytes on the wire are what this is about; gRPC for Python cannot compress messages so.
            payload = "zstd"
            section.remark(
                "compression_method",
                "messages cannot be compressed with zstd here, the Arrow buffers in them are instead",
                "the same as compression_method: none with arrow.payload_compression: zstd",
            )
        return cls(
            **_destination(section),
            compression=method if method == "gzip" else "none",
            payload_compression=payload,
        )


@dataclass(frozen=True, slots=True)
class ParquetSettings:
    """`urn:otel:parquet:exporter`."""

    path: Path
    """Directory of the files."""
    compression: str
    """`compression`: zstd, snappy, gzip, lz4 or none, default zstd."""

    @classmethod
    def read(cls, section: Section) -> ParquetSettings:
        """From `config`."""
        path = Path(section.text("path"))
        return cls(path, section.choice("compression", PARQUET_CODECS, "zstd"))


def _destination(section: Section) -> dict[str, Any]:
    """What exporters over gRPC have in common."""
    target, is_tls = _endpoint(section)
    ca_file = section.text("ca_file", "")
    if ca_file and not is_tls:
        section.complain("ca_file", "the endpoint does not use TLS", "write https:// in grpc_endpoint")
    elif ca_file and not Path(ca_file).is_file():
        section.complain("ca_file", f"{shown(ca_file)} is not a file", "give the path of a PEM file")
    elif ca_file:
        _try_roots(section, "ca_file", Path(ca_file))
    return {
        "target": target,
        "is_tls": is_tls,
        "timeout_ms": section.duration_ms("timeout", 15_000, 10, HOUR_MS),
        "request_bytes_max": section.bytes("max_request_size", 2 * MIB, KIB, 64 * MIB),
        "headers": _headers(section.section("headers")),
        "ca_file": Path(ca_file) if ca_file else None,
    }


def _quiver(section: Section) -> QuiverConfig:
    segment, wal, retention = (section.section(each) for each in ("segment", "wal", "retention"))
    segment_bytes = segment.bytes("target_size", 32 * MIB, KIB, GIB)
    wal_bytes = wal.bytes("max_size", 128 * MIB, 64 * KIB, 1 << 44)
    cap = retention.bytes("size_cap", 10 * GIB, 256 * KIB, 1 << 60)
    policy: Literal["backpressure", "drop_oldest"] = "backpressure"
    if retention.choice("size_cap_policy", ("backpressure", "drop_oldest"), policy) == "drop_oldest":
        policy = "drop_oldest"
    hours = retention.integer("max_retain_after_ingestion_hours", 0, 1, 1_000_000)
    values: dict[str, Any] = {
        "segment_bytes": segment_bytes,
        "segment_open_ms": segment.duration_ms("max_open_duration", 1_000, 1, DAY_MS),
        "segment_hold_ms": segment.duration_ms("max_hold_duration", 1_000, 0, 60_000),
        "segment_codec": segment.choice("compression", ARROW_CODECS, "none"),
        "wal_codec": wal.choice("compression", ARROW_CODECS, "none"),
        "wal_bytes_max": wal_bytes,
        "wal_file_bytes": min(WAL_FILE_BYTES_MAX, wal_bytes // 2),
        "flush_interval_ms": wal.duration_ms("flush_interval", 25, 0, 60_000),
        "size_cap_bytes": cap,
        "headroom_bytes": retention.bytes("steady_state_headroom", 0, 0, cap),
        "retain_ms": hours * HOUR_MS or None,
        "lease_ms": LEASE_MS,
    }
    for each in (segment, wal, retention):
        each.finish()
    need = wal_bytes + 2 * segment_bytes
    if cap < need:
        retention.complain(
            "size_cap",
            f"{cap:,} bytes do not hold the WAL and two segments",
            f"at least wal.max_size + 2 x segment.target_size = {need:,}",
        )
        return QuiverConfig()
    try:
        return QuiverConfig(size_cap_policy=policy, **values)
    except UsageError as error:
        section.complain("", error.message, error.hint)
        return QuiverConfig()


def parse_address(text: str) -> Address:
    """An address from `127.0.0.1:4317` or `[::1]:4317`. Raises `UsageError`."""
    host, colon, port = text.rpartition(":")
    if not colon or not _HOST.fullmatch(host) or not _PORT.fullmatch(port) or int(port) > 65_535:
        raise UsageError(f"{shown(text)} is not an address", hint="host and port, as in 127.0.0.1:4317")
    return Address(host.strip("[]"), int(port))


def _address(section: Section, name: str) -> Address | None:
    text = section.text(name, "")
    if not text:
        return None
    try:
        return parse_address(text)
    except UsageError as error:
        section.complain(name, error.message, error.hint)
        return None


def _tls(section: Section) -> Tls | None:
    if not section.has("tls") and not any(each.startswith("tls.") for each in section.value.fields):
        section.take("tls")
        return None
    inner = section.section("tls")
    cert, key, client = inner.text("cert_file"), inner.text("key_file"), inner.text("client_ca_file", "")
    for name, path in (("cert_file", cert), ("key_file", key), ("client_ca_file", client)):
        if path and not Path(path).is_file():
            inner.complain(name, f"{shown(path)} is not a file", "give the path of a PEM file")
    inner.finish()
    tls = Tls(Path(cert), Path(key), Path(client) if client else None)
    if cert and key:
        _try_tls(inner, tls)
    return tls


def _try_tls(section: Section, tls: Tls) -> None:
    """Whether the files are what they should be. gRPC would only say that it cannot listen."""
    if tls.cert_file.is_file() and tls.key_file.is_file():
        try:
            # Without a password, OpenSSL would ask for one on the terminal.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(tls.cert_file, tls.key_file, password="")
        except (OSError, ValueError) as error:
            hint = "a certificate and its key, not encrypted, as PEM files"
            section.complain("cert_file", f"certificate and key cannot be used: {error}", hint)
    if tls.client_ca_file is not None:
        _try_roots(section, "client_ca_file", tls.client_ca_file)


def _try_roots(section: Section, name: str, path: Path) -> None:
    if not path.is_file():
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except OSError as error:
        section.complain(name, f"no certificates in it: {error}", "give the path of a PEM file")


def _endpoint(section: Section) -> tuple[str, bool]:
    text = section.text("grpc_endpoint")
    if not text:
        return "", False
    try:
        parts = urlsplit(text)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        parts, host, port = urlsplit(""), "", None
    bracketed = f"[{host}]" if ":" in host else host
    is_known = parts.scheme in ("http", "https") and port != 0
    if not is_known or not _HOST.fullmatch(bracketed) or _has_more(parts):
        hint = "scheme, host and port and nothing else, as in http://127.0.0.1:4317"
        if "{{" in text:
            hint = "put the name of the host in the place of what is in braces"
        # A password is not repeated where logs may keep it.
        said = "this" if "@" in text else shown(text)
        section.complain("grpc_endpoint", f"{said} is not an endpoint", hint)
        return "", False
    if port is None and parts.scheme == "http":
        section.remark("grpc_endpoint", "no port, 4317 is meant", "write it: other clients take 80 or 443")
    return f"{bracketed}:{port or _DEFAULT_PORTS[parts.scheme]}", parts.scheme == "https"


def _has_more(parts: SplitResult) -> bool:
    """Whether an endpoint says something that gRPC would not hear of, like a password."""
    return parts.path not in ("", "/") or bool(parts.query or parts.fragment or "@" in parts.netloc)


def _headers(section: Section) -> tuple[tuple[str, str], ...]:
    names = list(section.value.fields)
    if len(names) > HEADERS_MAX:
        section.complain("", f"{len(names)} headers", f"at most {HEADERS_MAX}")
        return ()
    headers = []
    for name in names:
        value = section.text(name)
        if not _HEADER_NAME.fullmatch(name) or not value.isascii() or not value.isprintable():
            section.complain(name, "not a header", "lower-case letters, digits and - . _; a printable value")
        elif name.startswith("grpc-") or name.endswith("-bin"):
            # It keeps the first for itself, and takes bytes for the others: every call would fail.
            section.complain(name, "gRPC takes no text under this name", "no grpc-..., no ...-bin")
        headers.append((name, value))
    return tuple(headers)
