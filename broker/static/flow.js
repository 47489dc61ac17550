// A group's way as a picture: stations from left to right (on a phone from top to bottom), the ways out below them.

import { count, element, rate, setText } from "./format.js";

const STATIONS = [
  { key: "released", name: "released", note: "prompts, in all", rate: "released", kind: "total" },
  { key: "waiting", name: "waiting", note: "prompts", kind: "now" },
  { key: "in_flight", name: "in flight", note: "sampled", kind: "now", out: [["filtered", "all alike"], ["dead", "given up"]] },
  { key: "queued", name: "queued", note: "groups", rate: "submitted", kind: "now", out: [["expired", "too old"]] },
  { key: "learner", name: "learner", note: "in the batch", kind: "now" },
  { key: "trained", name: "trained", note: "groups, in all", rate: "trained", kind: "total" },
  { key: "settled", name: "settled", note: "durable", kind: "total" },
];
const HELD = [["waiting", "waiting"], ["in_flight", "in flight"], ["queued", "queued"], ["learner", "learner"]];
const shown = new Map();

function build(flow, budget) {
  for (const station of STATIONS) {
    const box = element("div", { class: `station ${station.kind} s-${station.key}` });
    const number = element("b", { id: `station-${station.key}` }, "–");
    const speed = element("i", {}, "");
    box.append(element("span", { class: "name" }, station.name), number, element("small", {}, station.note), speed);
    shown.set(station.key, { number, box, speed });
    const column = element("div", { class: "column" }, box);
    for (const [key, note] of station.out ?? []) {
      const out = element("b", { id: `station-${key}` }, "–");
      const chip = element("div", { class: `out o-${key}`, title: note }, element("span", {}, key), out);
      shown.set(key, { number: out, box: chip });
      column.append(chip);
    }
    flow.append(column);
  }
  const track = element("div", { class: "track", id: "track" });
  for (const [key, name] of HELD) {
    const part = element("span", { class: `part p-${key}`, title: name });
    shown.set(`part-${key}`, { box: part });
    track.append(part);
  }
  const label = element("p", { id: "budget-text" });
  budget.append(label, track);
  shown.set("label", { number: label });
}

function put(entry, text) {
  entry.box.classList.toggle("changed", entry.number.textContent !== text && entry.number.textContent !== "–");
  setText(entry.number, text);
}

export function drawFlow(flow, budget, snapshot) {
  if (!flow.firstChild) build(flow, budget);
  const { stations, rates } = snapshot;
  flow.classList.toggle("moved");
  for (const [key, value] of Object.entries(stations)) {
    const entry = shown.get(key);
    if (entry) put(entry, count(value));
  }
  for (const station of STATIONS) {
    if (station.rate) setText(shown.get(station.key).speed, rate(rates[station.rate]));
  }
  shown.get("dead").box.classList.toggle("bad", stations.dead > 0);
  const limit = Math.max(snapshot.outstanding_limit, snapshot.outstanding, 1);
  for (const [key] of HELD) shown.get(`part-${key}`).box.style.width = `${(100 * stations[key]) / limit}%`;
  const balance = snapshot.balanced ? "the ledger balances" : "THE LEDGER DOES NOT BALANCE";
  setText(shown.get("label").number, `${count(snapshot.outstanding)} of at most ${count(snapshot.outstanding_limit)} ` +
    `groups outstanding; ${balance}`);
  budget.classList.toggle("bad", !snapshot.balanced);
}
