// Consumer groups: lag, members, and a reset that shows first what it would do.

import { each, get, paths, post } from "./api.js";
import { card, el, field, problemBox, say, select, setText } from "./dom.js";
import { duration, number, plural, time } from "./format.js";
import { Table } from "./table.js";

const LOOK_MS = 5000;
const DETAILS_MAX = 100;
const TARGETS = [["earliest", "the beginning"], ["latest", "the end"], ["offset", "an offset"], ["time", "a time"]];

function list(root, { life }) {
  const trouble = el("div");
  const details = new Map();
  const filter = el("input", { type: "search", autocomplete: "off", spellcheck: "false" });
  let names = [];
  const of = (name) => details.get(name);
  const table = new Table({
    caption: "Groups",
    key: (name) => name,
    none: "No groups. A group appears with its first commit or its first member.",
    columns: [
      { title: "Group", cell: (name) => ({ text: name, href: `#/groups/${encodeURIComponent(name)}` }) },
      { title: "Lag in records", number: true, cell: (name) => number(of(name)?.lag_records) },
      { title: "Lag in time", number: true, cell: (name) => duration(of(name)?.lag_seconds) },
      { title: "Members", number: true, cell: (name) => number(of(name)?.members?.length) },
      { title: "Partitions", number: true, cell: (name) => number(of(name)?.partitions?.length) },
      { title: "", cell: (name) => of(name)?.message || of(name)?.problems?.[0] || "" },
    ],
  });
  const draw = () => {
    const rows = names.filter((name) => name.toLowerCase().includes(filter.value.trim().toLowerCase()));
    table.update(rows);
    return rows;
  };
  filter.addEventListener("input", draw);
  root.append(el("h1", {}, "Groups"), trouble, el("div", { class: "form" }, field("Filter by name", filter)), table.node);
  life.every(LOOK_MS, trouble, async () => {
    names = (await get("/groups", life.signal)).groups;
    const rows = draw().slice(0, DETAILS_MAX);
    const found = await each(rows, (name) => get(paths.group(name), life.signal));
    rows.forEach((name, place) => details.set(name, found[place]));
    draw();
  });
}

function one(root, { params, life }) {
  const name = params.group;
  const trouble = el("div");
  const damage = el("div");
  const cards = { lag: card("Lag", "records"), time: card("Lag in time", "age of the oldest record"), members: card("Members", "alive") };
  const members = new Table({
    caption: "Members",
    key: (row) => row.member_id,
    none: "No members are alive.",
    columns: [
      { title: "Member", cell: (row) => row.member_id },
      { title: "Topics", cell: (row) => row.topics.join(", ") },
      { title: "Joined", tight: true, cell: (row) => time(row.joined_at_ms) },
    ],
  });
  const partitions = new Table({
    caption: "Partitions",
    key: (row) => `${row.topic}:${row.partition}`,
    none: "This group has committed nothing.",
    columns: [
      { title: "Topic", cell: (row) => ({ text: row.topic, href: `#/topics/${encodeURIComponent(row.topic)}` }) },
      { title: "Partition", number: true, cell: (row) => number(row.partition) },
      { title: "Committed", number: true, cell: (row) => (row.committed === null ? "–" : number(row.committed)) },
      { title: "Earliest", number: true, cell: (row) => number(row.earliest) },
      { title: "Next", number: true, cell: (row) => number(row.next) },
      { title: "Lag", number: true, cell: (row) => number(row.lag_records) },
      { title: "Lag in time", number: true, cell: (row) => duration(row.lag_seconds) },
      { title: "Owner", cell: (row) => row.owner || "–" },
    ],
  });
  const reset = resetForm(name, life);
  root.append(
    el("p", { class: "crumbs" }, el("a", { href: "#/groups" }, "Groups"), " / "),
    el("h1", {}, el("bdi", {}, name)),
    trouble,
    damage,
    el("section", { class: "cards", "aria-label": "Now" }, Object.values(cards).map((each_) => each_.node)),
    el("h2", {}, "Partitions"), partitions.node,
    el("h2", {}, "Members"), members.node,
    el("h2", {}, "Reset"), reset.node,
  );
  life.every(LOOK_MS, trouble, async () => {
    const found = await get(paths.group(name), life.signal);
    damage.replaceChildren(...found.problems.map((message) => problemBox({ type: "Damaged", message })));
    cards.lag.set(number(found.lag_records), found.lag_records === 1 ? "record" : "records");
    cards.time.set(duration(found.lag_seconds));
    cards.members.set(number(found.members.length), `alive, generation ${number(found.generation)}`);
    members.update(found.members);
    partitions.update(found.partitions);
    reset.topics([...new Set(found.partitions.map((row) => row.topic))]);
  });
}

