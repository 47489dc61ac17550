// The page: one stream of snapshots, curves and answers fetched every few seconds, and the truth about how old it is.

import { Curves } from "./charts.js";
import { drawFlow } from "./flow.js";
import { clock, duration, setText } from "./format.js";
import { drawEvents, drawMembers, drawSamples, drawTiles } from "./lists.js";

const REFRESH_MS = 4000;
const OLD_S = 5;

const at = (id) => document.getElementById(id);
const state = { snapshot: null, received: 0, alive: performance.now(), refused: false, fetching: false };
const curves = new Curves(at("curves"), at("no-records"));

// A token in the address has done its work: the cookie goes on from here.
if (new URLSearchParams(location.search).has("token")) history.replaceState(null, "", location.pathname);

function connect() {
  const stream = new EventSource("events");
  stream.onopen = () => { state.alive = performance.now(); };
  stream.addEventListener("alive", () => { state.alive = performance.now(); });
  stream.onmessage = (message) => {
    state.snapshot = JSON.parse(message.data);
    state.received = state.alive = performance.now();
    draw();
    if (state.snapshot.finished) {
      stream.close();
      refresh();
    }
  };
  stream.onerror = () => {
    // The browser tries again by itself, unless it was refused.
    if (stream.readyState === EventSource.CLOSED && !state.snapshot?.finished) setTimeout(connect, 3000);
  };
}

function draw() {
  const snapshot = state.snapshot;
  document.title = `${snapshot.run}: version ${snapshot.version}`;
  setText(at("run"), snapshot.run);
  drawFlow(at("flow"), at("budget"), snapshot);
  drawTiles(at("tiles"), snapshot);
  drawMembers(at("members"), snapshot);
  drawEvents(at("events"), snapshot.events);
  drawStatus();
}

function drawStatus() {
  const { snapshot } = state;
  const now = performance.now();
  const age = (now - state.received) / 1000;
  const silent = (now - state.alive) / 1000;
  let kind = "live", text = "live", why = "";
  if (snapshot?.finished) {
    [kind, text] = ["finished", `finished; as of ${clock(snapshot.at)}`];
  } else if (silent > OLD_S) {
    [kind, text] = ["lost", "no connection"];
    why = "The broker service does not answer; trying again.";
  } else if (!snapshot) {
    [kind, text] = ["waiting", "waiting for the run"];
  } else if (age > OLD_S) {
    [kind, text] = ["old", "stands still"];
    why = "The broker service lives and has no news: Redis does not answer it, or it is busy.";
  }
  if (why && snapshot) why += ` These numbers are ${duration(age)} old.`;
  setText(at("status"), text);
  at("status").className = kind;
  document.body.classList.toggle("old", kind === "old" || kind === "lost");
  setText(at("stale"), why);
  at("stale").hidden = !why;
}

async function refresh() {
  const lost = performance.now() - state.alive > 1000 * OLD_S;
  if (state.fetching || ((lost || document.hidden) && !state.snapshot?.finished)) return;
  state.fetching = true;
  const finished = state.snapshot?.finished;
  try {
    const [history, samples] = await Promise.all(["history", "samples"].map(async (path) => {
      const answer = await fetch(path, { cache: "no-store" });
      if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
      return answer.json();
    }));
    curves.show(history);
    drawSamples(at("samples"), samples.groups);
  } catch {
    // drawStatus says what is wrong; the next try follows.
  } finally {
    state.fetching = false;
    if (state.snapshot?.finished && !finished) refresh(); // it ended meanwhile
  }
}

for (const button of document.querySelectorAll("[data-axis]")) {
  button.addEventListener("click", () => {
    for (const other of document.querySelectorAll("[data-axis]")) {
      other.setAttribute("aria-pressed", String(other === button));
    }
    curves.over(button.dataset.axis);
  });
}

document.addEventListener("visibilitychange", refresh);
setInterval(drawStatus, 1000);
setInterval(() => { if (!state.snapshot?.finished) refresh(); }, REFRESH_MS);
connect();
setTimeout(refresh, 300);
