"""S3 through our store beside boto3, on the same SeaweedFS.

boto3 is used as people use it: one client, its defaults, and threads where several requests are in flight.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from typing import Any

import boto3
from botocore.config import Config

from benchmarks.figures._suite import suite
from benchmarks.harness import Bench, CannotMeasure, Figure, Variant, Variants
from benchmarks.harness.timing import async_variant, variant
from forebay.storage import ObjectStore, open_store
from forebay.testing.servers import SeaweedServer, ServerUnavailable

__all__ = ["s3"]

SIZES = {"1 KiB": 1024, "1 MiB": 1024 * 1024}
IN_FLIGHT = 16
KEYS = 64
"""Objects that puts overwrite in turn, so that the server's disk does not fill."""


@suite.benchmark(
    "s3",
    "A request to a bucket costs less than through boto3.",
    *[
        Figure(f"{operation} {size}", of=f"{operation} {size}", against=f"boto3 {operation} {size}")
        for size in SIZES
        for operation in ("put", "get")
    ],
    *[
        Figure(
            f"{operation} 1 KiB, 16 in flight",
            of=f"{operation} 1 KiB, 16 in flight",
            against=f"boto3 {operation} 1 KiB, 16 threads",
        )
        for operation in ("put", "get")
    ],
)
def s3(bench: Bench) -> Iterator[Variants]:
    """One server, one bucket, a prefix each."""
    bench.say("starting SeaweedFS")
    try:
        server = SeaweedServer(bench.directory)
    except ServerUnavailable as error:
        raise CannotMeasure(error.message) from error
    with server, asyncio.Runner() as runner, ThreadPoolExecutor(IN_FLIGHT) as pool:
        store, client = open_store(server.url("ours")), _boto3(server)
        variants: dict[str, Variant] = {}
        for name, size in SIZES.items():
            data = os.urandom(size)
            variants |= _ours(name, data, store, runner) | _boto3_variants(
                name, data, client, server.bucket, pool
            )
        yield variants
        runner.run(store.close())


def _boto3(server: SeaweedServer) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=server.endpoint,
        region_name="us-east-1",
        aws_access_key_id=server.access_key,
        aws_secret_access_key=server.secret_key,
        config=Config(max_pool_connections=IN_FLIGHT),
    )


def _ours(size: str, data: bytes, store: ObjectStore, runner: asyncio.Runner) -> dict[str, Variant]:
    numbers = count()
    fixed = f"{len(data)}/fixed"
    runner.run(store.put(fixed, data))

    async def put() -> int:
        await store.put(f"{len(data)}/{next(numbers) % KEYS}", data)
        return 1

    async def get() -> int:
        return len((await store.get(fixed)).data) // len(data)

    async def many(step: Callable[[], Any]) -> int:
        return sum(await asyncio.gather(*[step() for _ in range(IN_FLIGHT)]))

    made = {f"put {size}": put, f"get {size}": get}
    if len(data) == SIZES["1 KiB"]:
        made[f"put {size}, 16 in flight"] = partial(many, put)
        made[f"get {size}, 16 in flight"] = partial(many, get)
    return {name: async_variant(runner, step, "requests/s") for name, step in made.items()}


def _boto3_variants(
    size: str, data: bytes, client: Any, bucket: str, pool: ThreadPoolExecutor
) -> dict[str, Variant]:
    numbers = count()
    fixed = f"boto3/{len(data)}/fixed"
    client.put_object(Bucket=bucket, Key=fixed, Body=data)

    def put(_: object = None) -> int:
        client.put_object(Bucket=bucket, Key=f"boto3/{len(data)}/{next(numbers) % KEYS}", Body=data)
        return 1

    def get(_: object = None) -> int:
        return len(client.get_object(Bucket=bucket, Key=fixed)["Body"].read()) // len(data)

    def many(step: Callable[[object], int]) -> int:
        return sum(pool.map(step, range(IN_FLIGHT)))

    made: dict[str, Callable[[], int]] = {f"boto3 put {size}": put, f"boto3 get {size}": get}
    if len(data) == SIZES["1 KiB"]:
        made[f"boto3 put {size}, 16 threads"] = partial(many, put)
        made[f"boto3 get {size}, 16 threads"] = partial(many, get)
    return {name: variant(step, "requests/s") for name, step in made.items()}
