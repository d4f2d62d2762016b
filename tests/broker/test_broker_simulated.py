"""Handlers in the simulated world: stores that fail, replies that are lost, brokers that crash; no sockets.

A client sends batches with a producer id through whatever broker answers, and repeats what is not known to be
done. In the end every batch that was acknowledged is in the log, once and in order, and every answer had been
one of the forms of the contract.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from forebay._connect import Parts
from forebay.broker import Broker, BrokerConfig
from forebay.broker._http import Request
from forebay.kit.metrics import MetricsRegistry
from forebay.log import ProducerConfig
from forebay.testing import Actor, Faults, World, run_seeds, seeds

BATCHES = 12
CONFIG = BrokerConfig(producer=ProducerConfig(batch_max_delay_ms=20), produce_timeout_ms=20_000)


@dataclass
class Told:
    """What the client was told. Not a part of the system: it never fails."""

    acknowledged: dict[int, int] = field(default_factory=dict)
    """First offset of each batch."""
    statuses: set[int] = field(default_factory=set)
    unknown: int = 0


async def open_broker(me: Actor) -> Broker:
    parts = Parts(me.store, me.coordinator, me.clock, me.ids, me.random, MetricsRegistry())
    broker = Broker(parts, CONFIG)
    await broker.engines.start()
    return broker


async def ask(broker: Broker, path: str, message: Any) -> tuple[int, Any]:
    body = json.dumps(message).encode()
    answer = await broker.app(Request("POST", path, {"content-type": "application/json"}, body))
    return answer.status, json.loads(answer.body)


async def produce(me: Actor, told: Told) -> None:
    """Send batch after batch, each until it is known to be done."""
    broker = await open_broker(me)
    for number in range(BATCHES):
        while number not in told.acknowledged:
            batch = {
                "topic": "t",
                "partition": 0,
                "records": [f"{number}/0", f"{number}/1"],
                "producer_id": "p",
                "sequence": number,
            }
            status, answer = await ask(broker, "/produce", {"topic_partitions": [batch]})
            told.statuses.add(status)
            [result] = answer["results"]
            if result["ok"]:
                told.acknowledged[number] = result["start_offset"]
            elif result["error_type"] == "OutcomeUnknown":
                told.unknown += 1


async def read_all(world: World) -> list[str]:
    parts = Parts(
        world.bucket,
        world.keys,
        world.clock(),
        world.ids(),
        world.randomness("reader"),
        MetricsRegistry(),
    )
    broker = Broker(parts, CONFIG)
    await broker.engines.start()
    values: list[str] = []
    offset = 1
    while True:
        place = {"topic": "t", "partition": 0, "fetch_offset": offset}
        status, answer = await ask(broker, "/consume", {"topic_partitions": [place], "max_wait_ms": 100})
        assert status == 200, answer
        [result] = answer["results"]
        if not result["records"]:
            break
        assert [record["offset"] for record in result["records"]] == list(
            range(offset, result["next_offset"])
        )
        values += [record["value"] for record in result["records"]]
        offset = result["next_offset"]
    await broker.engines.close()
    return values


def scenario(seed: int) -> Told:
    told = Told()
    world = World(seed, faults=Faults.all(0.04), rotate_s=2.0)

    async def main(world: World) -> list[str]:
        writer = world.spawn("writer", produce, told)
        await world.clock().sleep(1.0 + world.randomness("crash").random() * 3)
        if not writer.done:
            writer.crash()
        heir = world.spawn("heir", produce, told)
        await world.clock().sleep(30.0)
        world.heal()
        await world.join(heir)
        return await read_all(world)

    values = world.run(main)
    expected = [f"{number}/{part}" for number in range(BATCHES) for part in (0, 1)]
    assert values == expected
    assert all(values[start - 1] == f"{number}/0" for number, start in told.acknowledged.items())
    assert told.statuses <= {200, 409, 503}
    return told


def test_acknowledged_batches_are_there_once_and_in_order_whatever_fails() -> None:
    for told in run_seeds(scenario, seeds()):
        assert len(told.acknowledged) == BATCHES