function resetForm(name, life) {
  const to = select(TARGETS, "earliest");
  const offset = el("input", { type: "number", min: 0 });
  const at = el("input", { type: "datetime-local", step: 1 });
  const topic = select([["", "all the group knows"]], "");
  const partition = el("input", { type: "number", min: 0, max: 99999, placeholder: "all" });
  const force = el("input", { type: "checkbox" });
  const dry = el("button", { type: "submit", class: "main" }, "Show what it would do");
  const apply = el("button", { type: "button", class: "danger" }, "Reset now");
  const plan = new Table({
    caption: "What the reset would do",
    key: (row) => `${row.topic}:${row.partition}`,
    none: "It would change nothing.",
    columns: [
      { title: "Topic", cell: (row) => row.topic },
      { title: "Partition", number: true, cell: (row) => number(row.partition) },
      { title: "Committed now", number: true, cell: (row) => number(row.before) },
      { title: "After the reset", number: true, cell: (row) => number(row.after) },
    ],
  });
  const head = el("p", { role: "status" });
  const outcome = el("section", { hidden: true }, head, plan.node, el("div", { class: "row" }, apply));
  const trouble = el("div");
  const fields = { offset: field("Offset", offset), at: field("Time here", at), partition: field("Partition", partition) };
  let planned = null;
  const shape = () => {
    fields.offset.hidden = to.value !== "offset";
    fields.at.hidden = to.value !== "time";
    fields.partition.hidden = topic.value === "";
    planned = null;
    outcome.hidden = true;
    trouble.replaceChildren();
  };
  const message = () => {
    const made = to.value === "time" ? { to_time_ms: new Date(at.value).getTime() } : { to: to.value === "offset" ? Number(offset.value) : to.value };
    if (Number.isNaN(made.to_time_ms)) throw Object.assign(new Error("The time is missing."), { type: "No time", hint: "choose a day and a time" });
    if (to.value === "offset" && offset.value === "") throw Object.assign(new Error("The offset is missing."), { type: "No offset", hint: "a number from 0 on" });
    if (topic.value) made.topic = topic.value;
    if (topic.value && partition.value !== "") made.partition = Number(partition.value);
    if (force.checked) made.force = true;
    return made;
  };
  const send = async (made, dryRun) => {
    trouble.replaceChildren();
    try {
      return await post(`${paths.group(name)}/reset`, { ...made, dry_run: dryRun }, { signal: life.signal });
    } catch (error) {
      if (error.name !== "AbortError") trouble.replaceChildren(problemBox(error));
      return null;
    }
  };
  const form = el("form", { class: "form" }, field("To", to), fields.offset, fields.at, field("Topic", topic), fields.partition,
    el("label", { class: "check" }, force, " also while members are alive"), dry);
  form.addEventListener("input", shape);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    shape();
    let made;
    try {
      made = message();
    } catch (error) {
      trouble.replaceChildren(problemBox(error));
      return;
    }
    const found = await send(made, true);
    if (!found) return;
    planned = made;
    plan.update(found.partitions);
    outcome.hidden = false;
    apply.hidden = found.partitions.length === 0;
    setText(head, `Nothing is changed yet. The reset would move ${plural(found.partitions.length, "partition")}:`);
  });
  apply.addEventListener("click", async () => {
    if (!planned) return;
    apply.disabled = true;
    const found = await send(planned, false);
    apply.disabled = false;
    if (!found) return;
    planned = null;
    apply.hidden = true;
    plan.update(found.partitions);
    setText(head, `Done: ${plural(found.partitions.length, "partition")} moved.`);
    say("The group was reset");
    document.dispatchEvent(new CustomEvent("console:refresh"));
  });
  shape();
  return {
    node: el("div", {}, form, trouble, outcome),
    topics(names) {
      for (const each_ of names) {
        if (![...topic.options].some((option) => option.value === each_)) topic.append(el("option", { value: each_ }, each_));
      }
    },
  };
}

export const groups = { list, one };
