"""The repository's own rules, held by tests because nobody remembers them all."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import forebay

ROOT = Path(__file__).resolve().parent.parent
FILE_LINES_MAX = 600
MACHINE_DIRECTORIES = ("home", "root", "work", "tmp", "Users")
# A path of somebody's machine: one of those directories at the root, and something in it.
MACHINE_PATH = re.compile(rf"(?<![\w.\-/}}])/(?:{'|'.join(MACHINE_DIRECTORIES)})/[\w.-]+")
# Hosts, options and settings by which a package index is named.
INDEX = re.compile(r"index[-_]url|find[-_]links|pythonhosted|pypi\.|proxy\.golang|goproxy\.", re.IGNORECASE)
RELEASE = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*==[\w.!+]+( ; .+)?")


@cache
def tracked() -> list[Path]:
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a git checkout")
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = [ROOT / name for name in done.stdout.split("\0") if name]
    return [file for file in files if file.is_file()]


def texts() -> list[tuple[str, str]]:
    """Name and text of every tracked file that is text."""
    found = []
    for file in tracked():
        data = file.read_bytes()
        if b"\0" not in data:
            found.append((str(file.relative_to(ROOT)), data.decode()))
    return found


@cache
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def requirements() -> list[Requirement]:
    groups = [project()["project"]["dependencies"], *project()["project"]["optional-dependencies"].values()]
    found = [Requirement(each) for group in groups for each in group]
    return [each for each in found if each.name != "forebay"]  # An extra may bring another one along.


def makefile_targets() -> set[str]:
    return set(re.findall(r"^([a-z]+):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_no_tracked_file_names_a_path_of_somebodys_machine() -> None:
    found = [f"{name}: {match}" for name, text in texts() for match in MACHINE_PATH.findall(text)]
    assert found == []


@pytest.mark.parametrize("directory", MACHINE_DIRECTORIES)
def test_paths_of_machines_are_recognised(directory: str) -> None:
    assert MACHINE_PATH.search(f'open("/{directory}/someone")')
    assert not MACHINE_PATH.search(f"{{tmp_path}}/{directory}/x and ./{directory}/x and a/{directory}/x")


def test_no_tracked_file_names_a_package_index() -> None:
    # The Makefile asks for a lock file without one, in so many words; this file has to say what it looks for.
    allowed = {"Makefile": "--no-emit-index-url", "tests/test_repository.py": ""}
    found = [
        f"{name}: {line.strip()}"
        for name, text in texts()
        for line in text.splitlines()
        if INDEX.search(line) and not (name in allowed and allowed[name] in line)
    ]
    assert found == []


def test_lock_file_holds_versions_and_nothing_else() -> None:
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    assert [line for line in lines if not RELEASE.fullmatch(line)] == []


@pytest.mark.parametrize("requirement", requirements(), ids=str)
def test_lock_file_pins_every_dependency_within_its_bounds(requirement: Requirement) -> None:
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    pins = [Requirement(line) for line in lines]
    versions = [
        next(iter(pin.specifier)).version
        for pin in pins
        if canonicalize_name(pin.name) == canonicalize_name(requirement.name)
    ]
    assert versions, f"{requirement.name} is not in requirements.lock: make lock"
    assert all(requirement.specifier.contains(version, prereleases=True) for version in versions)


def test_build_backend_is_pinned() -> None:
    for requirement in project()["build-system"]["requires"]:
        assert re.fullmatch(r"[\w-]+==[\w.]+", requirement)


def test_every_extra_of_the_design_is_offered() -> None:
    assert {"spark", "broker", "otel", "oxia", "dev"} <= set(project()["project"]["optional-dependencies"])


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/quickstart.md", ".ci/run"])
def test_every_make_target_that_is_named_exists(page: str) -> None:
    named = set(re.findall(r"(?:^|`)make ([a-z]+)", (ROOT / page).read_text(), re.MULTILINE))
    assert named
    assert named <= makefile_targets()


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_help_lists_every_target() -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(["make", "help"], cwd=ROOT, env=clean, capture_output=True, text=True, check=True)
    assert set(re.findall(r"^\s*make ([a-z]+)", done.stdout, re.MULTILINE)) == makefile_targets()


def test_ci_script_can_be_executed() -> None:
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert (ROOT / ".ci" / "run").read_text().startswith("#!/")


def test_formatter_leaves_the_blocks_of_the_docs_as_they_are() -> None:
    # It knows Markdown by now, and would undo the aligned comments: `make check` would fail on a fresh clone.
    command = [sys.executable, "-m", "ruff", "format", "--check", "--no-cache", "docs"]
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_no_python_file_is_swollen() -> None:
    lengths = {
        str(file.relative_to(ROOT)): len(file.read_text().splitlines())
        for file in tracked()
        if file.suffix in (".py", ".pyi") and "_pb2" not in file.name
    }
    assert {name: length for name, length in lengths.items() if length > FILE_LINES_MAX} == {}


def test_package_says_that_it_is_typed() -> None:
    package = Path(forebay.__path__[0])
    assert (package / "py.typed").is_file()
    wheel = project()["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel == {"packages": ["src/forebay", "src/pyspark_forebay"]}


def test_installed_command_is_the_documented_one() -> None:
    [command] = [
        each for each in importlib.metadata.entry_points(group="console_scripts") if each.name == "forebay"
    ]
    assert command.load() is importlib.import_module("forebay.cli").main


def test_everything_a_module_exports_is_there() -> None:
    missing = []
    for found in pkgutil.walk_packages(forebay.__path__, "forebay."):
        if found.name.endswith(("_pb2", "__main__")):
            continue
        module = importlib.import_module(found.name)
        missing += [
            f"{found.name}.{name}" for name in getattr(module, "__all__", ()) if not hasattr(module, name)
        ]
    assert missing == []


def test_changes_to_come_have_a_place_in_the_changelog() -> None:
    assert "## [Unreleased]" in (ROOT / "CHANGELOG.md").read_text()


def test_licence_is_the_one_the_package_names() -> None:
    assert project()["project"]["license"] == "Apache-2.0"
    assert "Version 2.0, January 2004" in (ROOT / "LICENSE").read_text()
