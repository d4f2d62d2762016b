"""What is wrong with a file is said all at once, each with its line."""

from __future__ import annotations

import json
import logging
import socket
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.dataflow.flow_files import GOOD, changed, line_of, pipeline

from forebay.cli._app import run
from forebay.cli.dataflow import OneLine
from forebay.dataflow import FILE_BYTES_MAX, DataflowInvalid, Problem, check, load
from forebay.dataflow._settings import OtlpExporterSettings, OtlpReceiverSettings, PersistenceSettings


def only(data: bytes) -> Problem:
    problems, _ = check(data)
    assert len(problems) == 1, [str(each) for each in problems]
    return problems[0]


def test_the_design_file_means_what_it_says() -> None:
    plan = load(GOOD.encode())
    assert list(plan.nodes) == ["otlp_receiver", "persistence", "parquet", "otlp_exporter"]
    receiver = plan.nodes["otlp_receiver"].settings
    assert isinstance(receiver, OtlpReceiverSettings)
    assert (str(receiver.grpc), str(receiver.http), receiver.requests_max) == (
        "127.0.0.1:4317",
        "127.0.0.1:4318",
        256,
    )
    persistence = plan.nodes["persistence"]
    assert isinstance(persistence.settings, PersistenceSettings)
    quiver = persistence.settings.quiver
    assert (quiver.segment_bytes, quiver.wal_bytes_max, quiver.flush_interval_ms) == (
        32_000_000,
        4_000_000_000,
        25,
    )
    assert (quiver.retain_ms, quiver.size_cap_bytes, quiver.size_cap_policy) == (
        72 * 3_600_000,
        500_000_000_000,
        "drop_oldest",
    )
    assert persistence.destinations == ("parquet", "otlp_exporter")
    exporter = plan.nodes["otlp_exporter"].settings
    assert isinstance(exporter, OtlpExporterSettings)
    assert (exporter.target, exporter.compression, exporter.timeout_ms) == ("127.0.0.1:4320", "gzip", 15_000)
    assert plan.remarks == ()


def test_keys_with_dots_mean_the_nested_ones() -> None:
    data = changed("        size_cap_policy: drop_oldest\n", "      retention.size_cap_policy: drop_oldest\n")
    settings_ = load(data).nodes["persistence"].settings
    assert isinstance(settings_, PersistenceSettings)
    assert settings_.quiver.size_cap_policy == "drop_oldest"
    both = changed(
        "        size_cap_policy: drop_oldest\n",
        "        size_cap_policy: drop_oldest\n      retention.size_cap_policy: drop_oldest\n",
    )
    assert "with dots and nested" in only(both).message


def test_without_an_address_the_receiver_is_on_the_usual_one_of_this_machine() -> None:
    text = changed('      listening_addr: "127.0.0.1:4317"\n', "")
    text = changed('      http_listening_addr: "127.0.0.1:4318"\n', "", text.decode())
    receiver = load(text).nodes["otlp_receiver"].settings
    assert isinstance(receiver, OtlpReceiverSettings)
    assert (str(receiver.grpc), receiver.http) == ("127.0.0.1:4317", None)


