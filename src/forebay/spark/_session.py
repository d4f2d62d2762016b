"""A Spark session in one line: quiet, on this machine only, and set up for Python data sources.

What is set, and why:

* The workers run this very Python (`PYSPARK_PYTHON`). Spark would take `python3` from the PATH, which knows
  nothing of the packages of a virtual environment.
* Spark puts a zip of itself in front of the workers' path, and Python keeps no bytecode of what it imports
  from a zip: every process compiles PySpark anew, a second of work before its first row. The workers are
  therefore started by a script that takes it off the path; the installed PySpark is the same.
* The process that Spark starts for every streaming query looks for garbage less often while it loads, and
  numpy starts no threads in it for matrices that nobody multiplies there; they would wait for them awake.
* Where no bytecode is to be written beside the sources (`PYTHONDONTWRITEBYTECODE`), workers keep it in the
  cache: a streaming query starts a new process and would compile half a second's worth of sources.
* Java's Arrow does not check the bounds of every single value again: what it reads comes from Arrow's own
  writer in a worker of this session, and the checks cost more than the copying.
* Everything listens on the loopback address, and the web page of the driver is off: no port is open to
  others.
* JVM and Python talk through Unix domain sockets, which costs about a tenth less than loopback.
* As many shuffle partitions as cores; Spark's 200 are for a cluster.
* A failed task is tried three times, as on a cluster. Plain local mode gives up at the first killed worker.
* PySpark prints an error of a query, as JSON with the stack of the JVM, before it raises it. Here it is only
  raised: a misspelt column is one exception.
* Spark's log is at level error. What the JVM prints before it has read its log settings goes into a file,
  whose end is shown where the start fails.

All of it yields to the caller: `session(**{"spark.ui.enabled": "true"})`, or with underscores for dots where
a name is one word per dot: `session(spark_driver_memory="4g")`.

The same job runs elsewhere unchanged. Under `spark-submit` what was submitted stands, and only what it leaves
open is set. With a master that is no local one nothing is bound to the loopback address, and workers are
started by this Python's own path, which the other machines are to have. With `SPARK_REMOTE` or `spark.remote`
it is a client of Spark Connect, which needs no Java here. A package that was shipped as a zip (`--py-files`)
is put on the path of the process that runs streaming sources, which Spark forgets.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shlex
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

from forebay.errors import Unavailable, Unsupported, UsageError
from forebay.spark._java import Java, cache_directory, find_java
from forebay.spark._reaching import check_connect_server, check_masters

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["session"]

TASK_ATTEMPTS: Final = 3
"""Attempts of a task in local mode before the job fails."""
LOOPBACK: Final = "127.0.0.1"
DRIVER_MEMORY_MIN: Final = 1 << 30
DRIVER_MEMORY_MAX: Final = 4 << 30
"""The driver gets a quarter of the machine's memory, within these bounds."""
ARCHIVE_SETTLED_S: Final = 120
"""Age at which a class archive counts as written to its end; a torn one is refused by the JVM itself."""
QUERY_LOGGERS: Final = ("DataFrameQueryContextLogger", "SQLQueryContextLogger")
"""What prints errors of queries that are raised anyway."""
LOG_TAIL_CHARS: Final = 2000
"""How much of Spark's own output an error shows."""

LOG_SETTINGS: Final = """rootLogger.level = error
rootLogger.appenderRef.console.ref = console
appender.console.type = Console
appender.console.name = console
appender.console.target = SYSTEM_ERR
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{HH:mm:ss} %p %c{1}: %m%n%ex
"""

ARROW_FLAGS: Final = ("-Darrow.enable_unsafe_memory_access=true", "-Darrow.enable_null_check_for_get=false")
"""Java's Arrow checks bounds, reference count and null again for every value of every column."""

