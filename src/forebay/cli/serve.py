"""`forebay serve`: the broker as a process.

It prints one line with its address when it is ready, and ends with exit code 0 on SIGTERM or SIGINT, once
everything that was accepted is durable and answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import ssl
import sys
import tempfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forebay.cli import _output as out
from forebay.cli._deployment import Deployment, deployment_options
from forebay.cli._options import CommandGroup
from forebay.cli._run import on_ending
from forebay.errors import Unsupported, UsageError
from forebay.kit.clock import SystemClock
from forebay.kit.ids import IdSource
from forebay.kit.limits import parse_bytes
from forebay.kit.metrics import MetricsRegistry

if TYPE_CHECKING:
    from forebay._connect import Parts
    from forebay.broker import BrokerConfig

__all__ = ["app"]

app = CommandGroup(help="Serve the log over HTTP.")

SCENARIO_PREFIX = "FOREBAY_LOADTEST_"
"""Environment variables that a load test sets for its brokers, shown in their metrics."""


@app.command("serve")
@deployment_options
def serve(  # noqa: PLR0913, PLR0917 - every option is one setting
    deployment: Deployment,
    host: Annotated[str, typer.Option("--host", metavar="H", help="Address to bind.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", metavar="P", min=0, max=65535, help="Port to bind; 0: any free one.")
    ] = 8080,
    broker_id: Annotated[
        str, typer.Option("--broker-id", metavar="NAME", help="Name of this broker.")
    ] = "broker-1",
    role: Annotated[str, typer.Option("--role", metavar="ROLE", help="write, read or both.")] = "both",
    batch_max_bytes: Annotated[
        str,
        typer.Option(
            "--batch-max-bytes",
            metavar="SIZE",
            envvar="LLOG_BATCH_MAX_BYTES",
            help="Size at which a batch is flushed.",
        ),
    ] = "4MiB",
    batch_max_delay_ms: Annotated[
        int,
        typer.Option(
            "--batch-max-delay-ms",
            metavar="MS",
            min=0,
            envvar="LLOG_BATCH_MAX_DELAY_MS",
            help="Longest wait of a batch.",
        ),
    ] = 100,
    pending_max_bytes: Annotated[
        str,
        typer.Option(
            "--pending-max-bytes", metavar="SIZE", help="Bytes not yet durable at which requests are refused."
        ),
    ] = "128MiB",
    body_max_bytes: Annotated[
        str, typer.Option("--body-max-bytes", metavar="SIZE", help="Largest request body.")
    ] = "32MiB",
    codec: Annotated[
        str, typer.Option("--codec", metavar="NAME", help="Compression of records: none or zstd.")
    ] = "none",
    auto_create: Annotated[
        bool, typer.Option("--auto-create/--no-auto-create", help="Whether an append creates its topic.")
    ] = True,
    tail_cache_dir: Annotated[
        Path | None,
        typer.Option(
            "--tail-cache-dir",
            metavar="DIR",
            envvar="LLOG_TAIL_CACHE_DIR",
            help="Directory that brokers of this machine share for the newest records.",
            show_default=False,
        ),
    ] = None,
    compact: Annotated[
        bool, typer.Option("--compact", help="Run compaction, retention and vacuum in here too.")
    ] = False,
    require_tokens: Annotated[
        bool, typer.Option("--require-tokens", help="Demand tokens on loopback too.")
    ] = False,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Serve everybody without tokens, on any address.")
    ] = False,
    tls_cert: Annotated[
        Path | None,
        typer.Option("--tls-cert", metavar="FILE", help="Certificate chain, PEM.", show_default=False),
    ] = None,
    tls_key: Annotated[
        Path | None,
        typer.Option("--tls-key", metavar="FILE", help="Its private key, PEM.", show_default=False),
    ] = None,
    tls_self_signed: Annotated[
        bool, typer.Option("--tls-self-signed", help="Make a certificate, for development.")
    ] = False,
    otlp_endpoint: Annotated[
        str | None,
        typer.Option(
            "--otlp-endpoint",
            metavar="URL",
            help="Send the metrics there too, as http://host:4318/v1/metrics.",
            show_default=False,
        ),
    ] = None,
    stop_timeout_ms: Annotated[
        int,
        typer.Option("--stop-timeout-ms", metavar="MS", min=0, help="Time a stop gives to requests."),
    ] = 10_000,
) -> None:
    """Serve the log over HTTP.

    Until SIGTERM. Prints one line with its address when it is ready.
    """
    _installed()
    from forebay.broker import BrokerConfig, HttpLimits, connections_that_fit
    from forebay.log import ProducerConfig, WriterConfig

    if codec not in ("none", "zstd"):
        raise UsageError(f"codec {codec!r}", hint="none or zstd")
    body_bytes = parse_bytes(body_max_bytes)
    connections = connections_that_fit(HttpLimits().connections_max)
    if connections < HttpLimits().connections_max:
        sys.stderr.write(f"warning: the limit on open files leaves room for {connections:,} connections\n")
    config = BrokerConfig(
        broker_id=broker_id,
        host=host,
        port=port,
        roles=_roles(role),
        producer=ProducerConfig(
            batch_max_bytes=parse_bytes(batch_max_bytes),
            batch_max_delay_ms=batch_max_delay_ms,
            pending_max_bytes=parse_bytes(pending_max_bytes),
        ),
        writer=WriterConfig(auto_create=auto_create, codec="zstd" if codec == "zstd" else "none"),
        tail_cache_dir=tail_cache_dir,
        limits=HttpLimits(
            body_max_bytes=body_bytes,
            bodies_max_bytes=max(8 * body_bytes, 256 << 20),
            connections_max=connections,
        ),
        stop_timeout_ms=stop_timeout_ms,
        require_tokens=require_tokens,
        insecure=insecure,
        compact=compact,
        scenario=_scenario(),
    )
    # What is wrong with the deployment is wrong usage, and told before anything is started.
    deployment.store_url, deployment.coordinator_url  # noqa: B018 - they raise
    with contextlib.ExitStack() as stack:
        tls = _tls(stack, deployment, host, tls_cert, tls_key, tls_self_signed)
        _run(_serve(deployment, config, tls, otlp_endpoint))


def _installed() -> None:
    try:
        import httptools  # noqa: F401
    except ImportError as error:
        raise Unsupported(
            "the parts of the broker are not installed", hint="pip install 'forebay[broker]'"
        ) from error


def _roles(role: str) -> Any:
    roles = {"both": ("write", "read"), "write": ("write",), "read": ("read",)}
    if role not in roles:
        raise UsageError(f"role {role!r}", hint="write, read or both")
    return roles[role]


def _scenario() -> dict[str, str]:
    found = {
        name.removeprefix(SCENARIO_PREFIX).lower(): value
        for name, value in os.environ.items()
        if name.startswith(SCENARIO_PREFIX)
    }
    return {name: value for name, value in found.items() if name.isidentifier()}


def _tls(
    stack: contextlib.ExitStack,
    deployment: Deployment,
    host: str,
    certificate: Path | None,
    key: Path | None,
    self_made: bool,
) -> ssl.SSLContext | None:
    from forebay.broker import self_signed, server_tls

    if (certificate is None) != (key is None):
        raise UsageError("--tls-cert and --tls-key belong together", hint="give both")
    if certificate is not None and key is not None:
        if self_made:
            raise UsageError("--tls-cert and --tls-self-signed exclude each other", hint="give one of them")
        return server_tls(certificate, key)
    if not self_made:
        return None
    if deployment.data is not None:
        folder = deployment.data.absolute() / ".forebay" / "tls"
    else:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="forebay-tls-")))
    files = self_signed(folder, host)
    sys.stderr.write(f"made a certificate for development: {files[0]}\n")
    return server_tls(*files)


def _run(work: Coroutine[Any, Any, None]) -> None:
    """Run on uvloop where it is installed: it serves about twice as many requests."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(work)
        return
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work)