MISTAKES = {
    "unknown key": ("flush_interval: 25ms", "flush_intervall: 25ms", "flush_intervall", "unknown key"),
    "unknown key of a node": ("config:\n      path: ./parquet", "cofig: {path: a}", "cofig", "unknown key"),
    "unknown top key": ("nodes:\n", "nods: 1\nnodes:\n", "nods", "unknown key"),
    "unknown urn": ("urn:otel:parquet:exporter", "urn:otel:parket:exporter", "urn:otel:parket", "no plugin"),
    "wrong kind": ("kind: processor", "kind: exporter", "kind: exporter", "of kind processor"),
    "unknown kind": ("kind: processor", "kind: processer", "processer", "not known"),
    "dangling port": ("- otlp_exporter", "- otlp_exporta", "- otlp_exporta", "there is no node"),
    "port to a receiver": ("- otlp_exporter", "- otlp_receiver", "- otlp_receiver", "takes nothing in"),
    "destination twice": (
        "- otlp_exporter",
        "- otlp_exporter\n          - parquet",
        "- parquet\n        d",
        "twice",
    ),
    "unknown port": (
        "broadcast\n",
        "broadcast\n      other: {}\n",
        "other",
        "unknown key",
    ),
    "wrong size": ("32MB", "32 megabytes", "32 mega", "not a size"),
    "size without meaning": ("4GB", "-4GB", "-4GB", "not a size"),
    "size out of range": ("32MB", "2GiB", "2GiB", "out of range"),
    "wrong duration": ("25ms", "25", "flush_interval", "no unit"),
    "duration out of range": ("25ms", "2h", "2h", "out of range"),
    "wrong number": ("72", "three days", "three days", "whole number"),
    "wrong policy": ("drop_oldest", "drop_newest", "drop_newest", "not known"),
    "wrong strategy": ("broadcast", "random", "random", "not known"),
    "cap too small": ("500GB", "1GB", "size_cap: 1GB", "two segments"),
    "wrong address": ("127.0.0.1:4317", "4317", "listening_addr", "not an address"),
    "wrong endpoint": (
        "http://127.0.0.1:4320",
        "http://{{backend}}:1235",
        "grpc_endpoint",
        "not an endpoint",
    ),
    "endpoint with a password": (
        "http://127.0.0.1:4320",
        "http://a:b@h:1",
        "grpc_endpoint",
        "not an endpoint",
    ),
    "endpoint with a query": (
        "http://127.0.0.1:4320",
        "http://h:1?tenant=a",
        "grpc_endpoint",
        "not an endpoint",
    ),
    "endpoint with port 0": (
        "http://127.0.0.1:4320",
        "http://127.0.0.1:0",
        "grpc_endpoint",
        "not an endpoint",
    ),
    "header of bytes": (
        "timeout",
        "headers: {token-bin: a}\n      timeout",
        "token-bin",
        "gRPC takes no text",
    ),
    "header of grpc": ("timeout", "headers: {grpc-timeout: 1S}\n      timeout", "grpc-timeout", "no text"),
    "half a letter": ("path: ./parquet", 'path: "a\\ud800"', 'path: "a', "half a letter"),
    "merge key": ("path: ./parquet", "<<: {path: ./parquet}", "<<", "not merged"),
    "mapping for a name": ("- otlp_exporter", "- {a: b}", "- {a: b}", "not the name of a node"),
    "control character": ("# requests", "# \x07", "\x07", "0x07 is not allowed"),
    "files in the store": (
        "path: ./parquet",
        "path: quiver_data/",
        "path: quiver_data/",
        "used by persistence",
    ),
    "codec that grpc lacks": ("gzip", "zstd", "compression_method", "not known"),
    "key twice": ("path: ./parquet", "path: ./parquet\n      path: ./other", "path: ./other", "comes twice"),
    "tag": ("path: ./parquet", "path: !!python/name:os.system x", "path: !!python", "tag"),
    "list for a value": ("path: ./parquet", "path: [a]", "path: [a]", "single value"),
    "text for a mapping": (
        "segment:\n        target_size: 32MB",
        "segment: 32MB",
        "segment: 32MB",
        "mapping",
    ),
    "address twice": ("127.0.0.1:4318", "127.0.0.1:4317", "http_listening_addr", "used by otlp_receiver"),
    "missing setting": (
        "      path: ./parquet",
        "      compression: zstd",
        "compression: zstd",
        "path is missing",
    ),
    "not yaml": ("path: ./parquet", "path: [a", "timeout", "not YAML"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_every_mistake_has_its_line(name: str) -> None:
    old, new, piece, message = MISTAKES[name]
    data = changed(old, new)
    problems, _ = check(data)
    found = [each for each in problems if message in each.message]
    assert found, [str(each) for each in problems]
    if name != "not yaml":
        assert found[0].line == line_of(data, piece)
    # Nothing else is wrong, but for what follows from the mistake itself.
    related = ("no port leads", "path is missing", "no node", "is missing", "without out_ports")
    rest = [
        each for each in problems if each not in found and not any(part in each.message for part in related)
    ]
    assert not rest, [str(each) for each in rest]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (GOOD[GOOD.index("parquet:\n    kind") : GOOD.index("  otlp_exporter:\n")], "parquet: [a]\n"),
        (GOOD[GOOD.index("parquet:\n    kind") : GOOD.index("  otlp_exporter:\n")], "parquet: a\n"),
        ("config:\n      path: ./parquet", "config: [a]"),
    ],
)
def test_one_mistake_has_one_message(old: str, new: str) -> None:
    problems, _ = check(changed(old, new))
    assert len(problems) == 1, [str(each) for each in problems]


def test_no_message_comes_twice() -> None:
    old, new = (
        "    config:\n      path: ./parquet",
        "    config: {path: ./quiver_data}\n    config.path: ./other",
    )
    problems, _ = check(changed(old, new))
    assert ["used by persistence" in each.message for each in problems] == [True, False]


