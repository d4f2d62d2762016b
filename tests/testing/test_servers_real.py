"""The real servers: what the fixtures promise, seen by other people's clients."""

from __future__ import annotations

import http.client
import socket
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from forebay.testing._servers.ports import GRPC_OFFSET
from forebay.testing._servers.signing import put_object
from forebay.testing.proxy import FaultProxy, lose_reply
from forebay.testing.servers import OxiaServer, SeaweedServer, ServerFailed


def s3_client(server: SeaweedServer, *, secret_key: str = "") -> Any:
    return boto3.client(
        "s3",
        endpoint_url=server.endpoint,
        aws_access_key_id=server.access_key,
        aws_secret_access_key=secret_key or server.secret_key,
        region_name="us-east-1",
        config=Config(s3={"addressing_style": "path"}, read_timeout=60),
    )


def test_seaweed_takes_data_and_checks_conditions(seaweed: SeaweedServer) -> None:
    client = s3_client(seaweed)
    client.put_object(Bucket=seaweed.bucket, Key="real/a", Body=b"1", IfNoneMatch="*")
    with pytest.raises(ClientError, match="PreconditionFailed"):
        client.put_object(Bucket=seaweed.bucket, Key="real/a", Body=b"2", IfNoneMatch="*")
    assert client.get_object(Bucket=seaweed.bucket, Key="real/a")["Body"].read() == b"1"
    client.close()


def test_seaweed_refuses_wrong_credentials(seaweed: SeaweedServer) -> None:
    client = s3_client(seaweed, secret_key="wrong")
    with pytest.raises(ClientError, match=r"SignatureDoesNotMatch|AccessDenied|403"):
        client.put_object(Bucket=seaweed.bucket, Key="real/b", Body=b"1")
    client.close()


def test_seaweed_url_carries_all_that_a_store_needs(seaweed: SeaweedServer) -> None:
    parts = urlsplit(seaweed.url("some/prefix"))
    assert (parts.scheme, parts.netloc, parts.path) == ("s3", seaweed.bucket, "/some/prefix")
    assert parse_qs(parts.query) == {
        "endpoint": [seaweed.endpoint],
        "region": ["us-east-1"],
        "access_key_id": [seaweed.access_key],
        "secret_access_key": [seaweed.secret_key],
    }


def test_put_whose_reply_the_proxy_loses_took_effect(seaweed: SeaweedServer) -> None:
    with FaultProxy("127.0.0.1", seaweed.port) as proxy:
        keys = {"access_key": seaweed.access_key, "secret_key": seaweed.secret_key, "region": "us-east-1"}
        path = f"{seaweed.bucket}/real/lost"
        assert put_object(proxy.address, path, b"first", **keys) == 200
        proxy.next_response(lose_reply(quiet_ms=1_000))
        with pytest.raises((OSError, http.client.HTTPException)):
            put_object(proxy.address, path, b"second", **keys)
    client = s3_client(seaweed)
    assert client.get_object(Bucket=seaweed.bucket, Key="real/lost")["Body"].read() == b"second"
    client.close()


def test_killed_seaweed_comes_back_with_its_data(seaweed: SeaweedServer) -> None:
    client = s3_client(seaweed)
    client.put_object(Bucket=seaweed.bucket, Key="real/kept", Body=b"kept")
    seaweed.kill()
    assert seaweed.pid is None
    ports = {str(port + GRPC_OFFSET) for port in seaweed._ports}
    left = [path.name for path in Path(tempfile.gettempdir()).glob("seaweedfs-*.sock")]
    assert not [name for name in left if any(port in name for port in ports)]
    seaweed.start()
    assert client.get_object(Bucket=seaweed.bucket, Key="real/kept")["Body"].read() == b"kept"
    client.close()


# -- Oxia, spoken to in raw protobuf: the fixture must not lean on the client it helps to test


def field(number: int, content: bytes) -> bytes:
    assert len(content) < 128
    return bytes([number << 3 | 2, len(content)]) + content


