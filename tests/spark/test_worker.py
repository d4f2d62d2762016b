"""What a worker does once for all tasks that follow."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest

from forebay.spark import _session, _worker


@pytest.fixture(autouse=True)
def thawed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(_worker, "_settled", set())
    gc.unfreeze()
    yield
    gc.unfreeze()


def test_what_is_loaded_is_put_aside_once_and_only_in_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    _worker.settle()
    assert gc.get_freeze_count() == 0

    monkeypatch.setattr(_worker, "TaskContext", SimpleNamespace(get=object))
    _worker.settle()
    frozen = gc.get_freeze_count()
    assert frozen > 1_000

    later: list[list[int]] = [[] for _ in range(1_000)]
    _worker.settle()
    assert gc.get_freeze_count() <= frozen and len(later) == 1_000


def test_what_tasks_free_is_kept_from_the_first_task_on_and_nowhere_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept: list[tuple[int, bool]] = []

    def told(size: int, *, one_heap: bool) -> None:
        kept.append((size, one_heap))

    monkeypatch.setattr(_worker, "_begun", set())
    monkeypatch.setattr(_worker, "keep_free_memory", told)
    _worker.begin()
    assert kept == []
    monkeypatch.setattr(_worker, "TaskContext", SimpleNamespace(get=object))
    _worker.begin()
    _worker.begin()
    assert kept == [(_worker.KEPT_FREE_BYTES, True)]


@pytest.mark.parametrize(("told", "pool"), [(True, "system"), (False, pa.default_memory_pool().backend_name)])
def test_arrow_shares_the_memory_of_a_worker_where_the_allocator_keeps_it(
    told: bool, pool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = pa.default_memory_pool()
    monkeypatch.setattr(_worker, "_begun", set())
    monkeypatch.setattr(_worker, "keep_free_memory", lambda size, *, one_heap: told)
    monkeypatch.setattr(_worker, "TaskContext", SimpleNamespace(get=object))
    try:
        _worker.begin()
        assert pa.default_memory_pool().backend_name == pool
    finally:
        pa.set_memory_pool(before)


@pytest.mark.parametrize("is_set", [True, False])
def test_bytecode_that_is_not_wanted_beside_the_sources_is_kept_in_the_cache(
    is_set: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FOREBAY_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("PYTHONPYCACHEPREFIX", raising=False)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1" if is_set else "")
    command = [str(_session._worker_python()), "-c", "import sys; print(sys.pycache_prefix)"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(str(tmp_path)) if is_set else done.stdout == "None\n"


def test_what_reads_a_stream_starts_as_spark_means_it_but_for_the_collector_and_threads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module = (tmp_path / Path(*_session.SOURCE_RUNNER.split("."))).with_suffix(".py")
    module.parent.mkdir(parents=True)
    for folder in (module.parent, *module.parent.parents[:2]):
        (folder / "__init__.py").touch()
    threads = "OPENBLAS_NUM_THREADS"
    asked = "__name__, sys.modules['__main__'].__file__, len(sys.argv), gc.get_threshold()[0]"
    module.write_text(f"import gc, os, sys\nprint({asked}, os.environ['{threads}'])")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv(threads, raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    command = [str(_session._worker_python()), "-m", _session.SOURCE_RUNNER]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert told == ["__main__", str(module), "1", "200000", "1"]
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1] == "3"
    asked = f"gc.get_threshold()[0], os.environ.get('{threads}')"
    other = [str(_session._worker_python()), "-c", f"import gc, os; print({asked})"]
    collector, kept = subprocess.run(other, capture_output=True, text=True, check=True).stdout.split()
    assert collector != "200000" and kept == "None"


def test_what_reads_topics_loads_nothing_of_what_writes_or_looks_after_them() -> None:
    chores = ("compactor", "compactor_service", "retention", "staged", "vacuum", "verify", "trim")
    writers = ("append", "batching", "commit", "groups", "group_member", "topics", "writer", "writer_config")
    unneeded = {f"forebay.log._{name}" for name in chores + writers} | {"forebay.aio"}
    unneeded |= {"forebay.buffer", "forebay.quiver", "forebay.stream", "obstore", "pandas", "pyarrow.parquet"}
    script = f"import sys, forebay.spark._source; print(sorted({unneeded} & set(sys.modules)))"
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert told.stdout == "[]\n"