def test_names_of_hosts_may_have_underscores() -> None:
    # As those of containers often have.
    plan = load(changed("http://127.0.0.1:4320", "http://otel_collector:4317"))
    assert plan.nodes["otlp_exporter"].settings.target == "otel_collector:4317"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("endpoint", "target", "remarks"),
    [
        ("https://telemetry.example", "telemetry.example:443", 0),
        ("https://telemetry.example:4317", "telemetry.example:4317", 0),
        ("https://[::1]/", "[::1]:443", 0),
        ("http://collector", "collector:4317", 1),
    ],
)
def test_an_endpoint_without_a_port_has_that_of_other_clients(
    endpoint: str, target: str, remarks: int
) -> None:
    plan = load(changed("http://127.0.0.1:4320", endpoint))
    assert plan.nodes["otlp_exporter"].settings.target == target  # type: ignore[union-attr]
    found = [each for each in plan.remarks if "4317 is meant" in each.message]
    assert len(found) == remarks


def test_all_mistakes_are_reported_at_once_in_order() -> None:
    data = changed("32MB", "32M").decode()
    data = changed("25ms", "soon", data).decode()
    data = changed("- parquet", "- parkett", data).decode()
    problems, _ = check(data.encode())
    assert [each.line for each in problems] == sorted(each.line for each in problems)
    assert len(problems) == 4  # the three, and that nothing leads to parquet any more
    with pytest.raises(DataflowInvalid) as caught:
        load(data.encode())
    assert caught.value.problems == problems


@pytest.mark.parametrize(
    ("grpc", "http", "is_taken"),
    [
        ("0.0.0.0:4317", "127.0.0.1:4317", True),
        ("localhost:4317", "0.0.0.0:4317", True),
        ("0.0.0.0:4317", "127.0.0.1:4318", False),
        ("0.0.0.0:0", "127.0.0.1:0", False),
        ("127.0.0.1:4317", "127.0.0.2:4317", False),
        ("127.0.0.1:4317", "[::]:4317", False),
    ],
)
def test_an_address_inside_of_another_is_taken(grpc: str, http: str, is_taken: bool) -> None:
    text = changed("127.0.0.1:4318", http).decode().replace('"127.0.0.1:4317"', f'"{grpc}"', 1)
    assert ["is used by otlp_receiver" in each.message for each in check(text.encode())[0]] == [
        True
    ] * is_taken


def test_a_circle_is_shown_from_node_to_node() -> None:
    text = GOOD.replace("    kind: exporter\n    plugin_urn: \"urn:otel:parquet:exporter\"\n", """\
    kind: processor
    plugin_urn: "urn:otap:processor:persistence"
    out_ports: {out_port: {destinations: [persistence]}}
""")  # fmt: skip
    problem = only(text.encode())
    assert "parquet -> persistence -> parquet" in problem.message
    assert problem.hint


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_an_exporter_to_the_receiver_it_gets_its_data_from_is_a_circle(host: str) -> None:
    problem = only(changed("http://127.0.0.1:4320", f"http://{host}:4317"))
    assert (problem.where, "circle" in problem.message) == ("nodes.otlp_exporter.config.grpc_endpoint", True)


def test_a_circle_over_two_receivers_is_one() -> None:
    other = """\
  second_receiver:
    kind: receiver
    plugin_urn: "urn:otel:otlp:receiver"
    out_ports: {out_port: {destinations: [second_exporter]}}
    config: {listening_addr: "127.0.0.1:4320"}
  second_exporter:
    kind: exporter
    plugin_urn: "urn:otel:otlp:exporter"
    config: {grpc_endpoint: "http://localhost:4317"}
"""
    problem = only((GOOD + other).encode())
    assert (problem.where, "circle" in problem.message) == (
        "nodes.second_exporter.config.grpc_endpoint",
        True,
    )


def test_an_exporter_to_a_receiver_of_another_way_is_none() -> None:
    other = """\
  second_receiver:
    kind: receiver
    plugin_urn: "urn:otel:otlp:receiver"
    out_ports: {out_port: {destinations: [parquet]}}
    config: {listening_addr: "127.0.0.1:4320"}
"""
    assert not check((GOOD + other).encode())[0]


def test_an_exporter_to_a_receiver_of_another_protocol_is_remarked_on() -> None:
    problems, remarks = check(changed("http://127.0.0.1:4320", "http://localhost:4318"))
    assert not problems
    assert "does not take OTLP over gRPC" in remarks[-1].message


