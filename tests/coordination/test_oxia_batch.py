from __future__ import annotations

import pytest

from forebay.coordination._api import Delete, DeleteRange, Operation, Put
from forebay.coordination._oxia import _batch
from forebay.coordination._oxia import oxia_pb2 as pb
from forebay.coordination._oxia._batch import Batch, Unit
from forebay.coordination._oxia._deadline import Deadline
from forebay.errors import LimitExceeded, OutcomeUnknown, PreconditionFailed
from forebay.kit.conditions import ABSENT


def unit(*operations: Operation) -> Unit:
    return Unit(0, operations, Deadline(60))


def batch(*units: Unit) -> Batch:
    made = Batch()
    for each in units:
        assert made.takes(each)
        made.add(each)
    return made


async def test_request_of_many_units_is_their_concatenation_with_the_shard() -> None:
    request = pb.WriteRequest.FromString(
        batch(unit(Put("a/x", b"1")), unit(Put("a/y", b"2"), Delete("a/z", 7))).encode(3)
    )
    assert request.HasField("shard")
    assert request.shard == 3
    assert [put.key for put in request.puts] == ["a/x", "a/y"]
    assert request.deletes[0].expected_version_id == 7


async def test_shard_zero_is_sent_and_not_left_out() -> None:
    request = pb.WriteRequest.FromString(batch(unit(Put("a/x", b""))).encode(0))
    assert request.HasField("shard")


async def test_conditions_become_expectations_and_version_zero_is_one() -> None:
    sent = pb.WriteRequest.FromString(
        unit(Put("a/any", b""), Put("a/absent", b"", ABSENT), Put("a/zero", b"", 0)).data
    ).puts
    assert not sent[0].HasField("expected_version_id")
    assert sent[1].expected_version_id == -1
    assert sent[2].HasField("expected_version_id")
    assert sent[2].expected_version_id == 0


async def test_partition_key_travels_with_puts() -> None:
    [put] = pb.WriteRequest.FromString(unit(Put("a/x", b"", partition_key="p")).data).puts
    assert put.partition_key == "p"


async def test_version_beyond_the_wire_fails_its_precondition_without_being_sent() -> None:
    made = unit(Put("a/x", b"", 2**63), Put("a/y", b""))
    assert made.operations == 1
    reply = made.replies[0]
    assert reply is not None
    assert isinstance(reply.error, PreconditionFailed)


async def test_put_does_not_join_a_request_that_deletes() -> None:
    """It would be applied before the delete, in an order nobody asked for."""
    made = batch(unit(Put("a/x", b"")), unit(Put("a/y", b""), Delete("a/x")))
    assert not made.takes(unit(Put("a/x", b"")))
    assert made.takes(unit(Delete("a/y")))
    made.add(unit(DeleteRange("a/", "a//")))
    assert not made.takes(unit(Delete("a/y")))


async def test_request_ends_at_the_named_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_batch, "JOIN_OPERATIONS_MAX", 2)
    assert not batch(unit(Put("a/x", b"")), unit(Put("a/y", b""))).takes(unit(Put("a/z", b"")))
    monkeypatch.setattr(_batch, "JOIN_OPERATIONS_MAX", 100)
    monkeypatch.setattr(_batch, "JOIN_BYTES_MAX", 50)
    assert not batch(unit(Put("a/x", b"x" * 40))).takes(unit(Put("a/y", b"x" * 40)))


async def test_unit_larger_than_a_joined_request_travels_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_batch, "JOIN_OPERATIONS_MAX", 2)
    large = unit(*[Put(f"a/{n}", b"") for n in range(5)])
    assert Batch().takes(large)
    assert not batch(large).takes(unit(Put("a/x", b"")))


async def test_request_that_would_wedge_a_server_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _batch.REQUEST_BYTES_MAX < 64 * 1024 * 1024
    monkeypatch.setattr(_batch, "REQUEST_BYTES_MAX", 100)
    with pytest.raises(LimitExceeded, match="REQUEST_BYTES_MAX"):
        unit(Put("a/x", b"x" * 200))


async def test_answers_go_to_their_operations() -> None:
    first = unit(Delete("a/gone"), Put("a/x", b""), Put("a/y", b""))
    second = unit(Put("a/z", b""))
    second_deletes = unit(Delete("a/there", 5))
    made = batch(unit(Put("a/0", b"")), second, first, second_deletes)
    response = pb.WriteResponse()
    for version in (0, 11, 12):
        response.puts.add(version=pb.Version(version_id=version))
    response.puts.add(status=pb.UNEXPECTED_VERSION_ID)
    response.deletes.add(status=pb.KEY_NOT_FOUND)
    response.deletes.add(status=pb.UNEXPECTED_VERSION_ID)
    assert made.answer(response)
    replies = [[(r.version, type(r.error)) for r in u.replies if r] for u in made.units]
    assert replies == [
        [(0, type(None))],
        [(11, type(None))],
        [(None, type(None)), (12, type(None)), (None, PreconditionFailed)],
        [(None, PreconditionFailed)],
    ]


async def test_answer_of_the_wrong_size_is_not_handed_out() -> None:
    made = batch(unit(Put("a/x", b"")), unit(Put("a/y", b"")))
    assert not made.answer(pb.WriteResponse(puts=[pb.PutResponse()]))
    assert made.units[0].replies == [None]


async def test_deleting_what_is_not_there_succeeds_only_without_a_version() -> None:
    made = batch(unit(Delete("a/x"), Delete("a/y", ABSENT), Delete("a/z", 3)))
    missing = [pb.DeleteResponse(status=pb.KEY_NOT_FOUND)] * 3
    assert made.answer(pb.WriteResponse(deletes=missing))
    assert [reply is not None and reply.error is None for reply in made.units[0].replies] == [
        True,
        True,
        False,
    ]


async def test_late_answer_does_not_change_what_the_caller_was_told() -> None:
    made = batch(unit(Put("a/x", b"")))
    [only] = made.units
    only.done.cancel()
    only.fail(OutcomeUnknown("writing 'a/x'"))
    assert made.answer(pb.WriteResponse(puts=[pb.PutResponse(version=pb.Version(version_id=4))]))
    [reply] = only.replies
    assert reply is not None
    assert isinstance(reply.error, OutcomeUnknown)
