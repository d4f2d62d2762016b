"""The same job on every kind of Spark: one process, four executors, a standalone cluster, Connect, pipelines.

Where a job runs must change nothing: digests of all rows are compared with those of local mode.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from tests.spark import cluster_job
from tests.spark.bed import fill, golden

import forebay
from forebay.spark import _session
from forebay.spark._java import find_java

ROOT = Path(__file__).parents[2]
WAIT_S = 900


@pytest.fixture(scope="module")
def seed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log to start from; each run works on a copy, since offsets and times are part of what is compared."""
    folder = tmp_path_factory.mktemp("seed")
    for partition in range(4):
        for number in range(4):
            values = [b"%d-%d-%d" % (partition, number, each) for each in range(40)]
            fill(folder / "data", "in", partition, values, partitions=4, keys=values)
    return folder


@pytest.fixture(scope="module")
def expected(spark: SparkSession, seed: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What local mode finds."""
    folder = copied(seed, tmp_path_factory.mktemp("local"))
    return cluster_job.work(spark, str(folder / "data"), str(folder / "data"), str(folder))


def copied(seed: Path, folder: Path) -> Path:
    return Path(shutil.copytree(seed, folder / "copy"))


def ran(arguments: list[str], folder: Path, **variables: str) -> dict[str, str]:
    """The job in a process of its own, with a fresh environment of Spark's."""
    told = subprocess.run(
        [*arguments, str(folder / "data"), str(folder / "data"), str(folder)],
        cwd=ROOT,
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=WAIT_S,
        check=False,
    ).stdout
    lines = [line for line in told.splitlines() if line.startswith("found ")]
    assert lines, told[-4000:]
    found: dict[str, str] = json.loads(lines[0].removeprefix("found "))
    return found


def environment(**variables: str) -> dict[str, str]:
    """With the package that is tested here, installed or not, unless another path is given."""
    ours = ("PYSPARK_", "SPARK_", "PYTHONPATH")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    kept["PYTHONPATH"] = str(Path(str(forebay.__file__)).resolve().parents[1])
    return {**kept, "JAVA_HOME": str(find_java().home), "SPARK_LOCAL_IP": "127.0.0.1", **variables}


JOB = [sys.executable, "-m", "tests.spark.cluster_job"]


@pytest.mark.timeout(1800)
def test_four_executors_give_the_same_result_bit_for_bit(
    expected: dict[str, str], seed: Path, tmp_path: Path
) -> None:
    conf = json.dumps({"spark.master": "local-cluster[4,1,1024]", "spark.driver.memory": "1g"})
    assert ran(JOB, copied(seed, tmp_path), FOREBAY_TEST_CONF=conf) == expected
    assert expected["read"].startswith("640:") and expected["verify"] == "True 1280"


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_spark_connect_gives_the_same_result(expected: dict[str, str], seed: Path, tmp_path: Path) -> None:
    pytest.importorskip("grpc_status", reason="pip install 'forebay[connect]'")
    assert ran(JOB, copied(seed, tmp_path), SPARK_REMOTE="local[2]") == expected


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_a_standalone_cluster_with_the_package_shipped_gives_the_same_result(
    expected: dict[str, str], seed: Path, tmp_path: Path
) -> None:
    """Nothing of Forebay is installed for the Python that runs it: all of it comes by `--py-files`."""
    base = sys._base_executable  # type: ignore[attr-defined]
    python = {"PYTHONPATH": str(others(tmp_path / "links"))}
    python["PYSPARK_PYTHON"] = str(_session._worker_python(base))
    python["PYSPARK_DRIVER_PYTHON"] = base
    alone = subprocess.run(
        [base, "-c", "import forebay"],
        cwd=tmp_path,
        env=environment(**python),
        capture_output=True,
        check=False,
    )
    assert alone.returncode, "forebay is installed after all"
    with standalone(tmp_path, python) as master:
        submit = [
            str(spark_home() / "bin" / "spark-submit"),
            *("--master", master, "--py-files", str(package(tmp_path / "forebay.zip"))),
            *("--conf", "spark.ui.enabled=false", "--conf", "spark.executor.memory=800m"),
            str(shutil.copy(cluster_job.__file__, tmp_path)),
        ]
        assert ran(submit, copied(seed, tmp_path), **python) == expected


def spark_home() -> Path:
    import pyspark

    return Path(str(pyspark.__file__)).parent


def others(folder: Path) -> Path:
    """Every installed package but ours."""
    folder.mkdir()
    for each in spark_home().parent.iterdir():
        if "forebay" not in each.name and each.suffix != ".pth":
            (folder / each.name).symlink_to(each)
    return folder


def package(target: Path) -> Path:
    with zipfile.ZipFile(target, "w") as archive:
        for root in ("forebay", "pyspark_forebay"):
            for file in (ROOT / "src" / root).rglob("*"):
                if file.is_file() and "__pycache__" not in file.parts:
                    archive.write(file, file.relative_to(ROOT / "src"))
    return target


@contextlib.contextmanager
def standalone(folder: Path, variables: dict[str, str]) -> Iterator[str]:
    """A master and two workers, from the package that pip installed."""
    program = str(spark_home() / "bin" / "spark-class")
    base = ["--host", "127.0.0.1", "--webui-port", "0"]
    running: list[subprocess.Popen[bytes]] = []

    def start(name: str, *arguments: str) -> Path:
        log = folder / f"{name}.log"
        with log.open("wb") as output:
            running.append(
                subprocess.Popen(
                    [program, *arguments], stdout=output, stderr=output, env=environment(**variables)
                )
            )
        return log

    try:
        log = start("master", "org.apache.spark.deploy.master.Master", "--port", "0", *base)
        deadline = time.monotonic() + WAIT_S
        while "Starting Spark master at " not in (text := log.read_text()):
            assert running[0].poll() is None and time.monotonic() < deadline, text
            time.sleep(0.2)
        master = text.split("Starting Spark master at ")[1].split()[0]
        for number in range(2):
            work = ["--cores", "1", "--memory", "1g", "-d", str(folder / f"work{number}"), *base]
            start(f"worker{number}", "org.apache.spark.deploy.worker.Worker", master, *work)
        yield master
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait(timeout=120)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_a_declarative_pipeline_goes_on_where_it_ended(java: None, tmp_path: Path) -> None:
    pytest.importorskip("grpc_status", reason="pip install 'forebay[connect]'")
    data, project = tmp_path / "data", tmp_path / "orders"
    shutil.copytree(ROOT / "docs" / "how-to" / "spark-pipelines", project)
    specification = project / "spark-pipeline.yml"
    text = specification.read_text().replace("file:///var/lib/orders/pipeline", f"file://{tmp_path}/storage")
    specification.write_text(text.replace("/var/lib/orders/data", str(data)))
    command = [str(Path(sys.executable).parent / "spark-pipelines"), "run"]
    for setting in ("spark.sql.catalogImplementation=hive", "spark.ui.enabled=false"):
        command += ["--conf", setting]
    for run in range(2):
        orders: list[dict[str, Any]] = [
            {"id": 10 * run + number, "country": "AT" if number % 2 else "DE", "amount": 600.0 * number}
            for number in range(4)
        ]
        fill(data, "orders", run, [json.dumps(order).encode() for order in orders], partitions=2)
        done = subprocess.run(
            command,
            cwd=project,
            env=environment(
                PYSPARK_PYTHON=str(_session._worker_python()), PYSPARK_DRIVER_PYTHON=sys.executable
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=WAIT_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-4000:]
        large = [json.loads(value) for *_, value in golden(data, "large-orders")]
        wanted = [
            {"id": 10 * each + number, "amount": 600.0 * number}
            for each in range(run + 1)
            for number in (2, 3)
        ]
        assert sorted(large, key=lambda order: order["id"]) == wanted
    with forebay.connect(data) as bay:
        assert {topic.topic for topic in bay.topics.list()} == {"orders", "large-orders"}