WORKER_PYTHON: Final = """#!/bin/sh
# Starts a worker of Spark with the installed PySpark instead of the zip of it.
kept=
IFS=:
for part in $PYTHONPATH; do
  case "$part" in
    */pyspark.zip | */py4j-*-src.zip | */spark-core_*.jar) ;;
    *) kept="$kept:$part" ;;
  esac
done
PYTHONPATH="${{kept#:}}"
# Objects of a few megabytes come and go: reuse their pages instead of giving them back each time.
: "${{MALLOC_MMAP_THRESHOLD_:=134217728}}" "${{MALLOC_TRIM_THRESHOLD_:=268435456}}"
export PYTHONPATH MALLOC_MMAP_THRESHOLD_ MALLOC_TRIM_THRESHOLD_
if [ -n "$PYTHONDONTWRITEBYTECODE" ] && [ -z "$PYTHONPYCACHEPREFIX" ]; then
  # No bytecode beside the sources is wanted: it is kept apart, for every query starts new processes.
  unset PYTHONDONTWRITEBYTECODE
  export PYTHONPYCACHEPREFIX={bytecode}
fi
if [ "$1 $2" = "-m {runner}" ]; then
  export OPENBLAS_NUM_THREADS="${{OPENBLAS_NUM_THREADS:-${{OMP_NUM_THREADS:-1}}}}"
  exec {python} -c {start} "$2"
fi
exec {python} "$@"
"""
SOURCE_RUNNER: Final = "pyspark.sql.streaming.python_streaming_source_runner"
"""The module that Spark starts, in a process of its own, for every query that reads a Python source."""
START_RUNNER: Final = """import gc, runpy, sys
gc.set_threshold(200_000, 20, 20)
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)"""
"""What it runs as. It loads half a second's worth of modules, and a fifth of that would be spent on looking
through them for garbage, again and again; what it does afterwards makes next to none."""


def session(
    app: str = "forebay", cores: int | None = None, *, fast_start: bool = False, **conf: object
) -> SparkSession:
    """The session of this process, started where there is none: local, on `cores` cores (None: all).

    `fast_start` starts in half the time and computes at half the speed: for tests and tiny jobs. Further
    settings are Spark's own; `spark_master` and `spark_remote` among them lead to a cluster. Raises
    `Unsupported` where PySpark or Java is missing, `Unavailable` where the JVM did not come up, or nobody
    answers where the cluster should be.
    """
    if cores is not None and (type(cores) is not int or cores < 1):
        raise UsageError(f"cores is {cores!r}", hint="a number from 1 on, or None for all of the machine")
    try:
        from pyspark.logger import PySparkLogger
        from pyspark.sql import SparkSession
        from pyspark.sql.utils import is_remote
    except ImportError as error:
        raise _not_imported(error) from error
    warnings.filterwarnings("ignore", "PySpark does not yet fully support pandas", FutureWarning)
    chosen = {_setting(name): _value(value) for name, value in conf.items()}
    remote = _remote(chosen)
    if not _is_running():
        chosen = _prepared(chosen, remote, cores, fast_start)
        for name in QUERY_LOGGERS:
            PySparkLogger.getLogger(name).setLevel(logging.CRITICAL)
    builder = SparkSession.builder.appName(app)
    if remote:
        builder = builder.remote(remote)
    for name, value in chosen.items():
        builder = builder.config(name, value)
    with _quiet() as output:
        try:
            spark = builder.getOrCreate()
        except Exception as error:
            raise _not_started(error, output, chosen.get("spark.master", "")) from error
    if not is_remote():  # `SPARK_API_MODE` makes any session one of Spark Connect.
        _ship(spark)
        _tell_slots(spark)
    _register(spark)
    return spark


def _not_imported(error: ImportError) -> Unsupported:
    """It may be there, and something that it needs may not, or be hidden by a file of the same name."""
    if error.name == "pyspark":
        return Unsupported("PySpark is not installed", hint="pip install 'forebay[spark]'")
    return Unsupported(
        f"PySpark cannot be imported: {error}",
        hint="is a file beside the job named like a module (queue.py)? If not: pip install 'forebay[spark]'",
    )


