// Tiles, members, sample answers and events.

import { bytes, clock, count, decimal, duration, element, percent, setText } from "./format.js";

const tiles = new Map();

function tile(box, name, value, note = "", level = "") {
  let entry = tiles.get(name);
  if (!entry) {
    entry = { value: element("dd"), note: element("dd", { class: "note" }) };
    entry.box = element("div", {}, element("dt", {}, name), entry.value, entry.note);
    box.append(entry.box);
    tiles.set(name, entry);
  }
  setText(entry.value, value);
  setText(entry.note, note);
  entry.box.className = level;
}

export function drawTiles(box, s) {
  const record = s.record ?? {};
  const done = record.version === undefined ? "" : ` · ${duration(record.time_s)} of training`;
  tile(box, "version", count(s.version), `of ${count(s.max_steps)} steps${done}`);
  tile(box, "reward", decimal(record.reward_mean, 3), s.record ? `${percent(record.sampled_accuracy)} right of all sampled` : "");
  tile(box, "staleness", decimal(record.staleness_mean), s.record ? `oldest ${count(record.staleness_max)} of ${count(s.max_staleness)} versions` : "",
    record.staleness_max >= s.max_staleness && s.max_staleness > 0 ? "near" : "");
  tile(box, "lag", `${decimal(s.lag_steps, 1)} steps`, `oldest group ${duration(s.oldest_s)}`);
  tile(box, "sampled tokens/s", count(s.tokens_per_s), s.record ? `generators busy ${percent(record.generator_busy_share)}` : "");
  tile(box, "trained tokens/s", count(record.tokens_per_s), s.record ? `learner waits ${percent(record.learner_wait_share)}` : "");
  tile(box, "behind", `${count(s.behind)} version${s.behind === 1 ? "" : "s"}`, "the slowest generator");
  tile(box, "Redis", bytes(s.memory), s.memory_limit ? `of ${bytes(s.memory_limit)}; groups ${bytes(s.queue_bytes)}` : `groups ${bytes(s.queue_bytes)}`,
    s.memory_limit && s.memory > 0.8 * s.memory_limit ? "bad" : "");
  tile(box, "dead letters", count(s.dead_letters), s.dead_letters ? "headrace dead list" : "none given up", s.dead_letters ? "bad" : "");
  if (s.evaluation) {
    const e = s.evaluation;
    const value = e.accuracy ?? e.reward_mean;
    tile(box, "evaluation", decimal(value, 3), `± ${decimal(e.standard_error, 3)} at version ${e.version}`);
  }
}

export function drawMembers(table, s) {
  const head = ["member", "state", "version", "tokens/s", "in flight", "seen"];
  const rows = s.members.map((m) => element("tr", {},
    element("th", { scope: "row" }, m.id),
    element("td", {}, element("span", { class: `state ${m.state}` }, m.state)),
    element("td", { class: m.role === "generator" && m.version < s.version ? "number near" : "number" }, m.version < 0 ? "" : count(m.version)),
    element("td", { class: "number" }, m.tokens_per_s === null ? "" : count(m.tokens_per_s)),
    element("td", { class: "number" }, m.in_flight === null ? "" : count(m.in_flight)),
    element("td", { class: "number" }, `${decimal(m.seen_s, 1)} s`)));
  if (!rows.length) rows.push(element("tr", {}, element("td", { colspan: head.length, class: "muted" }, "Nobody is here.")));
  table.replaceChildren(
    element("thead", {}, element("tr", {}, ...head.map((name, i) => element("th", { scope: "col", class: i > 1 ? "number" : null }, name)))),
    element("tbody", {}, ...rows));
}

const groupsShown = new Map();

export function drawSamples(box, groups) {
  if (!groups.length) return;
  const nodes = groups.map((group) => groupsShown.get(group.id) ?? sample(group));
  groupsShown.clear();
  groups.forEach((group, index) => {
    groupsShown.set(group.id, nodes[index]);
    // The newest is open, and what somebody has opened to read stays so.
    if (!nodes[index].dataset.touched) nodes[index].open = index === 0;
  });
  if (nodes.length !== box.children.length || nodes.some((node, index) => node !== box.children[index])) {
    box.replaceChildren(...nodes);
  }
}

function sample(group) {
  const node = element("details", { class: "group" },
    element("summary", {},
      element("span", {}, `group ${group.id}`), element("span", {}, group.generator), element("span", {}, clock(group.at))),
    element("pre", { class: "prompt" }, group.prompt),
    ...group.answers.map(answer),
    group.size > group.answers.length ? element("p", { class: "muted" }, `${group.size - group.answers.length} more in between`) : null);
  node.firstChild.addEventListener("click", () => { node.dataset.touched = "1"; });
  return node;
}

function answer(each) {
  const [low, high] = each.versions;
  const level = each.correct === true ? "right" : each.correct === false ? "wrong" : "unknown";
  const facts = [`${each.tokens} tokens`, low === high ? `version ${low}` : `versions ${low} to ${high}`];
  if (each.truncated) facts.push("truncated");
  return element("div", { class: `answer ${level}` },
    element("b", { class: "reward", title: `reward; ${level}` }, decimal(each.reward)),
    element("div", {},
      element("pre", {}, each.text || "(empty)", each.cut ? " …" : ""),
      element("small", {}, facts.join(" · "))));
}

let eventsSeen = "";

export function drawEvents(list, events) {
  const key = JSON.stringify(events[0] ?? null) + events.length;
  if (key === eventsSeen) return;
  eventsSeen = key;
  list.replaceChildren(...events.map((event) => element("li", { class: `e-${event.kind}` },
    element("time", {}, clock(event.at)), element("span", {}, event.text))));
}
