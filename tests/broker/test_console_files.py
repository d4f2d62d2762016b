"""The files of the console, without a browser: served whole, and made so that the content policy holds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.broker.bed import serving

from forebay.broker._console import FOLDER

FILES = sorted(path for path in FOLDER.rglob("*") if path.is_file())
SCRIPTS = [path for path in FILES if path.suffix == ".js"]
INDEX = (FOLDER / "index.html").read_text()
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
CONSOLE_BYTES_MAX = 150_000
"""Bytes of all files together: the page is to be there at once."""


def name_of(path: Path) -> str:
    return path.relative_to(FOLDER).as_posix()


async def test_every_file_is_served_with_its_type_and_strict_headers() -> None:
    async with serving() as (_, client):
        for path in FILES:
            answer = await client.get(f"/console/{name_of(path)}")
            assert (answer.status, answer.body) == (200, path.read_bytes())
            assert answer.headers["Content-Type"] == f"{TYPES[path.suffix]}; charset=utf-8"
            assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
            assert answer.headers["X-Content-Type-Options"] == "nosniff"


def test_the_page_is_small() -> None:
    assert len(SCRIPTS) > 10
    assert sum(path.stat().st_size for path in FILES) < CONSOLE_BYTES_MAX


@pytest.mark.parametrize("path", SCRIPTS, ids=name_of)
def test_no_script_makes_markup_or_code_of_data(path: Path) -> None:
    text = path.read_text()
    made = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser|srcdoc"
    assert re.findall(made, text) == []
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in text


def test_the_page_has_nothing_inline_and_nothing_from_elsewhere() -> None:
    assert re.findall(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=|javascript:", INDEX) == []
    named = re.findall(r'(?:src|href)="([^"#]+)"', INDEX)
    assert all((FOLDER / name).is_file() for name in named)


def test_every_module_is_loaded_ahead() -> None:
    ahead = set(re.findall(r'<link rel="modulepreload" href="([^"]+)"', INDEX))
    started = set(re.findall(r'<script[^>]* src="([^"]+)"', INDEX))
    assert ahead | started == {name_of(path) for path in SCRIPTS}
    assert not ahead & started


@pytest.mark.parametrize("path", SCRIPTS, ids=name_of)
def test_every_import_leads_to_a_file_and_a_name(path: Path) -> None:
    for names, target in re.findall(r"import \{([^}]+)\} from \"([^\"]+)\"", path.read_text()):
        text = (path.parent / target).resolve().read_text()
        for name in names.split(","):
            wanted = re.escape(name.strip())
            assert re.search(rf"export (?:async )?(?:function|const|class) {wanted}\b", text), (target, name)