def _prepared(chosen: dict[str, str], remote: str, cores: int | None, fast_start: bool) -> dict[str, str]:
    """The settings of a session that is to be started, and the environment made ready for it."""
    if remote and not remote.startswith("local"):
        check_connect_server(remote)
        return chosen
    submitted = _submitted()
    master = chosen.get("spark.master") or submitted.get("spark.master", "local")
    check_masters(master)
    try:
        java = find_java()
        _prepare_environment(java, is_local=master.startswith("local"))
        if remote:
            return chosen
        return _settings(cores, java, fast_start, master) | submitted | chosen
    except OSError as error:
        raise UsageError(
            f"the cache in {cache_directory()} cannot be written: {error.strerror}",
            hint="FOREBAY_CACHE_DIR names another directory",
        ) from error


def _remote(chosen: dict[str, str]) -> str:
    """The server of Spark Connect that is to be used, taken out of what was chosen; empty where there is
    none. Spark refuses to be given a master as well: what the caller says stands."""
    if "spark.master" in chosen and "spark.remote" not in chosen:
        os.environ.pop("SPARK_REMOTE", None)
    return chosen.pop("spark.remote", os.environ.get("SPARK_REMOTE", ""))


def _is_running() -> bool:
    """Whether this process has a session. Spark knows an active one by thread: in another thread there is
    none, and starting one there would only set what the caller has set to what we set."""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    return SparkContext._active_spark_context is not None or SparkSession.getActiveSession() is not None


def _submitted() -> dict[str, str]:
    """What `spark-submit` was given, where it has started this process."""
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        return {}
    from pyspark import SparkConf, SparkContext

    SparkContext._ensure_initialized()  # The JVM is there; it knows.
    return {name: value for name, value in SparkConf().getAll() if name != "spark.app.name"}


def _ship(spark: SparkSession) -> None:
    """Where this package was imported from a zip, put it on the path of all processes of Spark's."""
    import forebay

    for folder in Path(forebay.__file__).parents:
        if folder.suffix in (".zip", ".egg", ".whl") and folder.is_file():
            environment = spark.sparkContext.environment
            kept = [each for each in environment.get("PYTHONPATH", "").split(os.pathsep) if each]
            environment["PYTHONPATH"] = os.pathsep.join([str(folder), *kept])


def _tell_slots(spark: SparkSession) -> None:
    """What plans a query is told how many tasks run at once. On a cluster that changes while it runs."""
    from forebay.spark._worker import SLOTS_VARIABLE

    context = spark.sparkContext
    if f"{context.master}[".startswith("local["):  # Not `local-cluster`.
        context.environment[SLOTS_VARIABLE] = str(context.defaultParallelism)


def _register(spark: SparkSession) -> None:
    from forebay.spark._source import ForebaySource

    spark.dataSource.register(ForebaySource)


def _setting(name: str) -> str:
    """Spark ignores a setting that it does not know: `master=` would quietly stay on this machine."""
    setting = name if "." in name else name.replace("_", ".")
    if "." not in setting:
        raise UsageError(
            f"Spark has no setting {name!r}", hint=f"its settings begin with spark: spark_{name}=..."
        )
    return setting


