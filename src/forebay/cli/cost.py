"""`forebay cost`: the bill, of a running broker, of what lies in a store, or of a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from forebay.cli import _output as out
from forebay.cli._door import DoorChoice, door_options
from forebay.cli._options import CommandGroup
from forebay.cli._run import wait_for
from forebay.errors import UsageError
from forebay.kit.limits import format_bytes, parse_bytes, parse_duration_ms

if TYPE_CHECKING:
    from forebay.formats.http_inspect import CostView

__all__ = ["app"]

app = CommandGroup(help="Cost.")

MONTH_S = 30 * 86_400
FLUSH_INTERVALS_MS = (50, 100, 250, 500, 1_000, 5_000)
"""What a plan is shown at, beside the interval that was asked for."""
GIB = 1 << 30


@app.command("cost")
@door_options
def cost(
    door: DoorChoice,
    rate: Annotated[
        str | None,
        typer.Option(
            "--rate", metavar="SIZE", help="A plan: bytes that come in per second, all brokers together."
        ),
    ] = None,
    flush: Annotated[
        str, typer.Option("--flush", metavar="TIME", help="With --rate: the flush interval.")
    ] = "100ms",
    brokers: Annotated[
        int, typer.Option("--brokers", metavar="N", min=1, help="With --rate: brokers that write.")
    ] = 1,
    batch: Annotated[
        str,
        typer.Option("--batch", metavar="SIZE", help="With --rate: bytes at which a flush does not wait."),
    ] = "8MiB",
    kept: Annotated[
        str, typer.Option("--kept", metavar="TIME", help="With --rate: how long records are kept.")
    ] = "7d",
) -> None:
    """What a log costs per month, or would cost.

    With --url: the requests of a running broker, now and at other flush intervals. With --data or --store:
    the bytes that lie there. With --rate: requests and storage of a load that is not there yet. List prices,
    for orientation; traffic out of the region is not in them.
    """
    if rate is not None:
        _show_plan(_plan(parse_bytes(rate), parse_duration_ms(flush), brokers, parse_bytes(batch), kept))
    elif door.url is not None:
        _show_running(wait_for(_running(door)))
    elif door.deployment.data is not None or door.deployment.store is not None:
        _show_stored(wait_for(_stored(door)))
    else:
        raise UsageError("nothing to price", hint="give --url URL, --data DIR, --store URL, or --rate SIZE")


async def _running(door: DoorChoice) -> CostView:
    from forebay.client import aio
    from forebay.formats.http_inspect import CostView
    from forebay.formats.http_messages import PATHS

    assert door.url is not None
    async with aio.connect(door.url, token=door.token, ca=door.ca) as bay:
        return await bay.session.get(PATHS.COST, CostView)


def _show_running(view: CostView) -> None:
    if out.is_json():
        import msgspec

        out.document(msgspec.to_builtins(view))
        return
    out.line(
        f"broker {out.printable(view.broker_id)}, over the last {view.window_seconds:.0f} s; {view.basis}"
    )
    for name, per_second in view.requests_per_second.items():
        out.line(f"  {name:<12} {per_second:>12,.2f} requests/s")
    out.line(f"${view.dollars_per_month:,.2f} a month for requests at this rate")
    rows = [
        [
            f"{each.batch_max_delay_ms:,} ms" + (" (now)" if each.current else ""),
            f"{each.flushes_per_second:,.2f}",
            f"${each.dollars_per_month:,.2f}",
        ]
        for each in view.intervals
    ]
    if rows:
        columns = ["flush interval", "flushes/s", "a month"]
        out.table(columns, rows, right=columns)


async def _stored(door: DoorChoice) -> dict[str, Any]:
    from forebay.broker._stored import DOLLARS_PER_GIB_MONTH
    from forebay.log._billing import PRICE_BASIS

    rooms: dict[str, list[int]] = {}
    async with door.deployment.open_store() as store:
        async for page in store.list_pages():
            for info in page:
                sums = rooms.setdefault(info.key.partition("/")[0], [0, 0])
                sums[0] += 1
                sums[1] += info.size
    parts = [
        {"prefix": name, "objects": objects, "bytes": size, "dollars_per_month": _storage(size)}
        for name, (objects, size) in sorted(rooms.items())
    ]
    total = sum(size for _, size in rooms.values())
    return {
        "basis": PRICE_BASIS,
        "dollars_per_gib_month": DOLLARS_PER_GIB_MONTH,
        "objects": sum(objects for objects, _ in rooms.values()),
        "bytes": total,
        "dollars_per_month": _storage(total),
        "prefixes": parts,
    }


def _storage(size: float) -> float:
    from forebay.broker._stored import DOLLARS_PER_GIB_MONTH

    return size / GIB * DOLLARS_PER_GIB_MONTH


def _show_stored(found: dict[str, Any]) -> None:
    if out.is_json():
        out.document(found)
        return
    rows = [
        [
            each["prefix"],
            f"{each['objects']:,}",
            format_bytes(each["bytes"]),
            f"${each['dollars_per_month']:,.4f}",
        ]
        for each in found["prefixes"]
    ]
    if rows:
        out.table(["prefix", "objects", "size", "a month"], rows, right=["objects", "size", "a month"])
    out.line(
        f"{found['objects']:,} objects, {format_bytes(found['bytes'])}: "
        f"${found['dollars_per_month']:,.2f} a month ({found['basis']})"
    )


def _plan(rate: int, flush_ms: int, brokers: int, batch: int, kept: str) -> dict[str, Any]:
    from forebay.log._billing import PRICE_BASIS, PRICES_PER_1000

    if flush_ms < 1 or batch < 1:
        raise UsageError(
            "a flush takes at least a millisecond and a byte", hint="give --flush and --batch above 0"
        )
    put = PRICES_PER_1000["put"] / 1000
    stored = _storage(rate * parse_duration_ms(kept) / 1000)

    def at(interval_ms: int) -> dict[str, Any]:
        flushes = max(brokers * 1000 / interval_ms, rate / batch) if rate else 0.0
        requests = flushes * put * MONTH_S
        return {
            "flush_ms": interval_ms,
            "flushes_per_second": flushes,
            "object_bytes": rate / flushes if flushes else 0.0,
            "request_dollars_per_month": requests,
            "dollars_per_month": requests + stored,
            "asked": interval_ms == flush_ms,
        }

    return {
        "basis": PRICE_BASIS,
        "bytes_per_second": rate,
        "brokers": brokers,
        "stored_dollars_per_month": stored,
        "intervals": [at(each) for each in sorted({*FLUSH_INTERVALS_MS, flush_ms})],
    }


def _show_plan(plan: dict[str, Any]) -> None:
    if out.is_json():
        out.document(plan)
        return
    out.line(
        f"{format_bytes(plan['bytes_per_second'])}/s through {plan['brokers']:,} brokers; "
        f"storage ${plan['stored_dollars_per_month']:,.2f} a month ({plan['basis']})"
    )
    rows = [
        [
            f"{each['flush_ms']:,} ms" + (" *" if each["asked"] else ""),
            f"{each['flushes_per_second']:,.1f}",
            format_bytes(int(each["object_bytes"])),
            f"${each['request_dollars_per_month']:,.2f}",
            f"${each['dollars_per_month']:,.2f}",
        ]
        for each in plan["intervals"]
    ]
    columns = ["flush interval", "objects/s", "object", "requests a month", "all a month"]
    out.table(columns, rows, right=columns)
