"""Pipes: produce, consume and tail as real processes and in this one, straight on a directory."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from forebay.cli import run
from forebay.cli._door import DoorChoice
from forebay.cli._record_text import Formatter, delimiter, parse_place
from forebay.errors import UsageError
from forebay.formats.bytes_batch import BytesBatch
from forebay.formats.record_columns import record_batch

SECONDS_MAX = 120
Run = Callable[..., Any]


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "forebay.cli", *map(str, words)]


@dataclass(frozen=True, slots=True)
class Piped:
    """How a run ended, in bytes."""

    returncode: int
    stdout: bytes
    stderr: bytes


@pytest.fixture
def pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Piped]:
    """Run the command in this process with this on stdin: starting interpreters would be most of the time."""
    monkeypatch.chdir(tmp_path)

    def call(data: bytes, *words: object) -> Piped:
        streams = {name: io.TextIOWrapper(io.BytesIO()) for name in ("stdout", "stderr")}
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
            for name, stream in streams.items():
                patch.setattr(sys, name, stream)
            code = run([str(word) for word in words])
        found = []
        for stream in streams.values():
            stream.flush()
            found.append(stream.buffer.getvalue())
        return Piped(code, *found)

    return call


@pytest.fixture
def pipe_process(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[bytes]]:
    """Run the command as a process of its own with this on stdin."""

    def call(data: bytes, *words: object) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            command(*words), input=data, capture_output=True, cwd=tmp_path, timeout=SECONDS_MAX, check=False
        )

    return call


@pytest.fixture
def numbers(pipe: Run) -> None:
    """A topic `numbers` with the lines 1 to 9."""
    done = pipe(b"".join(b"%d\n" % number for number in range(1, 10)), "produce", "numbers", "--data", "data")
    assert done.returncode == 0, done.stderr


def test_lines_go_in_and_come_out_again(pipe_process: Run) -> None:
    pipe = pipe_process
    lines = b"alpha\n\nb\xc3\xa9ta\nlast without an end"
    sent = pipe(lines, "produce", "t", "--data", "data", "-o", "json")
    assert sent.returncode == 0, sent.stderr
    receipts = [json.loads(line) for line in sent.stdout.splitlines()]
    assert receipts[0] == {"topic": "t", "partition": 0, "start_offset": 1, "end_offset": 3, "count": 3}
    assert receipts[-1]["end_offset"] == 4
    assert sent.stderr == b""
    read = pipe(b"", "consume", "t", "-e", "--data", "data")
    assert (read.returncode, read.stdout, read.stderr) == (0, lines + b"\n", b"")


def test_bytes_that_are_no_text_pass_unchanged(pipe: Run) -> None:
    blob = bytes(range(256)).replace(b"\x00", b"") * 50
    assert pipe(blob + b"\0" + blob, "produce", "t", "-D", "\\0", "--data", "data").returncode == 0
    read = pipe(b"", "consume", "t", "-e", "-f", "%s\\0", "--data", "data")
    assert read.stdout == (blob + b"\0") * 2


def test_keys_are_parted_and_shown(pipe: Run) -> None:
    assert pipe(b"a::1\nplain\nb::2::3\n", "produce", "t", "-K", "::", "--data", "data").returncode == 0
    read = pipe(b"", "consume", "t", "-e", "-f", "%t/%p/%o %k %K %s %S%%\\n", "--data", "data")
    assert read.stdout == b"t/0/1 a 1 1 1%\nt/0/2  -1 plain 5%\nt/0/3 b 1 2::3 4%\n"


def test_what_consume_prints_as_json_produce_takes_as_json(pipe: Run) -> None:
    line = b'{"value": {"base64": "/v8="}, "key": "k", "timestamp_ms": 5, "headers": [["h", "1"]]}\n'
    assert pipe(line, "produce", "t", "-F", "json", "--data", "data").returncode == 0
    first = pipe(b"", "consume", "t", "-e", "-o", "json", "--data", "data").stdout
    assert pipe(first, "produce", "copy", "-F", "json", "--data", "data").returncode == 0
    second = pipe(b"", "consume", "copy", "-e", "-o", "json", "--data", "data").stdout
    assert json.loads(second) == json.loads(first) | {"topic": "copy"}
    assert json.loads(first)["value"] == {"base64": "/v8="}


def test_json_keeps_times_before_the_epoch_and_headers_of_the_same_name(pipe: Run) -> None:
    lines = [
        {"value": "a", "timestamp_ms": -1, "headers": [["h", "1"], ["h", "2"], ["none", None]]},
        {"value": "b", "timestamp_ms": 5},
    ]
    given = "".join(json.dumps(line) + "\n" for line in lines).encode()
    done = pipe(given, "produce", "t", "-F", "json", "--data", "data")
    assert done.returncode == 0, done.stderr
    read = pipe(b"", "consume", "t", "-e", "-o", "json", "--data", "data").stdout
    place = {"topic": "t", "partition": 0}
    assert [json.loads(line) for line in read.splitlines()] == [
        {**place, "offset": number, **line} for number, line in enumerate(lines, 1)
    ]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--from", "-2"), "8 9"),
        (("--from", "7"), "7 8 9"),
        (("--from", "3", "--to", "5"), "3 4"),
        (("--from", "latest"), ""),
        (("--from", "@2020-01-01T00:00:00Z", "--to", "-7"), "1 2"),
        (("--from", "@99999999999999"), ""),
        (("-c", "2"), "1 2"),
    ],
    ids=" ".join,
)
def test_places_are_where_they_say(
    forebay: Run, numbers: None, tmp_path: Path, words: tuple[str, ...], expected: str
) -> None:
    ran = forebay("consume", "numbers", "-e", *words, "--data", tmp_path / "data", "-f", "%s ")
    assert (ran.code, ran.out.strip()) == (0, expected)


def test_tail_gives_the_last_and_follows_until_the_count(pipe: Run, numbers: None, tmp_path: Path) -> None:
    following = subprocess.Popen(
        command("tail", "numbers", "-n", "1", "-c", "3", "--data", "data"),
        stdout=subprocess.PIPE,
        cwd=tmp_path,
    )
    assert following.stdout is not None
    with following:
        # A line arrives as it is written, not when a buffer is full.
        assert following.stdout.readline() == b"9\n"
        assert pipe(b"10\n11\n", "produce", "numbers", "--data", "data").returncode == 0
        assert following.stdout.read() == b"10\n11\n"
    assert following.returncode == 0


def test_a_group_goes_on_where_it_stopped(pipe: Run, numbers: None) -> None:
    group = ("consume", "numbers", "--group", "g", "--data", "data")
    assert pipe(b"", *group, "-c", "4").stdout == b"1\n2\n3\n4\n"
    assert pipe(b"", *group, "-c", "2").stdout == b"5\n6\n"
    assert pipe(b"", *group, "-e").stdout == b"7\n8\n9\n"


@pytest.mark.parametrize("size", [10, 100_000], ids=["while it waits", "while it writes"])
def test_a_reader_that_goes_away_ends_the_command_silently(numbers: None, tmp_path: Path, size: int) -> None:
    consuming = subprocess.Popen(
        command("consume", "numbers", "--data", "data", "-f", "%s" + "x" * size + "\\n"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
    )
    with consuming:
        assert consuming.stdout is not None and consuming.stderr is not None
        assert consuming.stdout.read(1) == b"1"
        consuming.stdout.close()
        assert consuming.stderr.read() == b""
    assert consuming.returncode == 141


def test_an_interrupted_consumer_ends_with_130_and_without_a_traceback(numbers: None, tmp_path: Path) -> None:
    consuming = subprocess.Popen(
        command("consume", "numbers", "--data", "data"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
    )
    with consuming:
        assert consuming.stdout is not None and consuming.stderr is not None
        for _ in range(9):
            consuming.stdout.readline()
        os.kill(consuming.pid, signal.SIGINT)
        assert b"Traceback" not in consuming.stderr.read()
    assert consuming.returncode == 130


def test_files_are_read_in_place_of_stdin(pipe: Run, tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(b"1\n2\n")
    (tmp_path / "two").write_bytes(b"3")
    assert pipe(b"not this\n", "produce", "t", "-l", "one", "-l", "two", "--data", "data").returncode == 0
    assert pipe(b"", "consume", "t", "-e", "--data", "data").stdout == b"1\n2\n3\n"


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("consume", "numbers", "--from", "yesterday"), "is no place"),
        (("consume", "numbers", "-f", "%y"), "'%y'"),
        (("consume", "numbers", "-f", "%s", "-o", "json"), "exclude each other"),
        (("consume", "numbers", "--group", "g", "-p", "0"), "whole topics"),
        (("consume", "numbers", "--group", "g", "--from", "5"), "--from 5 with --group"),
        (("produce", "numbers", "-F", "xml"), "no format of records"),
        (("produce", "numbers", "-F", "json", "-K", ":"), "exclude each other"),
        (("produce", "numbers", "-D", ""), "empty delimiter"),
        (("consume", "numbers", "--url", "http://127.0.0.1:1"), "excludes"),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, tuple) else "",
)
def test_wrong_usage_ends_with_2_and_says_what_is_wrong(
    forebay: Run, tmp_path: Path, words: tuple[str, ...], complaint: str
) -> None:
    (tmp_path / "data").mkdir()
    ran = forebay(*words, "--data", tmp_path / "data")
    assert ran.code == 2
    assert complaint in ran.err


def test_a_missing_topic_directory_or_broker_ends_the_command_with_a_hint(
    forebay: Run, numbers: None, tmp_path: Path
) -> None:
    assert forebay("consume", "nothing", "-e", "--data", tmp_path / "data").code == 1
    assert forebay("consume", "nothing", "-e", "--data", tmp_path / "elsewhere").code == 2
    assert forebay("consume", "nothing").code == 2


def test_a_broken_json_line_is_named_by_its_number(pipe: Run) -> None:
    done = pipe(b'{"value": "a"}\n{"valu": "b"}\n', "produce", "t", "-F", "json", "--data", "data")
    assert done.returncode == 2
    assert b"record 2 is no JSON record" in done.stderr


def test_the_command_line_silences_the_environment_as_a_whole() -> None:
    environment = {"FOREBAY_DATA": "d", "FOREBAY_URL": "http://b:1", "FOREBAY_TOKEN": "t"}
    assert DoorChoice.choose({"url": "http://a:1"}, environment).url == "http://a:1"
    by_data = DoorChoice.choose({"data": "here"}, environment)
    assert (by_data.url, str(by_data.deployment.data)) == (None, "here")
    from_environment = DoorChoice.choose({}, environment)
    assert (from_environment.url, from_environment.token) == ("http://b:1", "t")


def test_formats_take_every_field_and_escape() -> None:
    batch = record_batch(
        "t", 3, 7, BytesBatch.of([b"v\xff"], keys=[b"k"], headers=[{"a": b"1", "b": None}]), 99
    )
    assert Formatter("%t %p %o %T %k %K %s %S %h %%\\t\\x41\\0\\\\\\r\\n")(batch) == (
        b"t 3 7 99 k 1 v\xff 2 a=1,b= %\tA\0\\\r\n"
    )
    assert isinstance(batch, pa.RecordBatch)


@pytest.mark.parametrize("text", ["%", "%z", "\\q", "a\\"])
def test_formats_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        Formatter(text)


def test_delimiters_may_be_escapes_percent_signs_and_words() -> None:
    assert [delimiter(text) for text in ("\\n", "\\x1e", "%s", "END")] == [b"\n", b"\x1e", b"%s", b"END"]


@pytest.mark.parametrize("text", ["", "later", "--5", "@", "@noon", "1.5"])
def test_places_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_place(text)