def test_files_for_tls_are_tried_before_anything_runs(tmp_path: Path) -> None:
    bad = tmp_path / "bad.pem"
    bad.write_text("this is no PEM")
    tls = f"      tls: {{cert_file: {bad}, key_file: {bad}, client_ca_file: {bad}}}\n"
    text = changed("      response_stream", tls + "      response_stream").decode()
    text = text.replace("http://127.0.0.1:4320", f'https://127.0.0.1:4320"\n      ca_file: "{bad}')
    problems, _ = check(text.encode())
    assert [(each.where.rpartition(".")[2], each.message.partition(":")[0]) for each in problems] == [
        ("cert_file", "certificate and key cannot be used"),
        ("client_ca_file", "no certificates in it"),
        ("ca_file", "no certificates in it"),
    ]
    bad.unlink()
    problems, _ = check(text.encode())
    assert ["is not a file" in each.message for each in problems] == [True] * 4


def test_a_password_in_an_endpoint_is_not_repeated() -> None:
    assert "secret" not in str(only(changed("http://127.0.0.1:4320", "http://me:secret@127.0.0.1:4320")))


def test_two_stores_in_one_directory_are_refused() -> None:
    text = GOOD.replace("    kind: exporter\n    plugin_urn: \"urn:otel:parquet:exporter\"\n", """\
    kind: processor
    plugin_urn: "urn:otap:processor:persistence"
    out_ports: {out_port: {destinations: [otlp_exporter]}}
""").replace("./parquet", "./quiver_data")  # fmt: skip
    assert "used by persistence already" in only(text.encode()).message


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("          - persistence\n", "", "leads nowhere"),
        ("    out_ports:\n      out_port:\n        destinations:\n          - persistence\n"
         "        dispatch_strategy: round_robin\n", "", "without out_ports leads nowhere"),
        ("  parquet:\n", "  parquet:\n    out_ports: {out_port: {destinations: [otlp_exporter]}}\n",
         "an exporter has no ports"),
    ],
)  # fmt: skip
def test_ports_must_lead_somewhere(old: str, new: str, message: str) -> None:
    problems, _ = check(changed(old, new))
    assert any(message in each.message for each in problems), [str(each) for each in problems]


def test_taking_turns_behind_a_store_is_remarked_on_but_allowed() -> None:
    data = changed("broadcast", "round_robin")
    problems, remarks = check(data)
    assert not problems
    assert [each.line for each in remarks] == [line_of(data, "otlp_exporter\n        dispatch") + 1]
    assert load(data).remarks == tuple(remarks)


def test_a_store_that_is_too_small_for_the_largest_requests_is_remarked_on() -> None:
    text = changed("500GB", "80MB").replace(b"4GB", b"8MB")
    assert not check(text)[1]
    problems, remarks = check(
        text.replace(b"      response", b"      max_request_size: 64MiB\n      response")
    )
    assert not problems
    assert "largest requests of otlp_receiver" in remarks[-1].message
    assert remarks[-1].line == line_of(text, "size_cap: 80MB") + 1


def test_a_file_per_request_is_remarked_on() -> None:
    data = changed("          - persistence\n", "          - persistence\n          - parquet\n")
    problems, remarks = check(data)
    assert not problems
    assert [each.line for each in remarks] == [line_of(data, "- parquet")]


def test_the_documented_file_is_right_and_the_page_shows_it() -> None:
    docs = Path(__file__).parents[2] / "docs"
    text = (docs / "dataflow.yaml").read_text()
    assert load(text.encode()).remarks == ()
    assert f"```yaml\n{text}```" in (docs / "dataflow.md").read_text()


@pytest.mark.parametrize(
    "data", [b"", b"# nothing\n", b"nodes:\n", b"nodes: {}\n", b"nodes: [a]\n", b"text", b"- a"]
)
def test_a_file_without_nodes_says_so(data: bytes) -> None:
    assert only(data).line == 1


# Hostile files.


def test_keys_at_the_top_are_named_without_a_dot() -> None:
    assert only(b"more: 1\n" + GOOD.encode()).where == "more"


def test_a_file_that_is_too_long_is_not_read() -> None:
    assert "bytes" in only(b"#" * (FILE_BYTES_MAX + 1)).message


def test_deep_nesting_ends_at_its_limit() -> None:
    assert "too deeply" in only(b"nodes: " + b"[" * 100_000).message
    assert "too deeply" in only(b"nodes: " + b"{a: " * 20_000).message


def test_a_billion_laughs_are_not_unfolded() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 20)]
    assert "aliases unfold" in only("\n".join(lines).encode()).message


def test_a_value_that_contains_itself_ends() -> None:
    assert "aliases unfold" in only(b"nodes: &a\n  x: *a\n").message


