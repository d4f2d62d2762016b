"""A RabbitMQ for the tests: the one that is installed, else Debian's packages, unpacked into the cache.

Nothing is installed, no service is started and no rights are needed. Where the package lists of the machine
do not know RabbitMQ, as on a fresh container, apt fetches lists of its own into the cache; apt checks their
signatures and the checksums of the packages as it always does. The one thing to mend is Erlang's start
script, which has the place of its installation in it.

Several test workers may ask at once: a file lock lets one of them fetch, and a rename puts the finished tree
into its place.
"""

from __future__ import annotations

import fcntl
import os
import platform
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from forebay.testing.servers import ServerUnavailable, cache_directory

TIMEOUT_S = 600
ATTEMPTS = 3
WANTED = re.compile(r"erlang-|rabbitmq-server$")
"""What is taken of the packages that the server needs: libraries and the shell are on every machine."""
SERVER = Path("usr/lib/rabbitmq/bin/rabbitmq-server")
ERLANG = Path("usr/lib/erlang")
HINT = "apt-get install rabbitmq-server"


@dataclass(frozen=True, slots=True)
class RabbitPrograms:
    """Where the programs are."""

    server: Path
    erlang: Path
    """The directory with `erl` and `epmd`."""


def rabbit_programs() -> RabbitPrograms:
    """Find the programs, or fetch them. Raises `ServerUnavailable` with the reason."""
    found = _in(Path("/")) or _in(_place())
    if found is not None:
        return found
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise ServerUnavailable(f"no RabbitMQ on this machine, and no {tool} to fetch it", hint=HINT)
    place = _place()
    place.parent.mkdir(parents=True, exist_ok=True)
    with place.with_name(f".{place.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _in(place) or _fetch(place)


def _place() -> Path:
    release = platform.freedesktop_os_release()
    return cache_directory() / f"rabbitmq-{release.get('ID')}{release.get('VERSION_ID')}-{platform.machine()}"


def _in(root: Path) -> RabbitPrograms | None:
    found = RabbitPrograms(root / SERVER, root / ERLANG / "bin")
    return found if found.server.exists() and (found.erlang / "epmd").exists() else None


def _fetch(place: Path) -> RabbitPrograms:
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=".rabbitmq-") as work:
        tree, packages = Path(work) / "tree", Path(work) / "packages"
        packages.mkdir()
        try:
            _download([], packages)
        except ServerUnavailable:
            # The lists of the machine are not there, or so old that they name what is gone.
            options = _own_lists(Path(work))
            _run(["apt-get", *options, "update"])
            _download(options, packages)
        for package in sorted(packages.glob("*.deb")):
            _run(["dpkg-deb", "--extract", str(package), str(tree)])
        script = tree / ERLANG / "bin" / "erl"
        script.write_text(script.read_text().replace(f"=/{ERLANG}", f"={place / ERLANG}"))
        tree.rename(place)
    found = _in(place)
    if found is None:
        raise ServerUnavailable("the packages of RabbitMQ have no server in them", hint=HINT)
    return found


def _own_lists(work: Path) -> list[str]:
    """Options that make apt keep everything it writes below one directory."""
    for name in ("lists/partial", "archives/partial"):
        (work / name).mkdir(parents=True)
    return [
        *("-o", f"Dir::State::lists={work / 'lists'}", "-o", f"Dir::Cache={work}"),
        "-o",
        "APT::Sandbox::User=",
    ]


def _download(options: list[str], where: Path) -> None:
    """The packages of Erlang and RabbitMQ, whatever of them is installed already."""
    words = ["install", "--simulate", "--no-install-recommends", "-o", "Dir::State::status=/dev/null"]
    listed = _run(["apt-get", *options, *words, "rabbitmq-server"])
    names = [name for name in re.findall(r"^Inst (\S+)", listed, re.MULTILINE) if WANTED.match(name)]
    _run(["apt-get", *options, "download", *names], where=where)


def _run(command: list[str], where: Path | None = None) -> str:
    environment = os.environ | {"LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"}
    reason = ""
    for _ in range(ATTEMPTS):
        try:
            ran = subprocess.run(
                command,
                cwd=where,
                env=environment,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            reason = str(error)
            continue
        if ran.returncode == 0:
            return ran.stdout
        reason = ran.stderr.strip().splitlines()[-1] if ran.stderr.strip() else f"exit {ran.returncode}"
    raise ServerUnavailable(f"RabbitMQ cannot be fetched: {reason}", hint=HINT)
