"""`forebay stream`: tier a broker's streams into a bucket, and read them back from it."""

from __future__ import annotations

import asyncio
import base64
import json
import random
import sys
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forebay.cli import _output as out
from forebay.cli._asking import ask
from forebay.cli._deployment import Deployment, deployment_options
from forebay.cli._options import CommandGroup
from forebay.cli._run import on_ending, wait_for
from forebay.errors import ForebayError, FormatError, Unavailable, UsageError
from forebay.kit.limits import format_bytes, parse_bytes, parse_duration_ms

if TYPE_CHECKING:
    from forebay.coordination import Coordinator
    from forebay.formats.osiris_chunk import Chunk
    from forebay.storage import ObjectStore
    from forebay.stream import Lag, Sidecar, StreamReader, StreamTier, TierConfig

__all__ = ["app"]

app = CommandGroup(help="Tier streams into a bucket, and read them back.")

Name = Annotated[
    str, typer.Argument(metavar="NAME", help="The stream: its id, that without the time, or the name in it.")
]
Local = Annotated[
    Path | None,
    typer.Option(
        "--local", metavar="DIR", help="Also read the stream's local directory.", show_default=False
    ),
]


AlarmBytes = Annotated[
    str, typer.Option("--alarm-bytes", metavar="SIZE", help="Lag in bytes that is reported as an alarm.")
]
AlarmAge = Annotated[
    str, typer.Option("--alarm-age", metavar="TIME", help="Age of a lag that is reported as an alarm.")
]


OUTAGE_PAUSE_S = 1.0
"""Between two tries of a follower whose bucket cannot be reached, each of which has patience of its own."""


class Incomplete(ForebayError):
    """A verification that found something; its answer was printed already."""


@dataclass(frozen=True, slots=True)
class _Parts:
    store: ObjectStore
    coordinator: Coordinator | None

    def reader(self, stream: str, local: Path | None = None) -> StreamReader:
        from forebay.kit.clock import SystemClock
        from forebay.stream import StreamReader

        return StreamReader(
            stream,
            self.store,
            coordinator=self.coordinator,
            local=local,
            clock=SystemClock(),
            randomness=random.SystemRandom(),
        )

    async def find(self, name: str) -> str:
        from forebay.stream import find_stream

        return await find_stream(self.reader("any").remote.calls, name)


@asynccontextmanager
async def _opened(deployment: Deployment) -> AsyncIterator[_Parts]:
    """The store, and the coordinator if one was named; without one the record is kept in the store."""
    async with deployment.open_store() as store:
        if deployment.data is None and deployment.coordinator is None:
            yield _Parts(store, None)
            return
        async with deployment.open_coordinator() as coordinator:
            yield _Parts(store, coordinator)


@app.command("tier")
@deployment_options
def tier(  # noqa: PLR0913, PLR0917 - one parameter per option
    deployment: Deployment,
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="A stream's directory, or the one above many of them.")
    ],
    once: Annotated[bool, typer.Option("--once", help="Tier what is there, and end.")] = False,
    fragment: Annotated[
        str, typer.Option("--fragment", metavar="SIZE", help="Size from which on a fragment is cut.")
    ] = "64MiB",
    fragment_age: Annotated[
        str, typer.Option("--fragment-age", metavar="TIME", help="Age from which on one is cut.")
    ] = "10s",
    branching: Annotated[int, typer.Option("--branching", metavar="M", help="Entries of a group.")] = 1024,
    max_age: Annotated[
        str | None,
        typer.Option("--max-age", metavar="TIME", help="Forget what is older.", show_default=False),
    ] = None,
    max_bytes: Annotated[
        str | None,
        typer.Option("--max-bytes", metavar="SIZE", help="Forget what is above.", show_default=False),
    ] = None,
    root_interval: Annotated[
        str, typer.Option("--root-interval", metavar="TIME", help="Longest wait for a new root.")
    ] = "5s",
    alarm_bytes: AlarmBytes = "4GiB",
    alarm_age: AlarmAge = "5m",
) -> None:
    """Copy streams into the bucket as they grow: a broker's directories, or Forebay's own."""
    from forebay.stream import RetentionPolicy, TierConfig

    config = TierConfig(
        fragment_bytes=parse_bytes(fragment),
        fragment_age_ms=parse_duration_ms(fragment_age),
        branching=branching,
        root_interval_ms=parse_duration_ms(root_interval),
        lag_bytes_alarm=parse_bytes(alarm_bytes),
        lag_ms_alarm=parse_duration_ms(alarm_age),
        retention=RetentionPolicy(
            max_age_ms=None if max_age is None else parse_duration_ms(max_age),
            max_bytes=None if max_bytes is None else parse_bytes(max_bytes),
        ),
    )
    wait_for(_tier(deployment, directory, config, once=once))