def _value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _prepare_environment(java: Java, *, is_local: bool) -> None:
    """What the JVM and the workers inherit. What the caller has set stays, but for a Java that is too old."""
    os.environ["JAVA_HOME"] = str(java.home)
    # Other machines have this Python at most, and not the script of this machine's cache.
    os.environ.setdefault("PYSPARK_PYTHON", str(_worker_python()) if is_local else sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    if is_local:
        os.environ.setdefault("SPARK_LOCAL_IP", LOOPBACK)
    # Spark's own start-up touches what pandas 3 deprecates, once in every worker.
    os.environ.setdefault("PYTHONWARNINGS", "ignore::FutureWarning")
    if "SPARK_CONF_DIR" not in os.environ:
        # Empty: it is on the class path, and a class archive allows no directory there that holds anything.
        folder = cache_directory() / "empty-conf"
        folder.mkdir(parents=True, exist_ok=True)
        os.environ["SPARK_CONF_DIR"] = str(folder)


def _worker_python(executable: str = sys.executable) -> Path:
    """A script that starts this very Python without Spark's zips and jars on its path."""
    digest = hashlib.sha256(executable.encode()).hexdigest()[:12]
    script = cache_directory() / f"python-{digest}"
    python, bytecode = shlex.quote(executable), shlex.quote(str(cache_directory() / "bytecode"))
    text = WORKER_PYTHON.format(
        python=python, bytecode=bytecode, runner=SOURCE_RUNNER, start=shlex.quote(START_RUNNER)
    )
    _write_once(script, text, mode=0o755)
    return script


def _write_once(path: Path, text: str, mode: int = 0o644) -> None:
    if path.exists() and path.read_text() == text:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text(text)
    draft.chmod(mode)
    draft.replace(path)


def _settings(cores: int | None, java: Java, fast_start: bool, master: str) -> dict[str, str]:
    slots = cores or len(os.sched_getaffinity(0))
    log_settings = cache_directory() / "log4j2.properties"
    _write_once(log_settings, LOG_SETTINGS)
    flags = [f"-Dlog4j2.configurationFile={log_settings.as_uri()}", *ARROW_FLAGS]
    if fast_start:
        flags += ["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", *_class_archive(java)]
    settings = {
        "spark.driver.extraJavaOptions": shlex.join(flags),
        "spark.driver.memory": f"{_driver_memory() >> 20}m",
        "spark.python.unix.domain.socket.enabled": "true",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        "spark.sql.session.timeZone": "UTC",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }
    if master.startswith("local"):
        settings |= {
            "spark.master": f"local[{slots},{TASK_ATTEMPTS}]",
            "spark.driver.bindAddress": LOOPBACK,
            "spark.driver.host": LOOPBACK,
            "spark.sql.shuffle.partitions": str(slots),
        }
    return settings


def _driver_memory() -> int:
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(max(machine // 4, DRIVER_MEMORY_MIN), DRIVER_MEMORY_MAX)


def _class_archive(java: Java) -> list[str]:
    """Flags that use the archive of Spark's classes, or have the JVM write one when it ends.

    A JVM writes its archive while it is ending, when nobody waits for it any more: under a name of its own,
    and a later start adopts it. Of several that were written the last adopted stays; all are alike.
    """
    import pyspark

    folder = cache_directory()
    name = f"classes-{pyspark.__version__}-{java.full_version}"
    archive = folder / f"{name}.jsa"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for draft in folder.glob(f"{name}.*.draft"):
            if time.time() - draft.stat().st_mtime > ARCHIVE_SETTLED_S:
                draft.replace(archive)
    except OSError:
        return []
    if archive.exists():
        return [f"-XX:SharedArchiveFile={archive}", "-Xlog:disable"]
    return [f"-XX:ArchiveClassesAtExit={folder / f'{name}.{os.getpid()}.draft'}", "-Xlog:disable"]


@contextlib.contextmanager
def _quiet() -> Iterator[IO[bytes]]:
    """Send what the JVM prints at its start into a file. It keeps the descriptor, so the file must last."""
    with tempfile.TemporaryFile(prefix="forebay-spark-") as output:
        if sys.stderr is not None:
            sys.stderr.flush()
        try:
            kept = os.dup(2)
        except OSError:  # No stderr at all, as in some services.
            yield output
            return
        try:
            os.dup2(output.fileno(), 2)
            yield output
        finally:
            os.dup2(kept, 2)
            os.close(kept)


def _not_started(error: Exception, output: IO[bytes], master: str) -> Unavailable:
    output.seek(0)
    said = output.read().decode(errors="replace")[-LOG_TAIL_CHARS:].strip()
    where = "" if master.startswith("local") or not master else f" with the master {master}"
    return Unavailable(
        f"Spark did not start{where}: {error}" + (f"\n{said}" if said else ""),
        hint="the lines above are Spark's own; JAVA_HOME chooses another Java",
    )
