"""The failing S3 server, judged by two clients that had no part in it: obstore and boto3."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import boto3
import obstore
import pytest
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from obstore.exceptions import AlreadyExistsError, GenericError, PermissionDeniedError, PreconditionError
from obstore.store import S3Store

from forebay.errors import UsageError
from forebay.testing.s3_faults import Fault, S3FaultServer, answer, drop, overwritten, slow, truncated


@pytest.fixture
def server() -> Iterator[S3FaultServer]:
    with S3FaultServer() as running:
        yield running


def connect(server: S3FaultServer, *, retries: int = 0, access_key: str = "") -> S3Store:
    return S3Store(
        server.bucket,
        endpoint=server.endpoint,
        access_key_id=access_key or server.access_key,
        secret_access_key=server.secret_key,
        region="us-east-1",
        virtual_hosted_style_request=False,
        client_options={"allow_http": True},
        retry_config={"max_retries": retries},
    )


@pytest.fixture
def store(server: S3FaultServer) -> S3Store:
    return connect(server)


@pytest.fixture
def boto(server: S3FaultServer) -> Iterator[Any]:
    client = boto3.client(
        "s3",
        endpoint_url=server.endpoint,
        aws_access_key_id=server.access_key,
        aws_secret_access_key=server.secret_key,
        region_name="us-east-1",
        config=Config(retries={"total_max_attempts": 1}, s3={"addressing_style": "path"}),
    )
    yield client
    client.close()


def data(store: S3Store, key: str) -> bytes:
    return bytes(obstore.get(store, key).bytes())


def test_object_comes_back_with_its_metadata(server: S3FaultServer, store: S3Store) -> None:
    obstore.put(store, "a/b c+d", b"hello", attributes={"token": "t1"})
    assert data(store, "a/b c+d") == b"hello"
    assert obstore.get(store, "a/b c+d").attributes["token"] == "t1"
    assert server.metadata("a/b c+d") == {"x-amz-meta-token": "t1"}
    assert obstore.head(store, "a/b c+d")["size"] == 5


def test_create_refuses_an_existing_key(store: S3Store) -> None:
    obstore.put(store, "k", b"1", mode="create")
    with pytest.raises(AlreadyExistsError):
        obstore.put(store, "k", b"2", mode="create")
    assert data(store, "k") == b"1"


def test_update_needs_the_current_version(server: S3FaultServer, store: S3Store) -> None:
    first = obstore.put(store, "k", b"1")
    obstore.put(store, "k", b"2", mode={"e_tag": first["e_tag"] or ""})
    with pytest.raises(PreconditionError):
        obstore.put(store, "k", b"3", mode={"e_tag": first["e_tag"] or ""})
    with pytest.raises((PreconditionError, FileNotFoundError)):
        obstore.put(store, "missing", b"3", mode={"e_tag": first["e_tag"] or ""})
    assert server.get("k") == b"2"


def test_conditional_get_tells_unchanged_from_changed(server: S3FaultServer, boto: Any) -> None:
    etag = boto.put_object(Bucket=server.bucket, Key="k", Body=b"1")["ETag"]
    with pytest.raises(ClientError, match="304"):
        boto.get_object(Bucket=server.bucket, Key="k", IfNoneMatch=etag)
    server.put("k", b"2")
    assert boto.get_object(Bucket=server.bucket, Key="k", IfNoneMatch=etag)["Body"].read() == b"2"
    with pytest.raises(ClientError, match="PreconditionFailed"):
        boto.get_object(Bucket=server.bucket, Key="k", IfMatch=etag)


def test_ranges_are_exact_and_bounded(server: S3FaultServer, store: S3Store, boto: Any) -> None:
    obstore.put(store, "k", b"0123456789")
    assert bytes(obstore.get_range(store, "k", start=2, length=3)) == b"234"
    parts = obstore.get_ranges(store, "k", starts=[0, 8], lengths=[2, 2])
    assert [bytes(part) for part in parts] == [b"01", b"89"]
    for asked, expected in {"bytes=-3": b"789", "bytes=7-": b"789", "bytes=8-99": b"89"}.items():
        assert boto.get_object(Bucket=server.bucket, Key="k", Range=asked)["Body"].read() == expected
    with pytest.raises(ClientError, match="InvalidRange"):
        boto.get_object(Bucket=server.bucket, Key="k", Range="bytes=10-12")


def test_listing_is_in_byte_order_and_paged(server: S3FaultServer, boto: Any) -> None:
    keys = ["o/a/1", "o/a-b/1", "o/a.1", "o/ü", "p/1", "o/a&b"]
    for key in keys:
        server.put(key, b"x")
    found: list[str] = []
    token: dict[str, str] = {}
    for _ in range(4):
        page = boto.list_objects_v2(Bucket=server.bucket, Prefix="o/", MaxKeys=2, **token)
        found += [entry["Key"] for entry in page["Contents"]]
        if not page["IsTruncated"]:
            break
        token = {"ContinuationToken": page["NextContinuationToken"]}
    assert found == sorted([key for key in keys if key.startswith("o/")], key=str.encode)
    after = boto.list_objects_v2(Bucket=server.bucket, StartAfter="o/a/1")["Contents"]
    assert [entry["Key"] for entry in after] == ["o/ü", "p/1"]


def test_delimiter_folds_directories(server: S3FaultServer, store: S3Store) -> None:
    for key in ("a/1", "a/b/1", "a/b/2", "a/c/1"):
        server.put(key, b"x")
    found = obstore.list_with_delimiter(store, "a")
    assert [entry["path"] for entry in found["objects"]] == ["a/1"]
    assert sorted(found["common_prefixes"]) == ["a/b", "a/c"]


def test_bulk_delete_takes_missing_keys_in_its_stride(server: S3FaultServer, store: S3Store) -> None:
    for key in ("a", "b", "c<&"):
        server.put(key, b"x")
    obstore.delete(store, ["a", "c<&", "never there"])
    assert server.keys() == ["b"]
    assert server.requests["BULK_DELETE"] == 1


def test_boto_deletes_one_by_one(server: S3FaultServer, boto: Any) -> None:
    server.put("a", b"x")
    boto.delete_object(Bucket=server.bucket, Key="a")
    boto.delete_object(Bucket=server.bucket, Key="a")
    assert server.keys() == []
    assert server.requests["DELETE"] == 2


def test_multipart_is_refused_not_imitated(server: S3FaultServer, boto: Any) -> None:
    with pytest.raises(ClientError, match="NotImplemented"):
        boto.create_multipart_upload(Bucket=server.bucket, Key="k")


def test_wrong_bucket_and_wrong_credentials_are_told_apart(server: S3FaultServer, boto: Any) -> None:
    with pytest.raises(ClientError, match="NoSuchBucket"):
        boto.get_object(Bucket="elsewhere", Key="k")
    with pytest.raises(PermissionDeniedError):
        obstore.put(connect(server, access_key="stranger"), "k", b"1")
    assert server.keys() == []


def test_one_of_many_creators_wins(server: S3FaultServer, store: S3Store) -> None:
    def create(number: int) -> bool:
        try:
            obstore.put(store, "contended", b"%d" % number, mode="create")
        except AlreadyExistsError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(create, range(16)))
    assert won.count(True) == 1
    assert server.get("contended") == b"%d" % won.index(True)


def test_one_of_many_updaters_of_a_version_wins(server: S3FaultServer, store: S3Store) -> None:
    version = obstore.put(store, "contended", b"start")["e_tag"] or ""

    def update(number: int) -> bool:
        try:
            obstore.put(store, "contended", b"%d" % number, mode={"e_tag": version})
        except PreconditionError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(update, range(16)))
    assert won.count(True) == 1
    assert server.get("contended") == b"%d" % won.index(True)


@pytest.mark.parametrize("status", [409, 500, 503])
@pytest.mark.parametrize("after", [False, True])
def test_error_before_or_after_the_commit(
    server: S3FaultServer, store: S3Store, status: int, after: bool
) -> None:
    server.fail_next("PUT", answer(status, after=after))
    # 409 is a precondition error to obstore, which is why no error of a conditional put may be believed.
    with pytest.raises((GenericError, PreconditionError, AlreadyExistsError)):
        obstore.put(store, "k", b"1", mode="create")
    assert server.get("k") == (b"1" if after else None)
    obstore.put(store, "k", b"2")
    assert (server.get("k"), server.faults_met) == (b"2", 1)


@pytest.mark.parametrize("after", [False, True])
def test_dropped_connection_before_or_after_the_commit(
    server: S3FaultServer, store: S3Store, after: bool
) -> None:
    server.fail_next("PUT", drop(after=after))
    with pytest.raises(GenericError):
        obstore.put(store, "k", b"1")
    assert server.get("k") == (b"1" if after else None)


def test_retrying_client_is_refused_because_of_its_own_lost_write(server: S3FaultServer) -> None:
    server.fail_next("PUT", answer(503, after=True))
    with pytest.raises((AlreadyExistsError, PreconditionError, GenericError)):
        obstore.put(connect(server, retries=3), "k", b"mine", mode="create")
    assert server.get("k") == b"mine"


def test_other_writer_builds_on_a_write_whose_reply_is_lost(server: S3FaultServer, boto: Any) -> None:
    server.fail_next("PUT", overwritten(lambda body: body + b"+theirs"))
    with pytest.raises(BotoCoreError):
        boto.put_object(Bucket=server.bucket, Key="k", Body=b"mine", IfNoneMatch="*")
    assert server.get("k") == b"mine+theirs"
    server.fail_next("PUT", overwritten(b"theirs", status=500))
    with pytest.raises(ClientError, match="InternalError"):
        boto.put_object(Bucket=server.bucket, Key="k", Body=b"mine again")
    assert server.get("k") == b"theirs"


def test_overwriter_stays_out_where_the_condition_failed(server: S3FaultServer, store: S3Store) -> None:
    server.put("k", b"old")
    server.fail_next("PUT", overwritten(b"theirs"))
    with pytest.raises(GenericError):
        obstore.put(store, "k", b"mine", mode="create")
    assert server.get("k") == b"old"


def test_truncated_body_is_no_shorter_object(server: S3FaultServer, store: S3Store) -> None:
    server.put("k", b"0123456789")
    server.fail_next("GET", truncated(4))
    with pytest.raises(GenericError):
        obstore.get(store, "k").bytes()
    assert data(store, "k") == b"0123456789"


def test_slow_answer_commits_before_the_client_gives_up(server: S3FaultServer) -> None:
    impatient = S3Store(
        server.bucket,
        endpoint=server.endpoint,
        access_key_id=server.access_key,
        secret_access_key=server.secret_key,
        region="us-east-1",
        virtual_hosted_style_request=False,
        client_options={"allow_http": True, "timeout": "1s"},
        retry_config={"max_retries": 0},
    )
    server.fail_next("PUT", slow(60_000))
    with pytest.raises(GenericError):
        obstore.put(impatient, "k", b"1")
    assert server.get("k") == b"1"


def test_closing_does_not_wait_for_slow_answers() -> None:
    with S3FaultServer() as server:
        arrived = threading.Event()

        def seen(body: bytes) -> bytes:
            arrived.set()
            return body

        server.fail_next("PUT", Fault(overwrite=seen, delay_ms=3_600_000))
        caller = threading.Thread(target=_put_in_vain, args=(connect(server),))
        caller.start()
        arrived.wait()
    caller.join()


def _put_in_vain(store: S3Store) -> None:
    with contextlib.suppress(GenericError):
        obstore.put(store, "k", b"1")


def test_faults_wait_for_their_key_and_count_down(server: S3FaultServer, store: S3Store) -> None:
    server.fail_next("PUT", answer(500), key="bad", times=2)
    obstore.put(store, "good", b"1")
    for _ in range(2):
        with pytest.raises(GenericError):
            obstore.put(store, "bad", b"1")
    obstore.put(store, "bad", b"1")
    assert server.requests["PUT"] == 4


def test_faults_come_in_the_order_they_were_asked_for(server: S3FaultServer, store: S3Store) -> None:
    server.fail_next("PUT", answer(500, after=True))
    server.fail_next("*", drop())
    with pytest.raises(GenericError):
        obstore.put(store, "a", b"1")
    with pytest.raises(GenericError):
        obstore.put(store, "b", b"1")
    assert server.keys() == ["a"]


def test_healed_server_fails_no_more(server: S3FaultServer, store: S3Store) -> None:
    server.fail_next("*", drop(), times=1000)
    server.fail_randomly(1.0, [("*", answer(500))])
    server.heal()
    obstore.put(store, "k", b"1")
    assert server.faults_met == 0


def test_unknown_kind_is_a_usage_error(server: S3FaultServer) -> None:
    with pytest.raises(UsageError, match="PATCH"):
        server.fail_next("PATCH", drop())


def outcomes(seed: int) -> list[bool]:
    with S3FaultServer(randomness=random.Random(seed)) as server:
        server.fail_randomly(0.5, [("PUT", answer(500)), ("PUT", answer(503, after=True)), ("GET", drop())])
        store = connect(server)
        results = []
        for number in range(20):
            try:
                obstore.put(store, f"k{number:02d}", b"x")
                results.append(True)
            except GenericError:
                results.append(False)
        return results


def test_same_seed_gives_the_same_faults() -> None:
    assert outcomes(7) == outcomes(7)
    assert {True, False} == set(outcomes(7))
    assert outcomes(7) != outcomes(8)