async def _tier(deployment: Deployment, directory: Path, config: TierConfig, *, once: bool) -> None:
    from forebay.kit.clock import SystemClock
    from forebay.stream import Sidecar

    async with _opened(deployment) as parts:
        sidecar = Sidecar(
            directory,
            parts.store,
            coordinator=parts.coordinator,
            config=config,
            clock=SystemClock(),
            randomness=random.SystemRandom(),
        )
        sidecar.discover()
        if not sidecar.tiers:
            hint = "name a stream's directory, or the one that holds those of all streams"
            sys.stderr.write(f"note: no segment files in {str(directory)!r} or right below; {hint}\n")
        if once:
            try:
                await sidecar.run_once()
            finally:
                for each in sidecar.tiers:
                    _report(each, sidecar.errors.get(each.stream))
        else:
            await _until_stopped(sidecar.follow(_Changes()))
            await sidecar.settle()


async def _until_stopped(work: Coroutine[Any, Any, None]) -> None:
    """Go on until SIGTERM or Ctrl-C, which is how a sidecar ends, and no failure."""
    stop = asyncio.Event()
    on_ending(stop.set)
    working, asked = asyncio.create_task(work), asyncio.create_task(stop.wait())
    await asyncio.wait({working, asked}, return_when=asyncio.FIRST_COMPLETED)
    if working.done():
        asked.cancel()
        await working
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)


