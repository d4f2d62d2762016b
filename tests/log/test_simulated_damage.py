"""Bytes that rot in the bucket, in the simulated world: detected by whoever meets them, never passed on.

A hand from outside flips a bit of a stored object, cuts it short, swaps it for another or takes it away, and
puts the right bytes back a while later, as from a copy. Meanwhile writers append, readers read and compactors
fold. What a reader is given is always the truth; damage is an error. What is compacted is the truth as well:
damage in a source is not folded into an object whose checksums would then be right. Once everything is put
back, nothing is missing.
"""

from __future__ import annotations

from collections import Counter

from tests.log.test_simulated_log import COMPACTING, QUICK, WRITING
from tests.log.writing import group, writer_in

from forebay.errors import ForebayError
from forebay.log import Compactor, DataLost, LogReader, verify
from forebay.log._keys import PartitionKeys
from forebay.testing import Actor, Faults, World, run_seeds, seeds

KEYS = PartitionKeys("t", 0)


class Truth:
    """What was acknowledged, and what everybody saw."""

    def __init__(self) -> None:
        self.at: dict[int, bytes] = {}
        self.over = False
        self.counts: Counter[str] = Counter()


async def write(me: Actor, truth: Truth) -> None:
    log = writer_in(me, WRITING)
    for number in range(12):
        values = [b"%s/%d.%d" % (me.name.encode(), number, part) for part in range(me.random.randint(1, 4))]
        [result] = await log.append_shared([group("t", 0, *values)])
        if result.start_offset is not None:
            truth.at |= dict(enumerate(values, result.start_offset))
        await me.clock.sleep(me.random.random())


async def read(me: Actor, truth: Truth) -> None:
    while not truth.over:
        # A fresh one each time: what a reader has decoded before is kept, and could not rot.
        reader = LogReader(me.store, me.coordinator, clock=me.clock, randomness=me.random)
        try:
            ends = await reader.offsets("t", 0)
            found = await reader.read("t", 0, me.random.randint(1, ends.next), max_records=9)
        except DataLost:
            truth.counts["detected by readers"] += 1
        except ForebayError:
            await me.clock.sleep(0.1)
        else:
            truth.counts["read"] += len(found)
            for batch in found.batches:
                for offset, value in enumerate(batch.batch.records(), batch.start_offset):
                    assert truth.at.setdefault(offset, value) == value, (offset, value)
        await me.clock.sleep(me.random.random() * 0.2)


async def compact(me: Actor, truth: Truth) -> None:
    compactor = Compactor(
        me.store, me.coordinator, clock=me.clock, ids=me.ids, randomness=me.random, config=COMPACTING
    )
    while not truth.over:
        try:
            truth.counts["folded"] += (await compactor.compact_once("t", 0)).outcome == "compacted"
        except DataLost:
            truth.counts["detected by compactors"] += 1
        except ForebayError:
            pass
        await me.clock.sleep(me.random.random() * 3)


async def rot(world: World, truth: Truth) -> None:
    """Damage one object after the other, each for a while."""
    draw, objects = world.randomness("rot"), world.bucket._objects.entries
    while not truth.over:
        await world.clock().sleep(0.5 * draw.random())
        data_keys = [key for key in objects if key.startswith("llog/")]
        if not data_keys:
            continue
        key = draw.choice(data_keys[-5:])  # The older ones are read by nobody any more.
        right = objects[key]
        kind = draw.choice(["flip", "flip", "cut", "swap", "gone"])
        wrong = bytearray(right.data)
        wrong[draw.randrange(len(wrong))] ^= 1 << draw.randrange(8)
        if kind == "flip":
            objects[key] = type(right)(bytes(wrong), right.version, right.modified_ms)
        elif kind == "cut":
            short = right.data[: draw.randrange(len(wrong))]
            objects[key] = type(right)(short, right.version, right.modified_ms)
        elif kind == "swap":
            other = objects[draw.choice(data_keys)]
            objects[key] = type(right)(other.data, right.version, right.modified_ms)
        else:
            del objects[key]
        truth.counts["damaged"] += 1
        await world.clock().sleep(1 + draw.random() * 3)
        objects[key] = right


def play(seed: int) -> Counter[str]:
    truth = Truth()

    async def main(world: World) -> None:
        writers = [world.spawn(f"w{number}", write, truth) for number in (1, 2, 3)]
        others = [world.spawn(f"r{number}", read, truth) for number in (1, 2)]
        others += [world.spawn(f"c{number}", compact, truth) for number in (1, 2)]
        hand = world.loop.create_task(rot(world, truth))
        await world.join(*writers)
        await world.clock().sleep(20)
        truth.over = True
        await world.join(*others)
        await hand
        world.heal()
        await world.clock().sleep(60)
        parts = {"clock": world.clock(), "randomness": world.randomness("end")}
        report = await verify(world.bucket, world.keys, **parts)  # type: ignore[arg-type]
        assert report.ok, report.as_json()
        reader = LogReader(world.bucket, world.keys, **parts)  # type: ignore[arg-type]
        found: dict[int, bytes] = {}
        async for batch in reader.scan_batches("t", 0):
            found |= dict(enumerate(batch.batch.records(), batch.start_offset))
        assert truth.at.items() <= found.items()
        assert sorted(found) == list(range(1, len(found) + 1))

    World(seed, faults=Faults.all(0.02), rotate_s=2.0, store_latencies=QUICK, timeout_s=1.0).run(main)
    return truth.counts


def test_damage_is_detected_never_served_and_never_compacted() -> None:
    counts: Counter[str] = Counter()
    for each in run_seeds(play, seeds(6)):
        counts += each
    for what in ("damaged", "read", "folded", "detected by readers", "detected by compactors"):
        assert counts[what], counts
