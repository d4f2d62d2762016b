"""The front door: plain calls and asyncio, on a directory and in memory."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import forebay
import forebay.aio
from forebay.errors import Backpressure, Closed, ForebayError, InvalidUrl, OutcomeUnknown, UsageError
from forebay.formats.record_routing import partition_of
from forebay.log import (
    OffsetOutOfRange,
    ProducerConfig,
    TopicExists,
    TopicPartition,
    TopicSettings,
    UnknownTopic,
)
from forebay.sync import Bay, PartlyDelivered, Receipt

FAST = ProducerConfig(batch_max_delay_ms=1)


@pytest.fixture
def bay(tmp_path: Path) -> Iterator[Bay]:
    with forebay.connect(tmp_path / "data") as opened:
        yield opened


def test_the_promise_of_the_design_page(tmp_path: Path) -> None:
    with forebay.connect(str(tmp_path / "data")) as bay:
        bay.topics.create("orders", partitions=4)
        with bay.producer() as out:
            receipt = out.send("orders", [b"alpha", b"beta"], partition=0)
            done = receipt.result(timeout=10)
            assert (done.start_offset, done.end_offset) == (1, 2)
        table = bay.read("orders", partition=0, start=1).read_all()
    assert table.column_names == ["topic", "partition", "offset", "timestamp", "key", "value", "headers"]
    assert table.column("value").to_pylist() == [b"alpha", b"beta"]


def test_records_outlive_the_process_that_wrote_them(tmp_path: Path) -> None:
    for number in range(3):
        with forebay.connect(tmp_path) as bay, bay.producer(FAST) as out:
            assert out.send("orders", [b"%d" % number], partition=0).result(10).start_offset == number + 1
    with forebay.connect(tmp_path) as bay:
        assert bay.read("orders").read_all().column("value").to_pylist() == [b"0", b"1", b"2"]


def test_leaving_the_block_makes_everything_durable(bay: Bay) -> None:
    with bay.producer(ProducerConfig(batch_max_delay_ms=60_000)) as out:
        receipts = [out.send("orders", [b"%d" % number], partition=0) for number in range(100)]
        assert not receipts[0].done()
    assert [receipt.result(0).start_offset for receipt in receipts] == list(range(1, 101))
    assert bay.read("orders").read_all().num_rows == 100


def test_many_threads_share_a_bay_and_keep_their_order(bay: Bay) -> None:
    bay.topics.create("orders", partitions=2)

    def work(name: int) -> None:
        for number in range(50):
            out.send("orders", [b"%d/%d" % (name, number)], partition=name % 2)

    with bay.producer(FAST) as out:
        threads = [threading.Thread(target=work, args=(name,)) for name in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    values = bay.read("orders").read_all().column("value").to_pylist()
    assert len(set(values)) == 300
    for name in range(6):
        mine = [int(value.split(b"/")[1]) for value in values if value.startswith(b"%d/" % name)]
        assert mine == list(range(50))


def test_a_key_always_goes_to_its_partition(bay: Bay) -> None:
    bay.topics.create("orders", partitions=5)
    keys = [b"key-%d" % (number % 17) for number in range(200)]
    with bay.producer(FAST) as out:
        done = out.send("orders", keys, keys=keys).result(10)
    assert done.count == 200
    assert len(done.parts) > 1
    with pytest.raises(UsageError, match="partitions"):
        _ = done.start_offset
    table = bay.read("orders").read_all()
    pairs = zip(table.column("partition").to_pylist(), table.column("key").to_pylist(), strict=True)
    assert all(partition == partition_of(key, 5) for partition, key in pairs)
    assert table.column("key").to_pylist() == table.column("value").to_pylist()


def test_records_without_a_key_take_turns(bay: Bay) -> None:
    bay.topics.create("orders", partitions=3)
    with bay.producer(FAST) as out:
        places = [out.send("orders", [b"x", b"y"]).result(10).partition for _ in range(6)]
    assert sorted(places) == [0, 0, 1, 1, 2, 2]


def test_times_headers_and_missing_keys_come_back(bay: Bay) -> None:
    with bay.producer(FAST) as out:
        out.send(
            "orders",
            [b"a", b"b"],
            partition=0,
            keys=[b"k", None],
            timestamps_ms=[1_000, 2_000],
            headers=[{"h": b"1"}, None],
        )
    rows = bay.read("orders").read_all().to_pylist()
    assert [row["key"] for row in rows] == [b"k", None]
    assert rows[0]["timestamp"] == datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)
    assert rows[0]["headers"] == [("h", b"1")] or rows[0]["headers"] == [{"key": "h", "value": b"1"}]


def test_reads_begin_and_end_where_they_are_told(bay: Bay) -> None:
    with bay.producer(FAST) as out:
        out.send("orders", [b"%d" % number for number in range(1, 11)], partition=0)

    def values(**where: object) -> list[bytes]:
        found: list[bytes] = bay.read("orders", partition=0, **where).read_all().column("value").to_pylist()  # type: ignore[arg-type]
        return found

    assert values(start=4, end=6) == [b"4", b"5"]
    assert values(start="latest") == []
    assert values(start=11) == []
    assert len(values(start="earliest")) == 10
    assert len(values(start=datetime.now(UTC) - timedelta(days=1))) == 10
    assert values(start=datetime.now(UTC) + timedelta(days=1)) == []
    with pytest.raises(OffsetOutOfRange):
        values(start=12)
    with pytest.raises(UsageError, match="time zone"):
        values(start=datetime(2020, 1, 1))
    with pytest.raises(UsageError, match="no position"):
        values(start="tomorrow")
    with pytest.raises(UsageError, match="one partition"):
        bay.read("orders", start=1)


def test_a_read_ends_where_the_log_ended_at_the_call(bay: Bay) -> None:
    with bay.producer(FAST) as out:
        out.send("orders", [b"before"], partition=0).result(10)
        reader = bay.read("orders", partition=0)
        out.send("orders", [b"after"], partition=0).result(10)
        assert reader.read_all().column("value").to_pylist() == [b"before"]


def test_a_reader_that_is_dropped_halfway_leaves_nothing_behind(bay: Bay) -> None:
    with bay.producer(FAST) as out:
        for _ in range(5):
            out.send("orders", [b"x" * 3_000_000], partition=0).result(10)
    reader = bay.read("orders", partition=0)
    assert reader.read_next_batch().num_rows == 1
    del reader
    gc.collect()
    assert bay.read("orders").read_all().num_rows == 5


def test_a_trim_through_the_front_door(bay: Bay) -> None:
    with bay.producer(FAST) as out:
        out.send("orders", [b"%d" % number for number in range(1, 6)], partition=0)
    assert bay.trim("orders", partition=0, offset=4).records == 3
    assert bay.offsets("orders", 0).earliest == 4
    assert bay.read("orders").read_all().column("offset").to_pylist() == [4, 5]


def test_topics_are_created_listed_described_changed_and_deleted(bay: Bay) -> None:
    bay.topics.create("b.orders", partitions=2)
    bay.topics.create("a", settings=TopicSettings(retention_ms=1_000))
    with pytest.raises(TopicExists):
        bay.topics.create("a")
    assert [topic.topic for topic in bay.topics.list()] == ["a", "b.orders"]
    with bay.producer(FAST) as out:
        out.send("b.orders", [b"x"], partition=1)
    described = bay.topics.describe("b.orders")
    assert (described.name, described.records) == ("b.orders", 1)
    assert [each.next for each in described.partitions] == [1, 2]
    assert bay.topics.alter("a", partitions=3).partitions == 3
    bay.topics.delete("a")
    with pytest.raises(UnknownTopic):
        bay.topics.describe("a")
    with pytest.raises(UnknownTopic):
        bay.read("a")


def test_a_failed_send_is_told_by_its_receipt_and_no_other(bay: Bay) -> None:
    bay.topics.create("orders", partitions=1)
    with bay.producer(FAST) as out:
        good = out.send("orders", [b"x"], partition=0)
        bad = out.send("orders", [b"x"], partition=7)
        assert good.result(10).start_offset == 1
        with pytest.raises(UnknownTopic):
            bad.result(10)


def test_a_failure_that_nobody_asked_for_is_raised_at_the_end_of_the_block(bay: Bay) -> None:
    bay.topics.create("orders", partitions=1)
    with pytest.raises(UnknownTopic) as caught, bay.producer(FAST) as out:
        out.send("orders", [b"x"], partition=7)
        out.send("orders", [b"x"], partition=8)
        out.send("orders", [b"x"], partition=0)
    assert "2 sends failed" in caught.value.__notes__[0]
    assert bay.read("orders").read_all().num_rows == 1


def test_a_receipt_that_is_asked_too_early_says_that_it_goes_on(bay: Bay) -> None:
    with bay.producer(ProducerConfig(batch_max_delay_ms=60_000)) as out:
        receipt = out.send("orders", [b"x"], partition=0)
        with pytest.raises(OutcomeUnknown, match="not durable"):
            receipt.result(timeout=0.001)
        out.flush()
        assert receipt.result(0).start_offset == 1


def test_a_sender_that_is_too_fast_waits_or_is_told(bay: Bay) -> None:
    config = ProducerConfig(batch_max_delay_ms=60_000, pending_max_bytes=1_000, batch_max_bytes=100_000)
    with bay.producer(config) as out:
        out.send("orders", [b"x" * 900], partition=0)
        with pytest.raises(Backpressure):
            out.send("orders", [b"x" * 900], partition=0, timeout=0.001)
        threading.Timer(0.01, out.flush).start()
        out.send("orders", [b"y" * 900], partition=0)
    assert bay.read("orders").read_all().num_rows == 2


def test_use_after_close_is_refused(tmp_path: Path) -> None:
    with forebay.connect(tmp_path) as bay:
        out = bay.producer(FAST)
        with out:
            pass
        with pytest.raises(Closed):
            out.send("orders", [b"x"], partition=0)
    bay.close()
    with pytest.raises(Closed):
        bay.topics.list()
    with pytest.raises(Closed):
        bay.producer()


def test_a_producer_of_a_closed_bay_refuses_every_send_and_not_only_the_first(tmp_path: Path) -> None:
    bay = forebay.connect(tmp_path)
    out = bay.producer(FAST)
    out.send("orders", [b"a"], partition=0)
    bay.close()
    for _ in range(3):
        with pytest.raises(Closed):
            out.send("orders", [b"b"], partition=0)
    out.close()


def test_closing_while_threads_send_leaves_no_receipt_without_an_answer(tmp_path: Path) -> None:
    bay = forebay.connect(tmp_path)
    out = bay.producer(FAST)
    receipts: list[Receipt] = []
    begun = threading.Barrier(4)

    def send(partition: int) -> None:
        receipts.append(out.send("orders", [b"first"], partition=partition))
        begun.wait()
        with pytest.raises(Closed):
            while True:
                receipts.append(out.send("orders", [b"more"], partition=partition))

    threads = [threading.Thread(target=send, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    begun.wait()
    bay.close()
    for thread in threads:
        thread.join()
    # Whatever was taken before the close is durable; nobody waits for ever.
    assert all(receipt.done() for receipt in receipts)
    assert sum(receipt.result(0).count for receipt in receipts) == len(receipts)
    with forebay.connect(tmp_path) as bay:
        assert bay.read("orders").read_all().num_rows == len(receipts)


def test_a_close_that_is_cut_short_tells_those_who_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bay = forebay.connect(tmp_path)
    out = bay.producer(ProducerConfig(batch_max_delay_ms=60_000))
    receipt = out.send("orders", [b"a"], partition=0)

    class Interrupted(Exception):
        pass

    async def cut_short() -> None:
        raise Interrupted

    monkeypatch.setattr(bay._bay, "close", cut_short)
    with pytest.raises(Interrupted):
        bay.close()
    with pytest.raises(ForebayError):
        receipt.result(10)
    assert receipt.done()


@pytest.mark.parametrize("wrong", [True, 1.0, "1", -1])
def test_a_partition_that_is_no_number_is_refused_and_never_becomes_a_key(bay: Bay, wrong: Any) -> None:
    # True == 1 == 1.0, so a name made of one of them would also be found for the others.
    topic = "numbers"
    bay.topics.create(topic, partitions=2)
    with bay.producer(FAST) as out:
        refused = out.send(topic, [b"wrong"], partition=wrong)
        with pytest.raises(UsageError, match="partition"):
            refused.result(10)
        done = out.send(topic, [b"right"], partition=1).result(10)
    assert done.parts[0].index_key == "llog/numbers/partitions/1/index/00000000000000000001"
    assert bay.read(topic, partition=1).read_all().column("value").to_pylist() == [b"right"]


@pytest.mark.parametrize("wrong", [None, 5, b"orders"])
def test_a_topic_that_is_no_text_fails_its_own_send_only(bay: Bay, wrong: Any) -> None:
    with bay.producer(ProducerConfig(batch_max_delay_ms=60_000)) as out:
        good = out.send("orders", [b"good"], partition=0)
        bad = out.send(wrong, [b"bad"], partition=0)
        with pytest.raises(UsageError):
            out.flush()
        assert good.result(10).start_offset == 1 and bad.done()


def test_a_bucket_needs_a_coordinator() -> None:
    with pytest.raises(UsageError, match="needs a coordinator") as caught:
        forebay.connect("s3://bucket/prefix?endpoint=http://127.0.0.1:1")
    assert "coordinator=" in caught.value.hint
    with pytest.raises(InvalidUrl):
        forebay.connect("memory://", coordinator="nothing://")


def test_memory_and_file_urls_have_a_coordinator_of_their_own(tmp_path: Path) -> None:
    for url in ("memory://", f"file://{tmp_path}"):
        with forebay.connect(url) as bay, bay.producer(FAST) as out:
            assert out.send("orders", [b"x"], partition=0).result(10).start_offset == 1


def test_a_store_and_a_coordinator_may_be_named_apart(tmp_path: Path) -> None:
    keys = f"sqlite://{tmp_path}/keys.db"
    with forebay.connect(tmp_path / "objects", coordinator=keys) as bay, bay.producer(FAST) as out:
        out.send("orders", [b"x"], partition=0)
    assert (tmp_path / "keys.db").exists()
    with forebay.connect(tmp_path / "objects", coordinator=keys) as bay:
        assert bay.read("orders").read_all().num_rows == 1


def test_a_forked_child_is_told_to_connect_by_itself(bay: Bay) -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            bay.topics.list()
            answer = b"no error"
        except UsageError as error:
            answer = error.hint.encode()
        os.write(writing, answer)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as answers:
        assert answers.read() == b"call forebay.connect in the child process"
    os.waitpid(child, 0)
    assert bay.topics.list() == []


@pytest.mark.parametrize("forgotten", [False, True])
def test_what_was_sent_is_durable_when_the_interpreter_ends(tmp_path: Path, forgotten: bool) -> None:
    script = (
        "import forebay, gc, sys\n"
        "bay = forebay.connect(sys.argv[1])\n"
        "out = bay.producer()\n"
        "out.send('orders', [b'last words'], partition=0)\n"
    ) + ("del bay, out\ngc.collect()\n" if forgotten else "")
    subprocess.run([sys.executable, "-W", "error", "-c", script, str(tmp_path)], check=True, timeout=60)
    with forebay.connect(tmp_path) as bay:
        assert bay.read("orders").read_all().column("value").to_pylist() == [b"last words"]


def test_a_bay_that_was_closed_and_forgotten_is_gone(tmp_path: Path) -> None:
    bay = forebay.connect(tmp_path)
    gone = weakref.ref(bay)
    bay.close()
    del bay
    gc.collect()
    assert gone() is None


def test_a_forked_child_that_connects_by_itself_ends_and_loses_nothing(tmp_path: Path, bay: Bay) -> None:
    child = os.fork()
    if child == 0:
        theirs = forebay.connect(tmp_path / "theirs")
        theirs.producer().send("orders", [b"last words"], partition=0)
        del theirs
        threading._shutdown()  # type: ignore[attr-defined] # As a forked worker of multiprocessing does.
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    with forebay.connect(tmp_path / "theirs") as theirs:
        assert theirs.read("orders").read_all().column("value").to_pylist() == [b"last words"]
    assert bay.topics.list() == []


def test_a_child_whose_parent_was_connected_to_a_service_is_told_not_to_be_one(tmp_path: Path) -> None:
    # In a process of its own: it counts as connected from then on.
    script = (
        "import os, sys, forebay\n"
        "from forebay.errors import UsageError\n"
        "forebay.connect('memory://', coordinator='oxia://127.0.0.1:1/default').close()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    with forebay.connect(sys.argv[1]) as bay:\n"
        "        bay.topics.create('orders')\n"
        "    try:\n"
        "        forebay.connect('memory://', coordinator='oxia://127.0.0.1:1/default')\n"
        "    except UsageError as error:\n"
        "        os._exit(42 if 'spawn' in error.hint else 1)\n"
        "    os._exit(2)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42\n"
        "forebay.connect('memory://', coordinator='oxia://127.0.0.1:1/default').close()\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, timeout=60)


@pytest.mark.parametrize("waits", [False, True], ids=["at once", "from the inbox"])
def test_a_defect_in_one_send_is_told_and_keeps_no_other_waiting(
    bay: Bay, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = forebay.aio.Producer._groups

    def fails_for_one(self: Any, item: Any, count: int) -> Any:
        if item.batch.records() == [b"bad"]:
            raise ZeroDivisionError("of ours")
        return groups(self, item, count)

    monkeypatch.setattr(forebay.aio.Producer, "_groups", fails_for_one)
    with bay.producer(FAST) as out:
        partition = None if waits else 0  # The number of partitions has to be asked for first.
        receipts = [out.send("orders", [value], partition=partition) for value in (b"a", b"bad", b"b")]
        with pytest.raises(OutcomeUnknown, match="of ours"):
            receipts[1].result(10)
        assert [receipts[0].result(10).start_offset, receipts[2].result(10).start_offset] == [1, 2]


def test_importing_forebay_loads_nothing_heavy() -> None:
    script = (
        "import sys, forebay\n"
        "heavy = {'pyarrow', 'numpy', 'obstore', 'msgspec', 'asyncio'} & set(sys.modules)\n"
        "sys.exit(', '.join(heavy) or 0)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


# -- Groups


def test_a_group_consumes_through_the_front_door(bay: Bay) -> None:
    bay.topics.create("orders", partitions=2)
    with bay.producer(FAST) as out:
        for partition in (0, 1):
            out.send("orders", [b"a", b"b"], partition=partition)
    with bay.groups.consumer("billing", ["orders"]) as consumer:
        batches = consumer.poll(timeout_s=10)
        assert sum(batch.num_rows for batch in batches) == 4
        assert consumer.poll(timeout_s=0) == []
        consumer.commit()
        assert bay.groups.describe("billing").members[0].member_id == consumer.member_id
    assert bay.groups.list() == ["billing"]
    described = bay.groups.describe("billing")
    assert (described.records, described.seconds, described.members) == (0, 0.0, ())
    plans = bay.groups.reset("billing", to=datetime.now(UTC) - timedelta(days=1), dry_run=True)
    assert [(plan.before, plan.after) for plan in plans] == [(3, 1), (3, 1)]
    bay.groups.reset("billing", to="earliest")
    place = TopicPartition("orders", 0)
    assert bay.groups.committed("billing")[place].offset == 1
    bay.groups.commit("billing", {place: 2}, generation=1_000)
    assert bay.groups.describe("billing").records == 3
    bay.groups.delete("billing")
    assert bay.groups.list() == []


# -- asyncio


async def test_the_same_for_asyncio(tmp_path: Path) -> None:
    async with forebay.aio.connect(tmp_path) as bay:
        await bay.topics.create("orders", partitions=2)
        async with bay.producer(FAST) as out:
            done = await out.send("orders", [b"alpha", b"beta"], partition=0)
            assert (done.start_offset, done.end_offset) == (1, 2)
            assert (await out.send("orders", [b"gamma"]).result(timeout=10)).count == 1
        stream = await bay.read("orders")
        assert (await stream.read_all()).num_rows == 3
        found = [batch async for batch in await bay.read("orders", partition=0)]
        assert sum(batch.num_rows for batch in found) == 2


async def test_asyncio_senders_are_told_when_there_is_no_room(tmp_path: Path) -> None:
    config = ProducerConfig(batch_max_delay_ms=5, pending_max_bytes=1_000)
    async with forebay.aio.connect(tmp_path) as bay, bay.producer(config) as out:
        for _ in range(2):
            await out.room()
            out.send("orders", [b"x" * 990], partition=0)
        with pytest.raises(Backpressure):
            out.send("orders", [b"x" * 990], partition=0)
        await out.flush()
        assert out.pending_bytes == 0


async def test_a_closed_bay_of_asyncio_is_refused(tmp_path: Path) -> None:
    bay = forebay.aio.connect(tmp_path)
    with pytest.raises(Closed):
        _ = bay.topics
    await bay.open()
    with pytest.raises(UsageError, match="open already"):
        await bay.open()
    await bay.close()
    await bay.close()


async def test_a_closed_producer_of_asyncio_refuses_at_once(tmp_path: Path) -> None:
    """Its receipt would know, but nobody has to look at it, and nothing raises it any more."""
    async with forebay.aio.connect(tmp_path) as bay:
        async with bay.producer(FAST) as out:
            await out.send("orders", [b"a"], partition=0)
        with pytest.raises(Closed):
            out.send("orders", [b"b"], partition=0)


async def test_a_send_to_several_partitions_that_fails_in_part_says_which(tmp_path: Path) -> None:
    async with forebay.aio.connect(tmp_path) as bay:
        await bay.topics.create("orders", partitions=4)
        keys = [b"%d" % number for number in range(50)]
        out = bay.producer(FAST)
        await out.send("orders", [b"x"])
        from forebay.log import Fencing

        parts = bay.parts
        fencing = Fencing(
            parts.coordinator, bay.writer.catalog, clock=parts.clock, randomness=parts.randomness
        )
        await fencing.fence("orders", 2)
        receipt = out.send("orders", keys, keys=keys)
        with pytest.raises(PartlyDelivered, match="1 of 4") as caught:
            await receipt
        assert [part.partition for part in caught.value.parts if part.error] == [2]
        assert sum(part.count for part in caught.value.parts) == 50


def test_partitions_may_be_the_integers_of_numpy_but_no_truth_values(bay: Bay) -> None:
    bay.topics.create("numbers", partitions=3)
    with bay.producer() as out:
        two: Any = np.int64(2)
        assert out.send("numbers", [b"x"], partition=two).result(30).partition == 2
        for wrong in (True, 1.0, "1"):
            with pytest.raises(UsageError):
                out.send("numbers", [b"x"], partition=wrong).result(30)  # type: ignore[arg-type]
