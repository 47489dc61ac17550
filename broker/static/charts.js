// Curves over policy versions or time, drawn by uPlot in the page's own colours.

/* global uPlot */
import { clock, element } from "./format.js";

// title, what it means, and the lines: [key, label, colour]
const CHARTS = [
  ["Reward", "mean of the batch; right answers of all sampled", [["reward_mean", "reward", 1], ["sampled_accuracy", "accuracy", 2]]],
  ["Response length", "tokens", [["response_length_mean", "mean", 1], ["response_length_max", "longest", 4]]],
  ["Entropy", "nats a token", [["entropy", "entropy", 1]]],
  ["Mean probability", "of the sampled tokens", [["probability", "policy", 1], ["probability_gap", "gap to the sampler", 3]]],
  ["Clip share", "of tokens", [["clip_above", "above", 1], ["clip_below", "below", 2], ["clip_dual", "dual", 3]]],
  ["Correction", "shares", [["effective_sample_size", "effective sample", 2], ["weight_at_cap", "at the cap", 3], ["masked_share", "masked", 4]]],
  ["Staleness", "versions", [["staleness_mean", "mean", 1], ["staleness_max", "oldest", 3]]],
  ["Who waits", "share of the time", [["learner_wait_share", "learner waits", 3], ["generator_blocked_share", "generators wait", 4], ["generator_busy_share", "generators sample", 2]]],
  ["Where groups are", "over the time the page is served", [["waiting", "waiting", 4], ["in_flight", "in flight", 2], ["queued", "queued", 1], ["learner", "learner", 3]], "flow"],
];
const HEIGHT = 150;

export class Curves {
  constructor(box, empty) {
    this.box = box;
    this.empty = empty;
    this.axis = "version";
    this.history = null;
    this.charts = [];
    const again = () => { this.clear(); this.draw(); };
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
    new ResizeObserver(() => this.fit()).observe(box);
  }

  show(history) {
    this.history = history;
    this.draw();
  }

  over(axis) {
    this.axis = axis;
    this.clear();
    this.draw();
  }

  clear() {
    for (const { plot } of this.charts) plot.destroy();
    this.charts = [];
    this.box.replaceChildren();
  }

  draw() {
    if (!this.history) return;
    this.empty.hidden = this.history.records.version.length > 0;
    if (!this.charts.length) this.charts = CHARTS.map((chart) => this.make(chart));
    for (const { plot, columns } of this.charts) plot.setData(columns(this.history, this.axis));
  }

  make([title, unit, lines, source = "records"]) {
    const styles = getComputedStyle(document.documentElement);
    const colour = (name) => styles.getPropertyValue(name).trim();
    const place = element("div", { class: "plot" });
    this.box.append(element("figure", {}, element("figcaption", {}, element("b", {}, title), " ", element("small", {}, unit)), place));
    const inTime = source === "flow" || this.axis === "time_s";
    const xText = (x) => x === undefined ? "–" : source === "flow" ? clock(x) : inTime ? timeTick(x) : String(x);
    const axis = { stroke: colour("--muted"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    const options = {
      width: Math.max(place.clientWidth, 200),
      height: HEIGHT,
      cursor: { points: { size: 6 }, drag: { x: false, y: false }, sync: source === "flow" ? undefined : { key: "records" } },
      scales: { x: { time: source === "flow" }, y: { range: (_, low, high) => padded(low, high) } },
      series: [
        { label: source === "flow" ? "at" : inTime ? "after" : "version", value: (plot, value, _, index) => xText(plot.data[0][index ?? plot.data[0].length - 1]) },
        ...lines.map(([, label, number]) => ({
          label, stroke: colour(`--series-${number}`), width: 1.75, spanGaps: true,
          points: { show: (plot) => plot.data[0].length < 3, size: 5 },
          value: (plot, value, line, index) => brief(index === null ? plot.data[line][plot.data[line].length - 1] : value),
        })),
      ],
      axes: [
        { ...axis, size: 28, space: source === "flow" ? 70 : 50, values: (_, ticks) => ticks.map((tick) => source !== "records" || inTime || Number.isInteger(tick) ? xText(tick) : "") },
        { ...axis, size: 44, values: (_, ticks) => ticks.map((tick) => Math.abs(tick) >= 10000 ? brief(tick) : String(+tick.toPrecision(6))) },
      ],
      legend: { live: true, markers: { width: 0, fill: (plot, line) => plot.series[line].stroke() } },
    };
    const plot = new uPlot(options, [[], ...lines.map(() => [])], place);
    const columns = (history, x) => {
      const from = history[source];
      return [from[source === "flow" ? "at" : x], ...lines.map(([key]) => from[key])];
    };
    return { plot, place, columns };
  }

  fit() {
    for (const { plot, place } of this.charts) {
      const width = Math.max(place.clientWidth, 120);
      if (plot.width !== width) plot.setSize({ width, height: HEIGHT });
    }
  }
}

function padded(low, high) {
  if (low === null || high === null) return [0, 1];
  const room = 0.08 * (high - low) || Math.abs(high) * 0.1 || 0.5;
  return [low >= 0 ? Math.max(0, low - room) : low - room, high + room];
}

function brief(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 10000) return `${+(value / 1000).toPrecision(3)}k`;
  if (size < 0.001) return value.toExponential(1);
  return String(+value.toPrecision(3));
}

function timeTick(seconds) {
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${+(seconds / 60).toFixed(1)} min`;
  return `${+(seconds / 3600).toFixed(1)} h`;
}
