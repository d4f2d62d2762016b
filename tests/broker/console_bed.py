"""What the tests of the console stand on: a real browser, and a page that may not do anything wrong unseen.

Broker and browser share the loop of the module. Every page is watched: requests to elsewhere, errors on the
console and violations of the content policy fail the test that made them, when its page is closed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from forebay.testing.servers import cache_directory

async_api = pytest.importorskip("playwright.async_api", reason="Playwright is not installed")
Page = async_api.Page
expect = async_api.expect

INSTALL_S_MAX = 240
"""Seconds that apt has to install the browser."""
ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
WAIT_MS = 45_000
"""Milliseconds that an expectation has: much more than it needs, since the machine may be busy."""
HOSTILE = """<img src=x onerror="window.pwned=1"><script>window.pwned=1</script>"'&{{7*7}}\u202egpj.exe"""
_WATCH = """
addEventListener("securitypolicyviolation", (event) => {
  console.error(`POLICY ${event.violatedDirective} ${event.blockedURI}`);
});
"""

expect.set_options(timeout=WAIT_MS)


def _installed() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser")


def executable() -> str:
    """The browser. With `CI=true` it is installed where it is missing; elsewhere its tests are skipped."""
    path, words = _installed(), "Chromium is not installed (apt install chromium)"
    if path is None and os.environ.get("CI") == "true" and shutil.which("apt-get"):
        path, words = _install()
    if path is None:
        pytest.skip(words)
    return path


def _install() -> tuple[str | None, str]:
    """By one worker at a time: apt may remove the packages of another that is just installing them."""
    place = cache_directory()
    place.mkdir(parents=True, exist_ok=True)
    with (place / ".chromium.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (path := _installed()) is not None:
            return path, ""
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for command in (["apt-get", "update"], ["apt-get", "install", "-y", "chromium"]):
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=INSTALL_S_MAX, check=False
            )
        return _installed(), f"Chromium could not be installed: {done.stderr.strip()[-300:]}"


@asynccontextmanager
async def chromium() -> AsyncIterator[Any]:
    """The browser, running."""
    path = executable()
    async with async_api.async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=list(ARGUMENTS))
        try:
            yield browser
        finally:
            await browser.close()


@dataclass  # Without slots: Playwright keeps its own things on whoever listens.
class Watched:
    """A page, and what it did."""

    page: Any
    origin: str
    allowed: list[str] = field(default_factory=list)
    """Parts of messages that the test expects on the console, such as a status it provokes."""
    messages: list[str] = field(default_factory=list)
    requests: list[Any] = field(default_factory=list)

    def failed(self, error: Any) -> None:
        """An error that nothing caught."""
        self.messages.append(f"uncaught: {error}")

    def said(self, line: Any) -> None:
        """A line of the console; chatter is fine."""
        if line.type in ("error", "warning"):
            self.messages.append(line.text)

    def asked(self, request: Any) -> None:
        """A request on its way."""
        self.requests.append(request)

    async def open(self, view: str) -> Any:
        """Show a view, and return the page."""
        await self.page.goto(f"{self.origin}/console/#/{view}")
        return self.page

    def check(self) -> None:
        """Nothing wrong was seen."""
        wrong = [text for text in self.messages if not any(part in text for part in self.allowed)]
        assert wrong == []
        outside = [one.url for one in self.requests if not one.url.startswith(f"{self.origin}/")]
        assert outside == []


@asynccontextmanager
async def watched(browser: Any, origin: str, **options: Any) -> AsyncIterator[Watched]:
    """A new page, checked at the end; with options in a context of its own, as `fresh=True` makes one too."""
    own = bool(options)
    options.pop("fresh", None)
    context = browser.contexts[0] if browser.contexts and not own else await browser.new_context(**options)
    page = await context.new_page()
    try:
        page.set_default_timeout(WAIT_MS)
        await page.add_init_script(_WATCH)
        found = Watched(page, origin)
        page.on("pageerror", found.failed)
        page.on("console", found.said)
        page.on("request", found.asked)
        yield found
        found.check()
    finally:
        await (context if own else page).close()