def test_many_values_end_at_their_limit() -> None:
    assert "too many values" in only(b"nodes: [" + b"1," * 50_000 + b"]").message


def test_bytes_that_are_no_text_have_a_line() -> None:
    problem = only(b"nodes:\n  a: \xff\xfe\n")
    assert (problem.line, "UTF-8" in problem.message) == (2, True)


@pytest.mark.parametrize("data", [b"", b"~", b"null", b"&A", b"--- # nothing"])
def test_a_file_that_says_nothing_has_no_nodes(data: bytes) -> None:
    assert only(data).message


@given(st.binary(max_size=300))
def test_any_bytes_give_an_answer(data: bytes) -> None:
    problems, _ = check(data)
    assert problems


@settings(max_examples=150)
@given(st.data())
def test_a_damaged_file_gives_an_answer_with_places_inside_it(data: st.DataObject) -> None:
    text = GOOD.encode()
    begin = data.draw(st.integers(0, len(text) - 1))
    end = data.draw(st.integers(begin, min(len(text), begin + 40)))
    filling = data.draw(
        st.sampled_from([b"", b": ", b"- ", b"{", b"]", b"\n", b"&a ", b"*a", b'"', b"\0", b"%", b"?"])
    )
    damaged = text[:begin] + filling + text[end:]
    problems, remarks = check(damaged)
    for each in problems + remarks:
        assert 1 <= each.line <= damaged.count(b"\n") + 2
        assert each.column >= 1


# The command.


def test_the_command_prints_file_line_and_column(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "flow.yaml"
    path.write_bytes(changed("25ms", "25"))
    assert run(["dataflow", "check", str(path)]) == 1
    line = line_of(path.read_bytes(), "flush_interval")
    assert f"{path}:{line}:25: error: nodes.persistence.config.wal.flush_interval" in capsys.readouterr().out


def test_the_command_does_not_make_a_long_file_shorter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "flow.yaml"
    path.write_bytes(b"#" * 3 * FILE_BYTES_MAX)
    assert run(["dataflow", "check", str(path)]) == 1
    assert f"the file has more than {FILE_BYTES_MAX:,} bytes" in capsys.readouterr().out


def test_the_command_has_a_document_for_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "flow.yaml"
    path.write_bytes(changed("25ms", "25"))
    assert run(["dataflow", "check", str(path), "--output", "json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] is False
    assert answer["problems"][0]["line"] == line_of(path.read_bytes(), "flush_interval")
    path.write_text(GOOD)
    assert run(["dataflow", "check", str(path), "--output", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"ok": True, "problems": [], "remarks": []}


def test_a_file_that_is_not_there_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["dataflow", "check", str(tmp_path / "none.yaml")]) == 1
    assert "does not exist" in capsys.readouterr().err
    assert run(["dataflow", "check", str(tmp_path)]) == 2
    assert "is a directory" in capsys.readouterr().err


def test_a_wrong_file_is_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "flow.yaml"
    path.write_bytes(changed("25ms", "25"))
    assert run(["dataflow", "run", str(path)]) == 1
    line = line_of(path.read_bytes(), "flush_interval")
    assert f"{path}:{line}:25: error: nodes.persistence" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [path]


def test_an_address_that_is_taken_ends_the_run_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "flow.yaml"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        data = pipeline(tmp_path, parquet=True).decode()
        path.write_text(
            data.replace("http_listening_addr: 127.0.0.1:0", f"http_listening_addr: 127.0.0.1:{port}")
        )
        assert run(["dataflow", "run", str(path)]) == 1
    assert f"127.0.0.1:{port}" in capsys.readouterr().err


def test_run_raises_the_limit_on_open_files_before_it_listens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[object] = []

    async def serve(*_: object) -> None:
        done.append("served")

    monkeypatch.setattr("forebay.broker.connections_that_fit", done.append)
    monkeypatch.setattr("forebay.cli.dataflow._serve", serve)
    path = tmp_path / "flow.yaml"
    path.write_bytes(pipeline(tmp_path, parquet=True))
    assert run(["dataflow", "run", str(path)]) == 0
    assert done == [16_384, "served"]


def test_what_others_say_stays_in_its_line_of_the_log() -> None:
    said = "busy\n2026-11-17 ERROR all is lost\x1b[2J"
    record = logging.LogRecord("x", logging.WARNING, "x", 1, "failed: %s", (said,), None)
    line = OneLine("%(levelname)s %(message)s").format(record)
    assert line == "WARNING failed: busy\\n2026-11-17 ERROR all is lost\\x1b[2J"