class _Changes:
    """Prints a stream again whenever something about it changed."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[object, ...]] = {}

    def __call__(self, sidecar: Sidecar) -> None:
        for each in sidecar.tiers:
            error = sidecar.errors.get(each.stream)
            alarms = bool(each.lag().alarms(each.config))
            state = (each.remote.persisted.next_offset, each.progress.removed, str(error), alarms)
            if self._last.get(each.stream) != state:
                self._last[each.stream] = state
                _report(each, error)
        sys.stdout.flush()


def _report(tier: StreamTier, error: Exception | None) -> None:
    manifest, lag = tier.remote.persisted, tier.lag()
    facts = {
        "stream": tier.stream,
        "first_offset": manifest.first_offset,
        "next_offset": manifest.next_offset,
        "bytes": manifest.total_bytes,
        "progress": asdict(tier.progress),
        "lag": _lag_facts(lag, tier.config),
        "error": None if error is None else str(error),
    }
    if out.is_json():
        out.document(facts)
        return
    offsets = (
        f"offsets {manifest.first_offset} to {manifest.next_offset}, {format_bytes(manifest.total_bytes)}"
    )
    behind = f", {format_bytes(lag.bytes)} to go" if lag.bytes else ""
    problem = "" if error is None else f"  error: {out.printable(str(error))}"
    alarm = "".join([f"  alarm: {text}" for text in lag.alarms(tier.config)])
    out.line(f"{tier.stream}  {offsets}{behind}{alarm}{problem}")


def _lag_facts(lag: Lag, config: TierConfig) -> dict[str, Any]:
    figures = {"bytes": lag.bytes, "records": lag.records, "age_ms": lag.age_ms}
    return figures | {"alarms": lag.alarms(config)}


@app.command("read")
@deployment_options
def read(
    deployment: Deployment,
    name: Name,
    start: Annotated[
        str,
        typer.Option("--from", metavar="SPEC", help="first, last, next, offset:N, timestamp:MS or abs:N."),
    ] = "first",
    limit: Annotated[
        int | None, typer.Option("--limit", "-n", min=0, metavar="N", help="Stop after N.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for more, until stopped.")] = False,
    filters: Annotated[
        list[str] | None,
        typer.Option("--filter", metavar="VALUE", help="Only chunks that may hold it.", show_default=False),
    ] = None,
    unfiltered: Annotated[
        bool, typer.Option("--match-unfiltered", help="With --filter: also chunks without filter.")
    ] = False,
    local: Local = None,
) -> None:
    """Print the records of a stream, one JSON document per line: offset, timestamp, data in base64."""
    from forebay.formats.osiris_bloom import Matcher
    from forebay.stream import Overtaken, Spec

    spec = Spec.parse(start)
    matcher = Matcher([value.encode() for value in filters], match_unfiltered=unfiltered) if filters else None

    async def work() -> None:
        left = limit
        async with _opened(deployment) as parts:
            reader = parts.reader(await parts.find(name), local)
            begin: int | None = None
            lowest = spec.value if spec.kind == "offset" else 0
            while left is None or left > 0:
                try:
                    begin = await reader.attach(spec) if begin is None else begin
                    async for chunk in reader.chunks(begin, matcher=matcher, follow=follow):
                        left = _print_records(chunk, lowest, left)
                        begin = chunk.header.next_id
                        if follow:
                            sys.stdout.flush()
                        if left == 0:
                            return
                except Overtaken as gone:
                    # Told, not hidden: the reader of this output can see the hole and why it is there.
                    sys.stderr.write(f"note: {gone.message}\n")
                    begin = gone.resume_offset
                    continue
                except Unavailable as error:
                    # Whoever follows a stream outlasts its bucket's bad hours, and goes on where it was.
                    if not follow:
                        raise
                    sys.stderr.write(f"note: {error.message}; waiting\n")
                    await asyncio.sleep(OUTAGE_PAUSE_S)
                    continue
                return

    wait_for(work())


def _print_records(chunk: Chunk, lowest: int, left: int | None) -> int | None:
    from forebay.formats.osiris_entry import decode_records

    header = chunk.header
    records = decode_records(chunk.data, entries=header.entries, records=header.records)
    skip = max(lowest - header.chunk_id, 0)
    chosen = records[skip:] if left is None else records[skip : skip + left]
    lines = [
        f'{{"offset": {header.chunk_id + skip + number}, "timestamp": {header.timestamp}, '
        f'"data": "{base64.b64encode(record).decode()}"}}\n'
        for number, record in enumerate(chosen)
    ]
    sys.stdout.write("".join(lines))
    return None if left is None else left - len(chosen)


@app.command("resolve")
@deployment_options
def resolve(
    deployment: Deployment,
    name: Name,
    specs: Annotated[list[str], typer.Argument(metavar="SPEC...", help="As --from of read.")],
    local: Local = None,
) -> None:
    """Print the chunk that each SPEC attaches to, one JSON document per line; nulls where it waits."""
    from forebay.stream import Spec

    parsed = [(text, Spec.parse(text)) for text in specs]

    async def work() -> None:
        async with _opened(deployment) as parts:
            reader = parts.reader(await parts.find(name), local)
            for text, spec in parsed:
                header = await reader.resolve(spec)
                facts: dict[str, Any] = {
                    "spec": text,
                    "chunk_offset": None,
                    "records": None,
                    "timestamp": None,
                }
                if header is not None:
                    facts |= {"chunk_offset": header.chunk_id, "records": header.records}
                    facts["timestamp"] = header.timestamp
                out.line(json.dumps(facts))

    wait_for(work())


@app.command("ls")
@deployment_options
def ls(deployment: Deployment) -> None:
    """List the streams in the bucket. JSON: one document per line."""
    from forebay.stream import list_streams, short_name

    async def work() -> None:
        async with _opened(deployment) as parts:
            for stream in await list_streams(parts.reader("any").remote.calls):
                facts = {"stream": stream, "name": short_name(stream)}
                out.document(facts) if out.is_json() else out.line(stream)

    wait_for(work())


@app.command("stats")
@deployment_options
def stats(
    deployment: Deployment,
    name: Name,
    local: Local = None,
    alarm_bytes: AlarmBytes = "4GiB",
    alarm_age: AlarmAge = "5m",
) -> None:
    """Offsets, times, size and shape of a stream's remote tier; with --local also how far it lags behind."""
    from forebay.kit.clock import SystemClock
    from forebay.stream import Lag, TierConfig, stats_of

    bounds = TierConfig(lag_bytes_alarm=parse_bytes(alarm_bytes), lag_ms_alarm=parse_duration_ms(alarm_age))

    async def work() -> dict[str, Any]:
        async with _opened(deployment) as parts:
            view = parts.reader(await parts.find(name)).remote
            await view.refresh()
            facts = stats_of(view).as_json()
            if local is not None:
                lag = Lag.of_directory(local, view.manifest.next_offset, SystemClock().now_ms())
                facts["lag"] = _lag_facts(lag, bounds)
            return facts

    facts = wait_for(work())
    if out.is_json():
        out.document(facts)
        return
    for label, value in facts.items():
        out.line(f"{label:<16} {value}")


@app.command("verify")
@deployment_options
def verify(deployment: Deployment, name: Name) -> None:
    """Read a whole stream: every node, fragment, chunk and checksum. Fails where something is wrong."""
    from forebay.kit.clock import SystemClock
    from forebay.stream import collect, verify_stream

    async def work() -> tuple[bool, dict[str, Any]]:
        async with _opened(deployment) as parts:
            view = parts.reader(await parts.find(name)).remote
            found = await verify_stream(view)
            facts: dict[str, Any] = found.as_json() | {"orphans": [], "unknown": []}
            try:
                garbage = await collect(view, now_ms=SystemClock().now_ms(), grace_ms=0)
                facts |= {"orphans": garbage.orphans, "unknown": garbage.unknown}
            except (FormatError, Unavailable):
                # What a manifest does not name can only be told of one that can be read.
                if found.ok:
                    raise
            return found.ok, facts

    ok, facts = wait_for(work())
    if out.is_json():
        out.document(facts)
    else:
        size = format_bytes(facts["bytes"])
        out.line(f"{facts['fragments']:,} fragments, {facts['chunks']:,} chunks, {size}")
        for problem in facts["problems"]:
            out.line(f"problem: {out.printable(problem)}")
        out.line(f"{len(facts['orphans'])} objects that nothing names")
    if not ok:
        raise Incomplete(
            f"stream {name!r} has {len(facts['problems'])} problems",
            hint="restore goes by the fragments where the manifest is damaged; "
            "read --from offset:N goes on behind a fragment that is",
        )


