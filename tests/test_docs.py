"""The documentation is held to the code: blocks run, links lead somewhere, tables say what is there.

A page is one script. Its ```python blocks share a namespace and may await at the top level; the lines of its
```sh blocks that begin with `forebay ` are run by a shell, in the order of the page and in the same temporary
directory, and must end well. A ```text block is never run. A page that starts a real server is skipped where
that server cannot be had.

`python tests/test_docs.py` writes the table of limits anew.
"""

from __future__ import annotations

import ast
import asyncio
import importlib
import inspect
import itertools
import os
import pkgutil
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay import errors
from forebay.cli import _app
from forebay.cli._errors import EXIT_CODES
from forebay.kit.limits import Limit
from forebay.testing.servers import ServerUnavailable

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LIMITS_PAGE = ROOT / "docs" / "limits.md"
TABLE_BEGIN, TABLE_END = "<!-- limits: begin -->\n", "<!-- limits: end -->\n"
COMMAND_SECONDS_MAX = 120
PAGE_SECONDS_MAX = 280
COMMON_OPTIONS = {"--output", "-o", "--color", "--no-color", "--debug", "--help", "-h"}


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page."""

    language: str
    line: int
    """Line of the page where its first line stands."""
    text: str


def blocks(text: str) -> Iterator[Block]:
    """The fenced blocks, also those indented in a list."""
    lines = iter(enumerate(text.splitlines(), start=1))
    for number, line in lines:
        fence = re.match(r"( *)(`{3,})(\w*)", line)
        if fence is None:
            continue
        indent, ticks, language = fence.groups()
        body = []
        for _, inner in lines:
            if inner.strip() == ticks:
                break
            body.append(inner.removeprefix(indent))
        else:
            raise AssertionError(f"the block of line {number} is never closed")
        yield Block(language, number + 1, "\n".join(body) + "\n")


def commands(block: Block) -> Iterator[tuple[int, str]]:
    """The lines to run of a shell block, continued lines joined."""
    lines = iter(enumerate(block.text.splitlines(), start=block.line))
    for number, line in lines:
        whole = line
        while whole.endswith("\\"):
            whole = whole[:-1] + next(lines)[1]
        if whole.startswith("forebay "):
            yield number, whole


def runnable(page: Path) -> bool:
    return any(
        block.language == "python" or (block.language == "sh" and any(commands(block)))
        for block in blocks(page.read_text())
    )


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


class PageRunner:
    """Runs the blocks of one page."""

    def __init__(self, page: Path, directory: Path) -> None:
        self.page = page
        self.directory = directory
        self.module = types.ModuleType("forebay_docs_page")
        self.loop = asyncio.Runner()

    def run(self) -> None:
        sys.modules[self.module.__name__] = self.module
        try:
            with self.loop:
                for block in blocks(self.page.read_text()):
                    if block.language == "python":
                        self.run_python(block)
                    elif block.language == "sh":
                        self.run_commands(block)
        finally:
            del sys.modules[self.module.__name__]

    def run_python(self, block: Block) -> None:
        # Empty lines in front make tracebacks speak of the page's own lines.
        source = "\n" * (block.line - 1) + block.text
        try:
            code = compile(
                source, name_of(self.page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True
            )
            result = eval(code, self.module.__dict__)
            if inspect.iscoroutine(result):
                self.loop.run(result)
        except Exception as error:
            raise AssertionError(
                f"{name_of(self.page)}:{_line(error, self.page, block)}: {error!r}"
            ) from error

    def run_commands(self, block: Block) -> None:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        for number, command in commands(block):
            done = subprocess.run(
                ["sh", "-c", command],
                cwd=self.directory,
                env={**os.environ, "PATH": path},
                capture_output=True,
                text=True,
                timeout=COMMAND_SECONDS_MAX,
                check=False,
            )
            where = f"{name_of(self.page)}:{number}"
            assert done.returncode == 0, f"{where}: {command!r} ended with {done.returncode}\n{done.stderr}"


def run_apart(page: Path, directory: Path) -> None:
    """Run a page in a process of its own: a process has one Spark, and other tests of this one may use it."""
    script = (
        "import sys; from pathlib import Path; from tests.test_docs import PageRunner;"
        "PageRunner(Path(sys.argv[1]), Path.cwd()).run()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(page)],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PAGE_SECONDS_MAX,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def _line(error: Exception, page: Path, block: Block) -> int:
    """The line of the page where `error` passed through it."""
    if isinstance(error, SyntaxError):
        return error.lineno or block.line
    lines = [block.line]
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == name_of(page):
            lines.append(trace.tb_lineno)
        trace = trace.tb_next
    return lines[-1]


@pytest.mark.parametrize("page", [page for page in PAGES if runnable(page)], ids=name_of)
def test_code_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("FOREBAY_")]:
        monkeypatch.delenv(name)
    if "forebay.spark.session(" in page.read_text():
        run_apart(page, tmp_path)
        return
    try:
        PageRunner(page, tmp_path).run()
    except AssertionError as error:
        if not isinstance(error.__cause__, ServerUnavailable) or os.environ.get("CI") == "true":
            raise
        pytest.skip(f"{error.__cause__.message} ({error.__cause__.hint})")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("# Page\n\n```python\nx = 1\n```\n\n```python\nassert x == 2\n```\n", "page.md:8: AssertionError"),
        ("```python\nx = (\n```\n", "page.md:2: SyntaxError"),
        ("```sh\nls\nforebay version\nforebay nonsense\n```\n", "page.md:4: 'forebay nonsense' ended with 2"),
        ("```python\nawait nothing()\n```\n", "page.md:2: NameError"),
    ],
)
def test_failing_block_is_named_by_page_and_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, complaint: str
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(AssertionError, match=re.escape(complaint)):
        PageRunner(page, tmp_path).run()


def test_blocks_of_other_languages_are_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("```text\nforebay nonsense\n```\n\n```\n1 / 0\n```\n\n```sh\nexit 1\n```\n")
    assert not runnable(page)
    PageRunner(page, tmp_path).run()


def prose(page: Path) -> str:
    """A page without its fenced blocks and code spans."""
    text = re.sub(r"^( *)(`{3,}).*?^ *\2$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`", "", text)


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        aim = (page.parent / file).resolve() if file else page
        assert aim.exists(), f"{name_of(page)} links to {target}, which is not there"
        assert aim.is_relative_to(ROOT), f"{name_of(page)} links out of the repository: {target}"
        assert not anchor or anchor in anchors(aim), f"{name_of(page)}: no heading for {target}"


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached, ahead = {ROOT / "README.md"}, [ROOT / "README.md"]
    while ahead:
        at = ahead.pop()
        for target in re.findall(r"\]\(([^)\s:#]+)", prose(at)):
            aim = (at.parent / target).resolve()
            new = [aim] if aim.suffix == ".md" and aim.is_file() else sorted(aim.glob("*.md"))
            ahead += [each for each in new if each not in reached]
            reached.update(new)
    assert [name_of(page) for page in PAGES if page not in reached] == []


def sections(page: Path) -> dict[str, str]:
    """Text by heading, of any level."""
    parts = re.split(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def command_tree() -> dict[str, set[str]]:
    """The options of every command, by its full name."""
    found: dict[str, set[str]] = {}

    def walk(path: str, command: Any) -> None:
        inner = getattr(command, "commands", {})
        if not inner:
            options = [name for each in command.params for name in (*each.opts, *each.secondary_opts)]
            found[path] = {name for name in options if name.startswith("-")}
        for name, each in inner.items():
            walk(f"{path} {name}", each)

    for registered in _app.COMMANDS:
        walk(f"forebay {registered.name}", _app.load(registered.name))
    return found


@pytest.mark.parametrize("command", command_tree())
def test_reference_names_exactly_the_options_of_each_command(command: str) -> None:
    text = sections(ROOT / "docs" / "reference" / "cli.md").get(f"`{command}`")
    assert text is not None, f"docs/reference/cli.md has no section on `{command}`"
    named = {
        option for row in re.findall(r"^\| `(-.*?)\|", text, re.M) for option in re.findall(r"--?[\w-]+", row)
    }
    assert named == command_tree()[command] - COMMON_OPTIONS


def test_reference_names_the_common_options_and_every_exit_code() -> None:
    page = sections(ROOT / "docs" / "reference" / "cli.md")
    for option in COMMON_OPTIONS:
        assert (
            f"`{option}`" in page["Options every command takes"]
            or f"`{option} " in page["Options every command takes"]
        )
    rows = re.findall(r"^\| (\d+) \| (.*?) \|", page["Exit codes"], re.M)
    assert {int(code): text for code, text in rows} == EXIT_CODES


def error_classes() -> dict[str, type[errors.ForebayError]]:
    """Every error a user can meet: those of the tree, and those the rooms export beside it."""
    rooms = [
        errors,
        *[importlib.import_module(f"forebay.{room}") for room in ("kit", "storage", "coordination")],
    ]
    exported = {name: getattr(room, name) for room in rooms for name in getattr(room, "__all__", ())}
    return {
        name: each
        for name, each in exported.items()
        if inspect.isclass(each) and issubclass(each, errors.ForebayError)
    }


def test_every_error_is_documented_with_its_parent_and_its_remedy() -> None:
    page = (ROOT / "docs" / "reference" / "errors.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (?:`(\w+)`)? ?\| (.+?) \| (.+?) \|$", page, re.M)
    documented = {name: parent for name, parent, _, _ in rows}
    expected = {
        name: "" if each is errors.ForebayError else each.__bases__[0].__name__
        for name, each in error_classes().items()
    }
    assert documented == expected


def limits() -> Iterator[tuple[str, str, int | float, str]]:
    """Every public constant that is a limit by its name: module, name, value, first sentence about it.

    The bounds of the test kit are left out: they guard tests, and no user meets them.
    """
    for found in pkgutil.walk_packages(forebay.__path__, "forebay."):
        if found.name.endswith(("_pb2", "__main__")) or found.name.startswith("forebay.testing"):
            continue
        module = importlib.import_module(found.name)
        body = ast.parse(inspect.getsource(module)).body
        for position, node in enumerate(body):
            name = _assigned(node)
            if re.fullmatch(r"[A-Z][A-Z0-9_]*_(MAX|MIN|LIMIT)", name):
                value = getattr(module, name)
                number = value.value if isinstance(value, Limit) else value
                # The oldest version of something is a tuple, and no limit.
                if isinstance(number, int | float):
                    yield found.name, name, number, _about(body[position:])


def _assigned(node: ast.stmt) -> str:
    target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
    return target.id if isinstance(target, ast.Name) else ""


def _about(body: list[ast.stmt]) -> str:
    """The first sentence of the docstring below a constant, or below a pair like X_MIN and X_MAX."""
    stem = _assigned(body[0]).partition("_")[0]
    for before, node in itertools.pairwise(body):
        if node.lineno != (before.end_lineno or 0) + 1:
            break
        if _assigned(node) and _assigned(node).partition("_")[0] != stem:
            break
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            text = " ".join(str(node.value.value).split())
            return text.split(". ")[0].rstrip(".").replace("|", "\\|")
    return ""


def limits_table() -> str:
    rows = [
        f"| `{name}` | {value:,} | `{module}` | {about} |\n"
        for module, name, value, about in sorted(limits(), key=lambda row: row[:2])
    ]
    return "".join(["| name | value | in | what it bounds |\n|---|---|---|---|\n", *rows])


def test_table_of_limits_is_that_of_the_code() -> None:
    before, _, rest = LIMITS_PAGE.read_text().partition(TABLE_BEGIN)
    table, _, _ = rest.partition(TABLE_END)
    assert before
    assert table == limits_table(), "docs/limits.md is behind the code: run python tests/test_docs.py"


def test_every_limit_says_what_it_bounds() -> None:
    assert [f"{module}.{name}" for module, name, _, about in limits() if not about] == []


if __name__ == "__main__":
    head, _, tail = LIMITS_PAGE.read_text().partition(TABLE_BEGIN)
    LIMITS_PAGE.write_text(head + TABLE_BEGIN + limits_table() + TABLE_END + tail.partition(TABLE_END)[2])
