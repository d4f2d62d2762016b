"""The pytest plugin: marks, skips with a reason, failures where skipping would be a lie."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest_plugins = ["pytester"]

SUITE = """
    import pytest

    def test_both(oxia, seaweed): ...
    def test_one(oxia): ...
    def test_plain(): ...

    @pytest.mark.parametrize("kind", ["memory", pytest.param("oxia", marks=pytest.mark.real_server("oxia"))])
    def test_suite(kind, request):
        if kind != "memory":
            request.getfixturevalue(kind)

    @pytest.mark.xdist_group("mine")
    def test_grouped(oxia): ...
"""
CONFTEST = """
    import pytest

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(items):
        for item in items:
            groups = [mark.args[0] for mark in item.iter_markers("xdist_group")]
            print("MARKS", item.name, groups, item.get_closest_marker("integration") is not None)
"""
PLAIN = ("-p", "no:randomly", "-p", "no:cacheprovider", "--strict-markers")


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A project beside ours, on a machine without Go and with an empty cache."""
    monkeypatch.setenv("PATH", str(pytester.path))
    monkeypatch.setenv("FOREBAY_CACHE_DIR", str(pytester.path / "cache"))
    monkeypatch.delenv("CI", raising=False)
    pytester.makepyfile(SUITE)
    return pytester


def test_users_of_servers_are_marked_and_grouped(suite: pytest.Pytester) -> None:
    suite.makeconftest(CONFTEST)
    result = suite.runpytest_subprocess(*PLAIN, "--collect-only", "-q")
    assert [line for line in result.outlines if line.startswith("MARKS")] == [
        "MARKS test_both ['seaweed'] True",
        "MARKS test_one ['oxia'] True",
        "MARKS test_plain [] False",
        "MARKS test_suite[memory] [] False",
        "MARKS test_suite[oxia] ['oxia'] True",
        "MARKS test_grouped ['mine'] True",
    ]


def test_servers_can_be_left_out_also_without_xdist(suite: pytest.Pytester) -> None:
    result = suite.runpytest_subprocess(*PLAIN, "-p", "no:xdist", "-m", "not integration")
    result.assert_outcomes(passed=2, deselected=4)


def test_missing_server_skips_with_its_reason(suite: pytest.Pytester) -> None:
    result = suite.runpytest_subprocess(*PLAIN, "-rs", "-k", "one or suite or plain")
    result.assert_outcomes(passed=2, skipped=2)
    result.stdout.fnmatch_lines(["*no Go toolchain*install Go*"])


def test_missing_server_fails_in_ci(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    result = suite.runpytest_subprocess(*PLAIN, "-k", "one or plain")
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*CI=true, and Oxia is not in the cache*"])


@pytest.mark.parametrize("module", ["forebay.testing", "forebay.testing.pytest_plugin"])
def test_simulated_world_and_plugin_import_no_client_of_a_server(module: str) -> None:
    script = f"import sys, {module}; print({{'obstore', 'grpc', 'boto3', 'pyarrow'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_plugin_imports_nothing_of_ours() -> None:
    # What the package itself imports is its own affair; the plugin must not add to it.
    script = """
import sys, pytest, forebay.testing
before = set(sys.modules)
import forebay.testing.pytest_plugin
print(sorted(sys.modules.keys() - before))
"""
    added = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert added.stdout.strip() == "['forebay.testing.pytest_plugin']"
