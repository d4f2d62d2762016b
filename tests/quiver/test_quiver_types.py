"""Extension types that only some processes know, and types that Arrow can write and hardly compute with."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from tests.quiver.harness import SMALL, simulate, store
from tests.quiver.sim_disk import SimDisk

from forebay.quiver import Quiver, Selection
from forebay.testing.world import World

SLOW = dataclasses.replace(SMALL, segment_open_ms=1_000_000)
"""Segments are cut by hand."""


class Celsius(pa.ExtensionType):  # type: ignore[misc]
    """As Arrow's documentation shows it. Arrow gives it no hash."""

    def __init__(self) -> None:
        super().__init__(pa.int64(), "forebay.celsius")

    def __arrow_ext_serialize__(self) -> bytes:
        return b"1"

    @classmethod
    def __arrow_ext_deserialize__(cls, storage_type: pa.DataType, serialized: bytes) -> Celsius:
        return cls()


@pytest.fixture
def known() -> Iterator[None]:
    pa.register_extension_type(Celsius())
    yield
    pa.unregister_extension_type("forebay.celsius")


@pytest.mark.usefixtures("known")
def test_extension_types_without_a_hash_are_taken() -> None:
    async def scenario(world: World, disk: SimDisk) -> None:
        async with store(world, disk, SLOW) as quiver:
            await quiver.register("a")
            warm = pa.ExtensionArray.from_storage(Celsius(), pa.array([20, 21]))
            for names in (["x"], ["y"], ["x"]):
                await quiver.ingest(pa.record_batch([warm], names=names))
            await quiver.flush()
            found = []
            while (delivery := await quiver.next("a", 0)) is not None:
                found.append((delivery.view.schema.names, delivery.view.table().num_rows))
                assert delivery.view.schema.field(0).type == Celsius()
                await delivery.ack()
            assert sorted(found) == [(["x"], 4), (["y"], 2)]

    simulate(scenario)


def test_entry_is_whole_also_for_a_process_that_knows_more_extension_types() -> None:
    # Written by another implementation: the keys are in another order than Arrow would write them in.
    metadata = {"ARROW:extension:metadata": "1", "ARROW:extension:name": "forebay.celsius", "unit": "C"}
    schema = pa.schema([pa.field("x", pa.int64(), metadata=metadata)])

    async def scenario(world: World, disk: SimDisk) -> None:
        quiver = await store(world, disk, SLOW).open()
        await quiver.register("a")
        await quiver.ingest(pa.record_batch([pa.array([20, 21])], schema=schema))
        left = disk.after_crash(power_loss=False)
        disk.crashed = True
        pa.register_extension_type(Celsius())
        try:
            async with store(world, left, SLOW) as again:
                assert again.report.is_clean
                await again.flush()
                delivery = await again.next("a", 1)
                assert delivery is not None
                assert delivery.view.table()["x"].to_pylist() == [20, 21]
        finally:
            pa.unregister_extension_type("forebay.celsius")

    simulate(scenario)


@pytest.mark.parametrize(
    "column",
    [
        pa.array(["short", "x" * 40, None, "z"], pa.string_view()),
        pa.array([b"short", b"x" * 40, None, b"z"], pa.binary_view()),
        pa.RunEndEncodedArray.from_arrays([2, 3, 4], ["x", None, "z"]),
    ],
    ids=["string_view", "binary_view", "run_end_encoded"],
)
async def test_rows_are_chosen_by_time_beside_columns_of_every_type(tmp_path: Path, column: pa.Array) -> None:
    batch = pa.record_batch([pa.array([1, 2, 3, 4]), column], names=["timestamp", "v"])
    async with Quiver(tmp_path / "q", SLOW) as quiver:
        await quiver.ingest(batch)
        await quiver.flush()
        for wanted, rows in (((2, 3), [1, 2]), ((4, None), [3]), ((None, 1), [0]), ((1, 4), [0, 1, 2, 3])):
            selection = Selection(event_ns=wanted, ingested_ms=(0, None))
            [table] = [selection.rows(view) async for view in quiver.read(selection)]
            assert table.schema == batch.schema
            assert table.to_pylist() == [batch.to_pylist()[row] for row in rows]
        [view] = [view async for view in quiver.read()]
        assert Selection(event_ns=(9, None)).rows(view).num_rows == 0
