"""A real RabbitMQ of its own for a test: loopback only, own ports, own data, own cookie, own epmd.

The server is Debian's package, installed or unpacked, started without its wrapper, which wants a service
manager. Everything it writes is below one directory. `rabbitmq-server` is a shell that waits for the Erlang
machine; the machine's id is in the pid file, and it is the one that is told to stop.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path
from typing import Self

from tests.stream.rabbit_packages import rabbit_programs

from forebay.testing._servers import guard
from forebay.testing._servers.ports import free_ports
from forebay.testing._servers.process import ServerProcess

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0
CONFIGURATION = """\
listeners.tcp.1 = 127.0.0.1:{amqp}
stream.listeners.tcp.1 = 127.0.0.1:{stream}
stream.advertised_host = 127.0.0.1
stream.advertised_port = {stream}
log.console = false
"""


class RabbitServer:
    """One broker with the stream plugin. Can be stopped and started again on its data."""

    def __init__(self, base: Path) -> None:
        programs = rabbit_programs()
        self._base = base
        amqp, self.port, dist, epmd = free_ports(4)
        for name in ("home", "mnesia", "log"):
            (base / name).mkdir(parents=True)
        (base / "rabbitmq.conf").write_text(CONFIGURATION.format(amqp=amqp, stream=self.port))
        (base / "enabled_plugins").write_text("[rabbitmq_stream].\n")
        self._pid_file = base / "rabbit.pid"
        environment = {
            "HOME": str(base / "home"),
            "PATH": f"{programs.erlang}:{os.environ['PATH']}",
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "ERL_EPMD_PORT": str(epmd),
            "RABBITMQ_NODENAME": "forebay-test@localhost",
            "RABBITMQ_DIST_PORT": str(dist),
            "RABBITMQ_CONFIG_FILE": str(base / "rabbitmq.conf"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(base / "enabled_plugins"),
            "RABBITMQ_CONF_ENV_FILE": "/dev/null",
            "RABBITMQ_MNESIA_BASE": str(base / "mnesia"),
            "RABBITMQ_LOG_BASE": str(base / "log"),
            "RABBITMQ_PID_FILE": str(self._pid_file),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1} +S 2:2",
        }
        command = [str(programs.erlang / "epmd"), "-address", "127.0.0.1", "-port", str(epmd)]
        self._epmd = ServerProcess("epmd", command, output=base / "epmd.out")
        self._server = ServerProcess(
            "RabbitMQ", [str(programs.server)], output=base / "server.out", environment=environment
        )
        self._epmd_port = epmd
        self._machine: int | None = None

    @property
    def streams(self) -> Path:
        """The directory with one directory per stream."""
        return self._base / "mnesia" / "forebay-test@localhost" / "stream"

    def start(self) -> None:
        """Start, and return when the stream port takes connections."""
        self._epmd.start(lambda: _answers(self._epmd_port), timeout_s=START_TIMEOUT_S)
        try:
            self._server.start(lambda: _answers(self.port), timeout_s=START_TIMEOUT_S)
        finally:
            if self._pid_file.exists():
                self._machine = int(self._pid_file.read_text())
                guard.watch(self._machine)

    def kill(self) -> None:
        """End the Erlang machine at once, as a crash does."""
        self.stop(signal.SIGKILL)
        self._pid_file.unlink(missing_ok=True)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Tell the Erlang machine to stop, and wait until it is gone."""
        machine, self._machine = self._machine, None
        if machine is None:
            self._server.stop()
            return
        _signal(machine, number)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while _lives(machine):
            if time.monotonic() > deadline:
                _signal(machine, signal.SIGKILL)
            time.sleep(0.05)
        guard.forget(machine)
        self._server.stop()

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._epmd.stop()


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _lives(pid: int) -> bool:
    """Whether the process runs; one that has ended and waits for its parent does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
