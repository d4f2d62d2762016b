"""One Spark for all tests: it takes a dozen seconds to start and half a second to use."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from forebay.errors import Unsupported
from forebay.spark._java import find_java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything that uses Spark shares one worker, and with it one JVM."""
    for item in items:
        if HERE in item.path.parents:
            # The warnings are of Spark's own: pandas 3 is newer than it knows, and py4j leaves sockets open.
            for ignored in (
                "ignore:PySpark does not yet fully support pandas:FutureWarning",
                "ignore::ResourceWarning",
                "ignore::pytest.PytestUnraisableExceptionWarning",
            ):
                item.add_marker(pytest.mark.filterwarnings(ignored))
            if item.get_closest_marker("xdist_group") is None:
                item.add_marker(pytest.mark.xdist_group("spark"))


@pytest.fixture(scope="session")
def java() -> None:
    """Java, or a skip with the reason."""
    try:
        find_java()
    except Unsupported as error:
        if os.environ.get("CI") == "true":
            pytest.fail(f"CI=true, and {error.message}", pytrace=False)
        pytest.skip(f"{error.message} ({error.hint})")


@pytest.fixture(scope="session")
def spark(java: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A local session on two cores; the JVM is gone when the tests are."""
    from pyspark import SparkContext

    import forebay.spark

    os.environ.setdefault("SPARK_LOCAL_DIRS", str(tmp_path_factory.mktemp("spark-local")))
    warehouse = tmp_path_factory.mktemp("spark-warehouse")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        session = forebay.spark.session(
            "forebay-tests",
            2,
            fast_start=True,
            **{"spark.sql.warehouse.dir": str(warehouse), "spark.driver.memory": "1g"},
        )
    yield session
    gateway = SparkContext._gateway
    session.stop()
    if gateway is not None:
        gateway.shutdown()
        process = gateway.proc
        if process.stdin is not None:
            process.stdin.close()
        process.wait(timeout=120)
        SparkContext._gateway = None
        SparkContext._jvm = None
