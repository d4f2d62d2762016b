"""The broker as users run it: a process with a directory, stopped, killed, started twice."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import http.server
import itertools
import json
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from tests.broker.processes import BrokerProcess, broker_process

from forebay.cli import run as cli


def test_serve_prints_one_line_and_ends_with_zero_on_sigterm(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "forebay.cli", "serve", "--data", str(tmp_path), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    first = process.stdout.readline()
    assert "http://127.0.0.1:" in first
    process.terminate()
    rest, errors = process.communicate(timeout=60)
    assert (process.returncode, rest, errors) == (0, "", "")


def test_batch_settings_come_from_the_environment_unless_the_command_says_otherwise(tmp_path: Path) -> None:
    environment = {
        "LLOG_BATCH_MAX_BYTES": "123456",
        "LLOG_BATCH_MAX_DELAY_MS": "17",
        "LLOG_TAIL_CACHE_DIR": str(tmp_path / "tail"),
    }
    words = ("--data", str(tmp_path / "data"), "--batch-max-delay-ms", "18")
    with broker_process(*words, environment=environment) as broker:
        batch = broker.call("/metrics")[1]["batch"]
        assert (batch["batch_max_bytes"], batch["batch_max_delay_ms"]) == (123456, 18)
        assert (tmp_path / "tail").is_dir()


def test_sigterm_answers_waiters_and_loses_no_accepted_record(tmp_path: Path) -> None:
    with broker_process("--data", str(tmp_path), "--batch-max-delay-ms", "30000") as broker:
        threading.Thread(target=broker.produce, args=("t", 0, ["first"]), daemon=True).start()
        answers: list[tuple[int, dict[str, object]]] = []
        produced = threading.Thread(target=lambda: answers.append(broker.produce("u", 0, ["kept"])))
        produced.start()
        while broker.call("/metrics")[1]["batcher"]["pending_groups"] < 2:
            time.sleep(0.01)
        # Without the stop these would be answered after thirty seconds.
        assert broker.terminate() == 0
        produced.join(timeout=30)
        [(status, answer)] = answers
        assert (status, answer["success_count"]) == (200, 1)
    with broker_process("--data", str(tmp_path)) as broker:
        assert broker.read_all("u", 0) == ["kept"]


def test_sigterm_answers_long_polls_at_once(tmp_path: Path) -> None:
    with broker_process("--data", str(tmp_path)) as broker:
        broker.produce("t", 0, ["a"])
        answers: list[tuple[int, dict[str, object]]] = []
        place = {"topic": "t", "partition": 0, "fetch_offset": 2}
        poll = {"topic_partitions": [place], "max_wait_ms": 60_000}
        waiter = threading.Thread(target=lambda: answers.append(broker.call("/consume", poll)))
        waiter.start()
        while broker.call("/metrics")[1]["consume"]["waiting"] < 1:
            time.sleep(0.01)
        assert broker.terminate() == 0
        waiter.join(timeout=30)
        assert answers[0][0] == 200


def test_stop_is_bounded_by_its_timeout(tmp_path: Path) -> None:
    with broker_process("--data", str(tmp_path), "--stop-timeout-ms", "300") as broker:
        place = urlsplit(broker.url)
        with socket.create_connection((str(place.hostname), int(place.port or 0))) as half:
            half.sendall(b"POST /produce HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
            assert broker.terminate() == 0


def _write(broker: BrokerProcess, partition: int, acknowledged: list[str], attempted: list[str]) -> None:
    for number in itertools.count():
        value = f"{partition}/{number}"
        attempted.append(value)
        try:
            status, _ = broker.produce("t", partition, [value])
        except OSError:
            return
        if status == 200:
            acknowledged.append(value)


def test_kill_nine_under_load_loses_nothing_acknowledged(tmp_path: Path) -> None:
    words = ("--data", str(tmp_path), "--batch-max-delay-ms", "2")
    told: list[list[str]] = [[], [], []]
    tried: list[list[str]] = [[], [], []]
    with broker_process(*words) as broker:
        writers = [
            threading.Thread(target=_write, args=(broker, number, told[number], tried[number]))
            for number in range(3)
        ]
        for writer in writers:
            writer.start()
        while any(len(each) < 15 for each in told):
            time.sleep(0.01)
        broker.kill()
        for writer in writers:
            writer.join(timeout=60)
    with broker_process(*words) as broker:
        for number in range(3):
            found = broker.read_all("t", number)
            # The last one was on its way; whether it is there is not known, but it is not there twice.
            assert found in (told[number], [*told[number], *tried[number][len(told[number]) :]])
        assert broker.terminate() == 0
    assert cli(["log", "verify", "--data", str(tmp_path)]) == 0


def test_connections_that_nobody_uses_leave_files_for_appends(tmp_path: Path) -> None:
    with broker_process("--data", str(tmp_path), files_max=160) as broker, contextlib.ExitStack() as opened:
        used = http.client.HTTPConnection(urlsplit(broker.url).netloc, timeout=60)
        opened.callback(used.close)
        used.request("GET", "/health")
        used.getresponse().read()
        address = (urlsplit(broker.url).hostname, urlsplit(broker.url).port)
        for _ in range(300):
            with contextlib.suppress(OSError):  # Ended without a word.
                opened.enter_context(socket.create_connection(address, timeout=60))
        for number in range(5):
            batch = {"topic": "t", "partition": number, "records": ["a"]}
            used.request("POST", "/produce", json.dumps({"topic_partitions": [batch]}))
            answer = used.getresponse()
            assert (answer.status, answer.read()[:12]) == (200, b'{"results":[')


def test_two_brokers_share_a_directory_and_their_tail(tmp_path: Path) -> None:
    tail = ("--tail-cache-dir", str(tmp_path / "tail"))
    data = ("--data", str(tmp_path / "data"))
    with (
        broker_process(
            *data, *tail, "--role", "write", "--broker-id", "w", "--batch-max-delay-ms", "2"
        ) as writer,
        broker_process(*data, *tail, "--role", "read", "--broker-id", "r") as reader,
    ):
        assert writer.produce("t", 0, ["a"])[0] == 200
        answers: list[tuple[int, dict[str, list[dict[str, list[dict[str, str]]]]]]] = []
        place = {"topic": "t", "partition": 0, "fetch_offset": 2}
        poll = {"topic_partitions": [place], "max_wait_ms": 60_000}
        waiter = threading.Thread(target=lambda: answers.append(reader.call("/consume", poll)))
        waiter.start()
        while reader.call("/metrics")[1]["consume"]["waiting"] < 1:
            time.sleep(0.01)
        assert writer.produce("t", 0, ["b"])[0] == 200
        waiter.join(timeout=60)
        assert answers[0][1]["results"][0]["records"][0]["value"] == "b"
        # The poll may have been quicker than the writer's file; a later look finds it.
        while reader.call("/metrics")[1]["consume"]["tail_cache_hits"] < 1:
            assert reader.call("/consume", {"topic_partitions": [place]})[0] == 200
        assert reader.produce("t", 0, ["c"])[0] == 404
        assert writer.call("/consume", poll)[0] == 404
        assert reader.terminate() == 0
        assert writer.terminate() == 0


def test_two_writing_brokers_give_every_record_its_own_offset(tmp_path: Path) -> None:
    words = ("--data", str(tmp_path), "--batch-max-delay-ms", "1")
    with broker_process(*words, "--broker-id", "a") as one, broker_process(*words, "--broker-id", "b") as two:
        offsets: list[int] = []

        def write(broker: BrokerProcess) -> None:
            for number in range(20):
                status, answer = broker.produce("t", 0, [str(number)])
                assert status == 200, answer
                offsets.append(answer["results"][0]["start_offset"])

        writers = [threading.Thread(target=write, args=(broker,)) for broker in (one, two)]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join(timeout=120)
        assert sorted(offsets) == list(range(1, 41))
        assert len(one.read_all("t", 0)) == len(two.read_all("t", 0)) == 40


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--host", "0.0.0.0"), "forebay tokens issue"),
        (("--role", "chief"), "write, read or both"),
        (("--codec", "rot13"), "none or zstd"),
        (("--tls-cert", "x.pem"), "belong together"),
        (("--body-max-bytes", "many"), "not a size"),
    ],
)
def test_wrong_usage_is_told_in_two_lines_and_exit_code_two(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], text: str
) -> None:
    assert cli(["serve", "--data", str(tmp_path), "--port", "0", *words]) == 2
    told = capsys.readouterr().err
    assert text in told
    assert len(told.splitlines()) == 2


def test_port_that_is_taken_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert cli(["serve", "--data", str(tmp_path), "--port", port]) == 1
    assert "cannot listen" in capsys.readouterr().err


def test_tokens_are_issued_listed_and_revoked_from_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*words: str) -> str:
        assert cli([*words, "--data", str(tmp_path)]) == 0
        return capsys.readouterr().out

    issue = ("tokens", "issue", "ci", "--can", "append", "--topic-prefix", "t", "--expires", "1d")
    made = json.loads(run(*issue, "--output", "json"))
    assert made["token"].startswith(f"fb_{made['token_id']}_")
    listed = json.loads(run("tokens", "list", "--output", "json"))
    assert listed == {name: value for name, value in made.items() if name != "token"}
    assert listed["expires_at_ms"] - listed["created_at_ms"] == 86_400_000
    assert made["token_id"] in run("tokens", "list")
    assert "revoked" in run("tokens", "revoke", made["token_id"])
    assert run("tokens", "list", "--output", "json") == ""
    assert cli(["tokens", "revoke", "nobody", "--data", str(tmp_path)]) == 1
    assert cli(["tokens", "issue", "x", "--can", "fly", "--data", str(tmp_path)]) == 2


def test_metrics_are_sent_by_otlp(tmp_path: Path) -> None:
    bodies: list[bytes] = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector) as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        try:
            endpoint = f"http://127.0.0.1:{collector.server_port}/v1/metrics"
            with broker_process("--data", str(tmp_path), "--otlp-endpoint", endpoint) as broker:
                broker.produce("t", 0, ["a"])
                assert broker.terminate() == 0  # The last export goes out with the stop.
        finally:
            collector.shutdown()
            thread.join(timeout=30)
    sent = b"".join(gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body for body in bodies)
    assert b"produce.records" in sent
    assert b"broker-1" in sent