async def _serve(
    deployment: Deployment, config: BrokerConfig, tls: ssl.SSLContext | None, otlp_endpoint: str | None
) -> None:
    from forebay.broker import Broker, calm_collector

    stop = asyncio.Event()
    on_ending(stop.set)
    broker = Broker(_parts(deployment), config)
    export = None if otlp_endpoint is None else _export(otlp_endpoint, config.broker_id, broker.metrics)
    await broker.start(tls)
    calm_collector()
    try:
        if config.needs_tokens and tls is None:
            sys.stderr.write("warning: tokens travel unprotected without --tls-cert or a TLS proxy\n")
        if out.is_json():
            out.document({"url": broker.url, "broker_id": config.broker_id, "roles": list(config.roles)})
        else:
            out.line(f"forebay broker {config.broker_id} ({'+'.join(config.roles)}) on {broker.url}")
        sys.stdout.flush()
        await stop.wait()
    finally:
        await broker.stop()
        if export is not None:
            await asyncio.to_thread(export)


def _export(endpoint: str, broker_id: str, metrics: MetricsRegistry) -> Callable[[], object]:
    """Begin to send the metrics by OTLP; returns what ends it."""
    try:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import Resource
    except ImportError as error:
        raise Unsupported("OpenTelemetry is not installed", hint="pip install 'forebay[otel]'") from error
    from forebay.kit.metrics_otel import otel_view

    resource = Resource.create({"service.name": "forebay-broker", "service.instance.id": broker_id})
    reader = PeriodicExportingMetricReader(OTLPMetricExporter(endpoint=endpoint))
    provider = MeterProvider(metric_readers=[reader], resource=resource, shutdown_on_exit=False)
    otel_view(metrics, provider.get_meter("forebay"))
    return provider.shutdown


def _parts(deployment: Deployment) -> Parts:
    from forebay._connect import Parts

    clock = SystemClock()
    return Parts(
        deployment.open_store(),
        deployment.open_coordinator(),
        clock,
        IdSource(clock),
        random.SystemRandom(),
        MetricsRegistry(),
    )