def write(channel: Any, key: str, value: str) -> bytes:
    method = channel.unary_unary("/io.streamnative.oxia.proto.OxiaClient/Write")
    put = field(1, key.encode()) + field(2, value.encode())
    answer: bytes = method(b"\x08\x00" + field(2, put), timeout=60, wait_for_ready=True)
    return answer


def read(channel: Any, key: str) -> bytes:
    method = channel.unary_stream("/io.streamnative.oxia.proto.OxiaClient/Read")
    get = field(1, key.encode()) + b"\x10\x01"
    return b"".join(method(b"\x08\x00" + field(2, get), timeout=60, wait_for_ready=True))


def accepts(server: OxiaServer) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", server.port), timeout=10):
            return True
    except OSError:
        return False


def test_oxia_keeps_writes_over_kill_and_restart(oxia: OxiaServer) -> None:
    grpc = pytest.importorskip("grpc")
    assert oxia.url() == f"oxia://{oxia.address}/default"
    with grpc.insecure_channel(oxia.address) as channel:
        write(channel, "kill", "before")
        oxia.kill()
        assert not accepts(oxia)
        oxia.start()
        assert b"before" in read(channel, "kill")
        write(channel, "kill", "after")
        oxia.restart()
        assert b"after" in read(channel, "kill")


def test_mended_oxia_survives_writers_at_once(oxia: OxiaServer) -> None:
    grpc = pytest.importorskip("grpc")
    channels = [
        grpc.insecure_channel(oxia.address, [("grpc.use_local_subchannel_pool", 1)]) for _ in range(4)
    ]

    def write_many(writer: int) -> None:
        for number in range(150):
            write(channels[writer % 4], f"many-{writer}", str(number))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write_many, range(8)))
    for writer in range(8):
        assert b"149" in read(channels[0], f"many-{writer}")
    for channel in channels:
        channel.close()


def test_write_whose_reply_the_proxy_loses_took_effect(oxia: OxiaServer) -> None:
    grpc = pytest.importorskip("grpc")
    with FaultProxy("127.0.0.1", oxia.port) as proxy:
        assert oxia.url(address=proxy.address) == f"oxia://{proxy.address}/default"
        with grpc.insecure_channel(proxy.address) as channel:
            write(channel, "lost", "first")
            proxy.next_response(lose_reply(quiet_ms=1_000))
            with pytest.raises(grpc.RpcError) as caught:
                write(channel, "lost", "second")
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert proxy.stats.faults_met == 1
    with grpc.insecure_channel(oxia.address) as channel:
        assert b"second" in read(channel, "lost")


def test_paused_oxia_accepts_and_does_not_answer(oxia: OxiaServer) -> None:
    grpc = pytest.importorskip("grpc")
    with grpc.insecure_channel(oxia.address) as channel:
        write(channel, "pause", "1")
        oxia.pause()
        try:
            method = channel.unary_unary("/io.streamnative.oxia.proto.OxiaClient/Write")
            with pytest.raises(grpc.RpcError) as caught:
                method(b"\x08\x00" + field(2, field(1, b"pause") + field(2, b"2")), timeout=0.2)
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        finally:
            oxia.resume()
        # Another key: the write that nobody waited for may land now, before or after this one.
        write(channel, "resumed", "3")
        assert b"3" in read(channel, "resumed")


def test_oxia_that_cannot_start_shows_why(oxia: OxiaServer, tmp_path: Path) -> None:
    (tmp_path / "db").write_text("a file where Oxia wants a directory")
    server = OxiaServer(directory=tmp_path)
    with pytest.raises(ServerFailed, match="oxia ended with status") as caught, server:
        pass
    assert "not a directory" in caught.value.output
    assert tmp_path.exists()


def test_own_directory_is_removed_and_a_given_one_kept(oxia: OxiaServer, tmp_path: Path) -> None:
    with OxiaServer(shards=2) as own:
        assert own.output.exists()
    assert not own.directory.exists()
    with OxiaServer(directory=tmp_path / "kept"):
        pass
    assert (tmp_path / "kept" / "wal").exists()
