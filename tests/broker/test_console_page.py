"""The console as a page: token, keyboard, themes, narrow screens, and the helpers that draw it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio
from tests.broker.bed import Client, parts, serving
from tests.broker.console_bed import chromium, expect, watched

from forebay.broker._routes import Action
from forebay.broker._tokens import Tokens

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.xdist_group("chromium")]

VIEWS = (
    "overview",
    "topics",
    "topics/orders",
    "topics/orders/0",
    "tail?topic=orders&from=earliest",
    "produce",
    "groups",
    "groups/readers",
)


@dataclass(slots=True)
class Bed:
    """Two brokers, one of which wants tokens, and a browser."""

    url: str
    client: Client
    guarded_url: str
    token: str
    reader: str
    browser: Any

    def page(self, **options: Any) -> Any:
        return watched(self.browser, self.url, **options)

    def guarded(self) -> Any:
        return watched(self.browser, self.guarded_url)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bed() -> AsyncIterator[Bed]:
    kept = parts()
    tokens = Tokens(kept.coordinator, clock=kept.clock)
    _, token = await tokens.issue("all", actions=list(Action))
    _, reader = await tokens.issue("reader", actions=[Action.READ])
    async with (
        chromium() as browser,
        serving() as (broker, client),
        serving(made_of=kept, require_tokens=True) as (guarded, behind),
    ):
        long_name = "a-topic-with-a-name-of-two-hundred-letters" + "-and-more" * 17
        for topic in ("orders", long_name):
            await client.produce(topic, 0, [json.dumps({"n": 1, "text": "x" * 300})], keys=["k" * 150])
        place = {"topic": "orders", "partition": 0, "offset": 1}
        await client.post("/groups/readers/offsets", {"offsets": [place]})
        behind.headers = {"Authorization": f"Bearer {token}"}
        await behind.produce("secret", 0, ["for your eyes only"])
        yield Bed(broker.url, client, guarded.url, token, reader, browser)


# -- token


async def test_token_is_asked_for_kept_in_the_tab_and_never_in_an_address(bed: Bed) -> None:
    async with bed.guarded() as seen:
        seen.allowed.append("status of 401")
        page = await seen.open("topics")
        dialog = page.get_by_role("dialog", name="Token")
        await expect(dialog).to_contain_text("This broker wants a token.")
        await expect(page.get_by_label("Token of this broker")).to_be_focused()
        await page.keyboard.type("fb_forged")
        await page.keyboard.press("Enter")
        await expect(dialog).to_contain_text("This token is not accepted")
        await page.keyboard.type(bed.token)
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("link", name="secret")).to_be_visible()
        await expect(dialog).to_be_hidden()
        await expect(page.locator("#token-button")).to_have_text("Token: set")
        await seen.open("tail?topic=secret&from=earliest")
        await expect(page.locator(".record")).to_contain_text("for your eyes only")
        await page.reload()
        await expect(page.locator(".record")).to_contain_text("for your eyes only")

        tails = [one for one in seen.requests if "/tail?" in one.url]
        assert tails
        assert [await one.header_value("authorization") for one in tails] == [f"Bearer {bed.token}"] * len(
            tails
        )
        assert not [one.url for one in seen.requests if "fb_" in one.url]
        assert "fb_" not in page.url
        assert await page.evaluate("Object.values(sessionStorage)") == [bed.token]
        assert "fb_" not in json.dumps(await page.evaluate("Object.values(localStorage)"))
        assert await page.evaluate("document.cookie") == ""
        assert bed.token not in await page.content()


async def test_token_that_is_not_given_is_an_error_and_no_nagging(bed: Bed) -> None:
    async with bed.guarded() as seen:
        seen.allowed.append("status of 401")
        page = await seen.open("groups")
        dialog = page.get_by_role("dialog", name="Token")
        await expect(dialog).to_be_visible()
        await page.keyboard.press("Escape")
        await expect(page.get_by_role("alert")).to_contain_text("forebay tokens issue makes one")
        async with page.expect_response("**/groups") as again:
            await page.locator("body").press("r")
        assert (await again.value).status == 401
        await page.evaluate("new Promise((resolve) => setTimeout(resolve))")
        await expect(dialog).to_be_hidden()
        await page.locator("#token-button").click()
        await page.keyboard.type(bed.token)
        await page.keyboard.press("Enter")
        await expect(page.get_by_text("No groups.")).to_be_visible()
        await page.locator("#token-button").click()
        await page.get_by_role("button", name="Forget it").click()
        await expect(dialog).to_contain_text("This broker wants a token.")
        assert await page.evaluate("sessionStorage.length") == 0


async def test_token_that_allows_less_shows_the_rest(bed: Bed) -> None:
    async with bed.guarded() as seen:
        seen.allowed += ["status of 401", "status of 403"]
        page = await seen.open("overview")
        await expect(page.get_by_role("dialog", name="Token")).to_be_visible()
        await page.keyboard.type(bed.reader)
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("alert").first).to_contain_text("AccessDenied")
        await seen.open("topics")
        await expect(page.get_by_role("link", name="secret")).to_be_visible()


# -- keyboard


async def test_everything_is_reached_with_the_keyboard_alone(bed: Bed) -> None:
    async with bed.page() as seen:
        page = await seen.open("overview")
        await expect(page.locator(".facts")).to_be_visible()
        press = page.keyboard.press
        await press("Tab")
        await expect(page.locator("#skip")).to_be_focused()
        outline = "getComputedStyle(document.activeElement).outlineStyle"
        assert await page.evaluate(outline) == "solid"
        await press("Enter")
        await expect(page.locator("main")).to_be_focused()
        await press("g")
        await press("t")
        await expect(page.get_by_role("heading", level=1)).to_have_text("Topics")
        await expect(page.locator("main")).to_be_focused()
        await expect(page.get_by_role("link", name="orders")).to_be_visible()
        await press("/")
        await expect(page.get_by_label("Filter by name")).to_be_focused()
        await page.keyboard.type("orders g t")
        await expect(page.get_by_label("Filter by name")).to_have_value("orders g t")
        await page.get_by_label("Filter by name").fill("orders")
        await expect(page.locator("tbody tr")).to_have_count(1)
        await press("Tab")
        await press("Tab")
        await expect(page.get_by_role("link", name="orders")).to_be_focused()
        assert await page.evaluate(outline) == "solid"
        await press("Enter")
        await expect(page.get_by_role("heading", level=1)).to_have_text("orders")
        for key, title in (("l", "Live tail"), ("g", "Groups"), ("p", "Produce a record"), ("o", "Overview")):
            await page.evaluate("document.activeElement.blur()")
            await press("g")
            await press(key)
            await expect(page.get_by_role("heading", level=1)).to_have_text(title)
        await expect(page.locator("#nav a[aria-current]")).to_have_text("Overview")
        assert await page.title() == "Overview \N{EN DASH} Forebay"


async def test_shortcuts_are_listed_and_can_be_turned_off(bed: Bed) -> None:
    async with bed.page(fresh=True) as seen:
        page = await seen.open("groups")
        await expect(page.get_by_role("link", name="readers")).to_be_visible()
        await page.keyboard.press("?")
        dialog = page.get_by_role("dialog", name="Keyboard shortcuts")
        await expect(dialog).to_contain_text("live tail")
        await dialog.get_by_role("checkbox").uncheck()
        await page.keyboard.press("Escape")
        await expect(dialog).to_be_hidden()
        await page.keyboard.press("g")
        await page.keyboard.press("t")
        await page.keyboard.press("?")
        await expect(dialog).to_be_hidden()
        await expect(page.get_by_role("heading", level=1)).to_have_text("Groups")


async def test_record_is_produced_with_the_keyboard_alone(bed: Bed) -> None:
    async with bed.page() as seen:
        page = await seen.open("produce?topic=typed")
        await expect(page.locator("textarea")).to_be_visible()
        await page.keyboard.press("/")
        await expect(page.get_by_label("Topic")).to_be_focused()
        for _ in range(4):
            await page.keyboard.press("Tab")
        await expect(page.locator("textarea")).to_be_focused()
        await page.keyboard.type("by hand")
        await page.keyboard.press("Control+Enter")
        await expect(page.get_by_text("Written at offset 1.")).to_be_visible()
    [found] = (await bed.client.consume("typed", 0, 1)).json()["results"]
    assert found["records"][0]["value"] == "by hand"


# -- looks


async def test_dark_and_light_follow_the_system_and_the_switch(bed: Bed) -> None:
    light, dark = "rgb(251, 252, 253)", "rgb(16, 22, 28)"
    async with bed.page(color_scheme="dark") as seen:
        page = await seen.open("topics")
        body, switch = page.locator("body"), page.locator("#theme-button")
        await expect(body).to_have_css("background-color", dark)
        await page.emulate_media(color_scheme="light")
        await expect(body).to_have_css("background-color", light)
        await page.emulate_media(color_scheme="dark")
        await switch.click()
        await expect(switch).to_have_text("Theme: light")
        await expect(body).to_have_css("background-color", light)
        await page.reload()
        await expect(switch).to_have_text("Theme: light")
        await expect(body).to_have_css("background-color", light)
        await page.emulate_media(color_scheme="light")
        await page.locator("body").press("d")
        await expect(body).to_have_css("background-color", dark)
        await page.locator("body").press("d")
        await expect(switch).to_have_text("Theme: auto")
        await expect(body).to_have_css("background-color", light)


CONTRAST = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const channels = (color) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3).map((one) => {
      const share = one / 255;
      return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
  };
  const luminance = (name) => {
    const [red, green, blue] = channels(getComputedStyle(document.documentElement).getPropertyValue(name));
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };
  const ratio = (one, other) => {
    const [high, low] = [luminance(one), luminance(other)].sort((a, b) => b - a);
    return (high + 0.05) / (low + 0.05);
  };
  const pairs = [["--on-accent", "--accent"], ["--bad", "--bad-soft"], ["--accent", "--soft"]];
  for (const name of ["--text", "--quiet", "--accent", "--good", "--warn", "--bad"]) {
    pairs.push([name, "--bg"], [name, "--panel"]);
  }
  return pairs.map(([one, other]) => [one, other, ratio(one, other)]).filter((found) => found[2] < 4.5);
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_texts_stand_out_from_their_background(bed: Bed, scheme: str) -> None:
    async with bed.page(color_scheme=scheme) as seen:
        page = await seen.open("produce")
        assert await page.evaluate(CONTRAST) == []


async def test_narrow_screens_scroll_tables_and_not_the_page(bed: Bed) -> None:
    async with bed.page(viewport={"width": 360, "height": 700}) as seen:
        for view in VIEWS:
            page = await seen.open(view)
            await expect(page.locator("main tbody tr, main .record, main form").first).to_be_visible()
            wide = await page.evaluate("document.documentElement.scrollWidth - innerWidth")
            assert wide <= 0, view


async def test_a_phone_shows_all_views_in_one_line_and_the_lag_of_a_group(bed: Bed) -> None:
    async with bed.page(viewport={"width": 360, "height": 700}) as seen:
        page = await seen.open("groups")
        lines = await page.evaluate("[...document.querySelectorAll('#nav a')].map((link) => link.offsetTop)")
        assert len(set(lines)) == 1, lines
        await expect(page.locator("main tbody tr").first).to_be_visible()
        lag = page.locator("main th", has_text="Lag in records")
        right = await lag.evaluate("(cell) => cell.getBoundingClientRect().right")
        assert right <= 360, "the lag is out of sight"


async def test_cards_fill_the_width_of_the_tables_below_them(bed: Bed) -> None:
    async with bed.page(viewport={"width": 1280, "height": 800}) as seen:
        for view in ("overview", "topics/orders/0", "groups/readers"):
            page = await seen.open(view)
            await expect(page.locator(".cards .card").first).to_be_visible()
            missing = await page.evaluate(
                """() => document.querySelector(".cards").getBoundingClientRect().right
                    - document.querySelector(".cards .card:last-child").getBoundingClientRect().right"""
            )
            assert abs(missing) < 1, view


async def test_charts_on_a_phone_show_whole_labels_and_an_idle_one_no_number_twice(bed: Bed) -> None:
    async with bed.page(viewport={"width": 360, "height": 700}) as seen:
        page = await seen.open("overview")
        await expect(page.locator(".chart text").first).to_be_visible()
        cut = await page.evaluate(
            """() => [...document.querySelectorAll(".chart text")].filter((text) => text.getBBox().x < 0)
                .map((text) => text.textContent)"""
        )
        assert cut == []
        for labels in await page.evaluate(
            """() => [...document.querySelectorAll(".chart")].map((chart) =>
                [...chart.querySelectorAll("text")].slice(0, 3).map((text) => text.textContent))"""
        ):
            assert len(set(labels)) == len(labels), labels


async def test_every_control_of_every_view_has_a_name(bed: Bed) -> None:
    nameless = """() => [...document.querySelectorAll("button, input, select, textarea, a, [role]")]
      .filter((node) => !node.matches("#said, [role=status], [role=alert]"))
      .filter((node) => !node.getAttribute("aria-label") && !node.textContent.trim())
      .filter((node) => !node.labels?.[0]?.textContent)
      .map((node) => node.outerHTML)"""
    async with bed.page() as seen:
        for view in VIEWS:
            page = await seen.open(view)
            await expect(page.locator("main tbody tr, main .record, main form").first).to_be_visible()
            assert await page.evaluate(nameless) == [], view
            assert await page.locator("h1").count() == 1
            repeated = "(ids => ids.filter((id, at) => ids.indexOf(id) !== at))"
            assert (
                await page.evaluate(f'{repeated}([...document.querySelectorAll("[id]")].map((n) => n.id))')
                == []
            )


# -- helpers


async def test_helpers_draw_what_they_are_given(bed: Bed) -> None:
    script = """async () => {
      const format = await import("/console/js/format.js");
      const { quantile } = await import("/console/js/samples.js");
      const fails = (text) => { try { format.indentJson(text); return false; } catch { return true; } };
      const bucket = (count, at) => ({ le: at + 1, count });
      const spread = (...counts) => ({ count: counts.at(-1), buckets: counts.map(bucket) });
      return {
        nested: format.indentJson('{"a":[1,{"b":"x,{}\\\\"y"}],"c":[ ],"d":{}}'),
        number: format.indentJson('[1e400,-0.10]'),
        broken: fails('{"a":'),
        hex: format.hexDump(new Uint8Array([...Array(17).keys()])),
        none: format.hexDump(new Uint8Array()),
        sizes: [0, 1023, 1024, 1536, 5 * 1024 ** 3].map(format.size),
        times: [0, 0.00005, 0.25, 61, 7200, 900000].map(format.duration),
        money: [0, 0.001, 12.345, 1234.5].map(format.dollars),
        strange: format.time(1e300),
        quantiles: [
          quantile(spread(0, 10, 10), null, 0.5),
          quantile(spread(5, 10, 10), spread(5, 5, 5), 0.5),
          quantile(spread(3, 3, 3), spread(3, 3, 3), 0.5),
        ],
      };
    }"""
    async with bed.page() as seen:
        page = await seen.open("produce")
        found = await page.evaluate(script)
    assert found["nested"] == (
        '{\n  "a": [\n    1,\n    {\n      "b": "x,{}\\"y"\n    }\n  ],\n  "c": [],\n  "d": {}\n}'
    )
    assert found["number"] == "[\n  1e400,\n  -0.10\n]"
    assert found["broken"] is True
    assert found["hex"].splitlines() == [
        "00000000  00 01 02 03 04 05 06 07  08 09 0a 0b 0c 0d 0e 0f  ................",
        f"00000010  10{' ' * 48}.",
    ]
    assert found["none"] == ""
    assert found["sizes"] == ["0 B", "1,023 B", "1 KiB", "1.5 KiB", "5 GiB"]
    assert found["times"] == ["0 s", "50 \N{MICRO SIGN}s", "250 ms", "61 s", "2 h", "10.4 d"]
    assert found["money"] == ["$0", "< $0.01", "$12.35", "$1,235"]
    assert found["strange"].endswith(" ms")
    assert found["quantiles"] == [1.5, 1.5, None]