@app.command("repair")
@deployment_options
def repair(
    deployment: Deployment,
    name: Name,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The stream's local directory.")],
) -> None:
    """Cut a remote tier that diverged back to the last fragment that the local directory proves."""
    from forebay.kit.clock import SystemClock
    from forebay.stream import StreamTier

    async def work() -> dict[str, Any]:
        async with _opened(deployment) as parts:
            stream = await parts.find(name)
            each = StreamTier(
                directory,
                parts.store,
                stream=stream,
                coordinator=parts.coordinator,
                clock=SystemClock(),
                randomness=random.SystemRandom(),
            )
            return {"stream": stream, "next_offset": await each.repair()}

    facts = wait_for(work())
    if out.is_json():
        out.document(facts)
        return
    out.line(f"{facts['stream']}  goes on from offset {facts['next_offset']}")


@app.command("collect")
@deployment_options
def collect(
    deployment: Deployment,
    name: Name,
    grace: Annotated[
        str, typer.Option("--grace", metavar="TIME", help="Leave alone what is younger.")
    ] = "24h",
    delete_them: Annotated[
        bool, typer.Option("--delete", help="Delete the orphans; otherwise they are only listed.")
    ] = False,
) -> None:
    """Find objects of a stream that nothing names any more, and delete them if told so."""
    from forebay.kit.clock import SystemClock
    from forebay.stream import collect as collect_orphans

    grace_ms = parse_duration_ms(grace)

    async def work() -> dict[str, Any]:
        async with _opened(deployment) as parts:
            view = parts.reader(await parts.find(name)).remote
            now_ms = SystemClock().now_ms()
            found = await collect_orphans(view, now_ms=now_ms, grace_ms=grace_ms, dry_run=not delete_them)
            return found.as_json()

    facts = wait_for(work())
    if out.is_json():
        out.document(facts)
        return
    for key in facts["orphans"]:
        out.line(out.printable(key))
    out.line(f"{len(facts['orphans'])} orphans among {facts['seen']} objects, {facts['removed']} deleted")


@app.command("delete")
@deployment_options
def delete(
    deployment: Deployment,
    name: Name,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete a stream from the bucket for ever. What is local stays; its id is never taken again."""
    from forebay.kit.clock import SystemClock
    from forebay.stream import RemoteTier, TierConfig

    async def work() -> dict[str, Any]:
        async with _opened(deployment) as parts:
            stream = await parts.find(name)
            if not yes:
                ask(f"Delete {stream} with all its fragments?")
            remote = RemoteTier(
                stream,
                parts.store,
                coordinator=parts.coordinator,
                epoch=0,
                config=TierConfig(),
                clock=SystemClock(),
                randomness=random.SystemRandom(),
            )
            await remote.delete_stream()
            return {"stream": stream, "deleted": True}

    facts = wait_for(work())
    out.document(facts) if out.is_json() else out.line(f"{facts['stream']}  deleted")


@app.command("restore")
@deployment_options
def restore(
    deployment: Deployment,
    name: Name,
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Where to write the stream's files; must not exist.")
    ],
    until: Annotated[
        int | None,
        typer.Option("--until", metavar="MS", help="Leave out what is later.", show_default=False),
    ] = None,
) -> None:
    """Write a stream's segment and index files from the bucket alone, without any coordinator."""
    from forebay.stream import restore_stream

    if deployment.coordinator is not None:
        raise UsageError("restore asks no coordinator", hint="leave --coordinator out")

    async def work() -> dict[str, Any]:
        async with deployment.open_store() as store:
            parts = _Parts(store, None)
            view = parts.reader(await parts.find(name)).remote
            return asdict(await restore_stream(view, directory, until_ms=until))

    facts = wait_for(work())
    if out.is_json():
        out.document(facts)
        return
    offsets = f"offsets {facts['first_offset']} to {facts['next_offset']}"
    out.line(f"{facts['stream']}  {offsets}, {facts['segments']} segments, {format_bytes(facts['bytes'])}")
