"""The console in a real browser: every view shows what is in the broker, and does what it says."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio
from tests.broker.bed import Client, serving
from tests.broker.console_bed import HOSTILE, chromium, expect, watched

from forebay.broker import Broker

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.xdist_group("chromium")]

BIG = "12345678901234567890"
"""A number that JavaScript cannot hold."""
NONE = "\N{EN DASH}"
"""What stands where a number is not known yet."""


@dataclass(slots=True)
class Bed:
    """A broker with something in it, and a browser."""

    broker: Broker
    client: Client
    browser: Any

    def page(self, **options: Any) -> Any:
        return watched(self.browser, self.broker.url, **options)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bed() -> AsyncIterator[Bed]:
    async with chromium() as browser, serving(broker_id="broker-seven") as (broker, client):
        await _seed(client)
        yield Bed(broker, client, browser)


async def _seed(client: Client) -> None:
    settings = {"compact_min_age_ms": 0, "retention_ms": 7 * 86_400_000}
    await client.post("/topics", {"topic": "orders", "partitions": 3, "settings": settings})
    for number in range(4):
        await client.produce("orders", 0, [json.dumps({"order": number})], keys=[f"customer-{number}"])
    await client.post("/compaction", {"topic": "orders"})
    await client.produce("orders", 0, ["after the compaction"])
    await client.produce("orders", 2, ["sealed"])
    await client.post("/topics/orders/partitions/2/fence", {})
    await client.post("/topics", {"topic": "quiet"})
    await client.consume("orders", 0, 1)


def cell(page: Any, table: str, row: str, column: str) -> Any:
    """The cell of a row that begins with a text, under a heading."""
    region = page.get_by_role("region", name=table, exact=True)
    place = (
        f"""(table) => [...table.querySelectorAll("th")].findIndex((one) => one.textContent === {column!r})"""
    )
    return _Cell(region, place, row)


@dataclass(slots=True)
class _Cell:
    region: Any
    place: str
    row: str

    async def has(self, text: str) -> None:
        await expect(self.region).to_be_visible()
        at = await self.region.evaluate(self.place)
        assert at >= 0, "there is no such column"
        rows = self.region.locator("tbody tr").filter(
            has=self.region.page.locator(f"xpath=./td[1][normalize-space()='{self.row}']")
        )
        await expect(rows.locator("td").nth(at)).to_have_text(text)


async def test_overview_shows_traffic_latency_cost_and_who_this_is(bed: Bed) -> None:
    async with bed.page() as seen:
        page = await seen.open("overview")
        await expect(page.locator(".facts")).to_contain_text("broker-seven")
        await expect(page.locator(".facts")).to_contain_text("write, read")
        await expect(page.locator("#broker")).to_have_text("broker-seven")
        for _ in range(3):
            await bed.client.produce("orders", 1, ["x"] * 50)
        card = page.locator(".card", has_text="Records in")
        await expect(card.locator(".value")).not_to_have_text(NONE)
        await expect(card.locator(".value")).not_to_have_text("0")
        await expect(page.locator(".card", has_text="Produce p99").locator(".value")).to_contain_text("s")
        await expect(page.locator(".card", has_text="Cost per month").locator(".value")).to_contain_text("$")
        await expect(page.locator("svg.chart polyline").first).to_be_attached()
        await cell(page, "Cost by flush interval", "1 ms", "").has("now")
        await expect(
            page.get_by_role("region", name="Cost by flush interval").locator("tbody tr")
        ).to_have_count(10)
        await expect(page.get_by_role("region", name="Requests by path")).to_contain_text("/produce")
        label = await page.locator("svg.chart").first.get_attribute("aria-label")
        assert label.startswith("Records per second: in ")


async def test_topics_are_listed_and_filtered(bed: Bed) -> None:
    async with bed.page() as seen:
        page = await seen.open("topics")
        await cell(page, "Topics", "orders", "Partitions").has("3")
        await cell(page, "Topics", "orders", "State").has("1 fenced")
        await cell(page, "Topics", "orders", "Retention").has("7 d")
        await cell(page, "Topics", "quiet", "Records").has("0")
        await page.get_by_label("Filter by name").fill("QUI")
        await expect(page.locator("tbody tr")).to_have_count(1)
        await page.get_by_label("Filter by name").fill("no such")
        await expect(page.get_by_text("No topics.")).to_be_visible()


async def test_topic_shows_offsets_sizes_state_epoch_and_lag_of_its_partitions(bed: Bed) -> None:
    objects = (await bed.client.get("/topics/orders/partitions/2/objects")).json()
    async with bed.page() as seen:
        page = await seen.open("topics/orders")
        for column, text in (
            ("State", "fenced"),
            ("Epoch", "1"),
            ("Earliest", "1"),
            ("Next", "2"),
            ("Records", "1"),
            ("Size", f"{objects['bytes']} B"),
            ("Entries", "1"),
            ("Compaction lag", "1"),
            ("Compaction", "idle"),
        ):
            await cell(page, "Partitions", "2", column).has(text)
        await cell(page, "Partitions", "0", "State").has("open")
        await page.get_by_role("link", name="Partition 2").click()
        await expect(page.get_by_role("heading", level=1)).to_have_text("Partition 2")


async def test_partition_shows_its_objects_pages_them_and_explains_a_record(bed: Bed) -> None:
    for number in range(55):
        await bed.client.produce("paged", 0, [f"record {number}"])
    async with bed.page() as seen:
        page = await seen.open("topics/orders/0")
        await expect(page.get_by_role("region", name="Objects")).to_contain_text("compacted")
        await expect(page.locator(".card", has_text="Compaction lag").locator(".value")).not_to_have_text(
            NONE
        )
        await page.get_by_label("Offset", exact=True).fill("1")
        await page.get_by_role("button", name="Where is it?").click()
        await expect(page.get_by_text("key of 10 bytes")).to_be_visible()
        await page.get_by_label("Offset", exact=True).fill("999")
        seen.allowed.append("status of 409")
        await page.get_by_role("button", name="Where is it?").click()
        await expect(page.get_by_role("alert")).to_contain_text("What to do:")

        await seen.open("topics/paged/0")
        rows = page.get_by_role("region", name="Objects").locator("tbody tr")
        await expect(rows).to_have_count(50)
        await page.get_by_role("button", name="Next page").click()
        await expect(rows).to_have_count(5)
        await expect(rows.last.locator("td").first).to_have_text("55")
        await page.get_by_role("button", name="First page").click()
        await expect(rows).to_have_count(50)


async def test_compaction_can_be_run_from_the_page(bed: Bed) -> None:
    await bed.client.post("/topics", {"topic": "folded", "settings": {"compact_min_age_ms": 0}})
    for number in range(3):
        await bed.client.produce("folded", 0, [str(number)])
    async with bed.page() as seen:
        page = await seen.open("topics/folded")
        await cell(page, "Partitions", "0", "Compaction lag").has("3")
        await page.get_by_role("button", name="Compact now").click()
        await expect(page.get_by_text("records compacted.")).to_be_visible()
        [state] = (await bed.client.get("/compaction?topic=folded")).json()["partitions"]
        assert state["cursor"] > 1
        await cell(page, "Partitions", "0", "Compaction cursor").has(str(state["cursor"]))


async def test_live_tail_shows_a_record_that_is_produced_meanwhile(bed: Bed) -> None:
    await bed.client.produce("live", 0, ["before"])
    async with bed.page() as seen:
        page = await seen.open("tail?topic=live&partition=0&from=latest")
        await expect(page.locator(".state")).to_have_text("Live")
        await expect(page.get_by_text("Waiting for records.")).to_be_visible()
        value = json.dumps({"id": 0, "text": 'a, "b": {}'}).replace("0,", f"{BIG},")
        headers = [[["trace", "t-1"], ["none", None]]]
        await bed.client.produce("live", 0, [value], keys=["k-1"], headers=headers)
        record = page.locator(".record")
        await expect(record).to_have_count(1)
        for text in ("k-1", "trace", "t-1", "null", value):
            await expect(record).to_contain_text(text)
        await page.get_by_label("Show as").select_option("json")
        await expect(record.locator("pre")).to_have_text(
            f'{{\n  "id": {BIG},\n  "text": "a, \\"b\\": {{}}"\n}}', use_inner_text=True
        )
        await bed.client.produce("live", 0, [{"base64": "AP9B"}])
        await page.get_by_label("Show as").select_option("hex")
        await expect(record.first.locator("pre")).to_contain_text("00 ff 41")
        await expect(record.first.locator("pre")).to_contain_text("..A")


async def test_filter_shows_what_matches_and_says_when_it_is_no_expression(bed: Bed) -> None:
    await bed.client.produce("sieved", 0, ["alpha", "beta", "gamma"], keys=["K1", None, None])
    async with bed.page() as seen:
        page = await seen.open("tail?topic=sieved&from=earliest")
        record = page.locator(".record")
        await expect(record).to_have_count(3)
        await expect(record.first).to_contain_text("gamma")
        for typed, count in (("ALPHA", 1), ("k1", 1), ("/^(beta|gamma)$/", 2), ("zeta", 0), ("", 3)):
            await page.get_by_label("Filter").fill(typed)
            await expect(record).to_have_count(count)
        await page.get_by_label("Filter").fill("/(/")
        await expect(page.get_by_text("The filter is no regular expression")).to_be_visible()
        await page.get_by_label("Filter").fill("delta")
        await bed.client.produce("sieved", 0, ["epsilon", "delta"])
        await expect(record).to_have_count(1)
        await expect(page.get_by_text("5 records seen")).to_be_visible()


async def test_paused_tail_goes_on_where_it_was_and_misses_nothing(bed: Bed) -> None:
    await bed.client.produce("paused", 0, ["one"])
    async with bed.page() as seen:
        page = await seen.open("tail?topic=paused&from=earliest")
        await expect(page.locator(".record")).to_have_count(1)
        await page.get_by_role("button", name="Pause").click()
        await expect(page.locator(".state")).to_have_text("Paused")
        await bed.client.produce("paused", 0, ["two", "three"])
        await page.locator("body").press("p")
        await expect(page.locator(".record pre")).to_have_text(["three", "two", "one"])
        await page.get_by_role("button", name="Clear").click()
        await expect(page.locator(".record")).to_have_count(0)


async def test_tail_of_what_is_not_there_says_so(bed: Bed) -> None:
    async with bed.page() as seen:
        seen.allowed.append("status of 404")
        page = await seen.open("tail?topic=nothing-here")
        await expect(page.get_by_role("alert").filter(has_text="What to do")).to_be_visible()
        await expect(page.locator(".state")).to_have_text("Stopped")


async def test_record_is_produced_with_key_headers_and_partition(bed: Bed) -> None:
    await bed.client.post("/topics", {"topic": "made", "partitions": 2})
    async with bed.page() as seen:
        page = await seen.open("produce?topic=made")
        await page.get_by_label("Partition").fill("1")
        await page.get_by_label("Key", exact=True).fill("00ff")
        await page.get_by_label("Key as").select_option("hex")
        await page.get_by_role("textbox", name="Value", exact=True).first.fill("grüße")
        await page.get_by_role("button", name="Add a header").click()
        await page.get_by_label("Name").fill("trace")
        await page.locator(".header-row").get_by_label("Value").fill("t-9")
        await page.get_by_role("button", name="Produce").click()
        await expect(page.get_by_text("Written at offset 1.")).to_be_visible()
        await page.locator("textarea").fill("not base64!")
        await page.get_by_label("Value as").select_option("base64")
        await page.locator("textarea").press("Control+Enter")
        await expect(page.get_by_role("alert")).to_contain_text("Value is no Base64")
        await page.locator("textarea").fill("AP8=")
        await page.locator("textarea").press("Control+Enter")
        await expect(page.get_by_text("Written at offset 2.")).to_be_visible()
    [found] = (await bed.client.consume("made", 1, 1)).json()["results"]
    first, second = found["records"]
    assert (first["key"], first["value"], first["headers"]) == (
        {"base64": "AP8="},
        "grüße",
        [["trace", "t-9"]],
    )
    assert second["value"] == {"base64": "AP8="}


async def test_refused_record_comes_with_a_hint(bed: Bed) -> None:
    async with bed.page() as seen:
        seen.allowed.append("status of 409")
        page = await seen.open("produce?topic=orders&partition=2")
        await page.locator("textarea").fill("too late")
        await page.get_by_role("button", name="Produce").click()
        await expect(page.get_by_role("alert")).to_contain_text("Fenced")
        await expect(page.get_by_role("alert")).to_contain_text("What to do:")


async def test_record_whose_answer_is_lost_is_written_once(bed: Bed) -> None:
    async with bed.page() as seen:
        seen.allowed.append("ERR_FAILED")
        page = await seen.open("produce?topic=once")

        async def lose(route: Any) -> None:
            await route.fetch()
            await route.abort()

        await page.route("**/produce", lose, times=1)
        await page.locator("textarea").fill("only once")
        await page.get_by_role("button", name="Produce").click()
        await expect(page.get_by_role("alert")).to_contain_text("It may have been written")
        await page.get_by_role("button", name="Produce").click()
        await expect(page.get_by_text("and not a second time")).to_be_visible()
        await page.get_by_role("button", name="Produce").click()
        await expect(page.get_by_text("Written at offset 2.")).to_be_visible()
    [found] = (await bed.client.consume("once", 0, 1)).json()["results"]
    assert [record["value"] for record in found["records"]] == ["only once"] * 2


async def test_group_shows_lag_and_is_reset_only_after_a_dry_run(bed: Bed) -> None:
    await bed.client.produce("read", 0, ["a", "b", "c"])
    await bed.client.post(
        "/groups/readers/offsets", {"offsets": [{"topic": "read", "partition": 0, "offset": 3}]}
    )

    async def committed() -> int:
        found = (await bed.client.get("/groups/readers")).json()
        return int(found["partitions"][0]["committed"])

    async with bed.page() as seen:
        page = await seen.open("groups")
        await cell(page, "Groups", "readers", "Lag in records").has("1")
        await page.get_by_role("link", name="readers").click()
        await cell(page, "Partitions", "read", "Committed").has("3")
        now = page.get_by_role("button", name="Reset now")
        await expect(now).to_be_hidden()
        await page.get_by_role("button", name="Show what it would do").click()
        await cell(page, "What the reset would do", "read", "After the reset").has("1")
        assert await committed() == 3
        await page.get_by_label("To", exact=True).select_option("offset")
        await expect(now).to_be_hidden()
        await page.get_by_role("button", name="Show what it would do").click()
        await expect(page.get_by_role("alert")).to_contain_text("The offset is missing.")
        await page.get_by_label("Offset", exact=True).fill("2")
        await page.get_by_label("Topic", exact=True).select_option("read")
        await page.get_by_label("Partition", exact=True).fill("0")
        await page.get_by_role("button", name="Show what it would do").click()
        await cell(page, "What the reset would do", "read", "After the reset").has("2")
        assert await committed() == 3
        await now.click()
        await expect(page.get_by_text("Done: 1 partition moved.")).to_be_visible()
        assert await committed() == 2
        await cell(page, "Partitions", "read", "Committed").has("2")


async def test_hostile_records_are_shown_as_text(bed: Bed) -> None:
    await bed.client.produce("hostile", 0, [HOSTILE], keys=[HOSTILE], headers=[[[HOSTILE, HOSTILE]]])
    await bed.client.produce("hostile", 0, [json.dumps({HOSTILE: HOSTILE})])
    async with bed.page() as seen:
        page = await seen.open("tail?topic=hostile&from=earliest")
        await expect(page.locator(".record")).to_have_count(2)
        for form in ("text", "json", "hex", "text"):
            await page.get_by_label("Show as").select_option(form)
            await expect(page.locator(".record")).to_have_count(2)
        await expect(page.locator(".record").last.locator("pre")).to_have_text(HOSTILE)
        await expect(page.locator(".record").last.locator(".key bdi")).to_have_text(HOSTILE)
        await _is_unharmed(page)


async def _is_unharmed(page: Any) -> None:
    assert await page.evaluate("window.pwned") is None
    assert await page.locator("main img, main script, main iframe").count() == 0


async def test_hostile_names_and_errors_are_shown_as_text(bed: Bed) -> None:
    """The broker takes no such names; another version, or something in between, might."""
    settings = {"retention_ms": None, "retention_bytes": None, "compaction": True, "compact_min_age_ms": 0}
    topic = {
        "topic": HOSTILE,
        "topic_id": "1",
        "partitions": 1,
        "created_at_ms": 1,
        "state": HOSTILE,
        "settings": {**settings, "target_bytes": 1},
    }
    error = {"type": HOSTILE, "message": HOSTILE, "hint": HOSTILE, "request_id": HOSTILE}
    async with bed.page() as seen:
        seen.allowed += ["status of 418", "status of 400"]
        page = seen.page
        await page.route("**/topics", lambda route: route.fulfill(json={"topics": [topic]}))
        await page.route("**/groups", lambda route: route.fulfill(json={"groups": [HOSTILE]}))
        await page.route("**/compaction*", lambda route: route.fulfill(status=418, json={"error": error}))
        await page.route("**/topics/*", lambda route: route.fulfill(json={**topic, "offsets": []}))
        await seen.open("topics")
        link = page.get_by_role("region", name="Topics").get_by_role("link")
        await expect(link).to_have_text(HOSTILE)
        await link.click()
        await expect(page.get_by_role("heading", level=1)).to_have_text(HOSTILE)
        await expect(page.locator(".problem strong")).to_have_text(HOSTILE)
        await _is_unharmed(page)
        await seen.open("groups")
        await expect(page.get_by_role("region", name="Groups").get_by_role("link")).to_have_text(HOSTILE)
        await _is_unharmed(page)
        await seen.open("tail")
        await _is_unharmed(page)


async def test_unreachable_broker_is_told_and_the_page_recovers(bed: Bed) -> None:
    async with bed.page() as seen:
        seen.allowed.append("ERR_FAILED")
        page = seen.page
        await page.route("**/metrics", lambda route: route.abort())
        await seen.open("overview")
        await expect(page.get_by_role("alert")).to_contain_text("The broker does not answer.")
        await page.unroute("**/metrics")
        await page.locator("body").press("r")
        await expect(page.locator(".facts")).to_contain_text("broker-seven")
        await expect(page.get_by_role("alert")).to_have_count(0)


async def test_view_that_does_not_exist_says_so(bed: Bed) -> None:
    async with bed.page() as seen:
        for view in ("nowhere", "topics/%ff"):
            page = await seen.open(view)
            await expect(page.get_by_role("heading", level=1)).to_have_text("Not found")
