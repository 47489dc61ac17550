// Numbers and times in words, and elements without markup: what a run wrote becomes text, never HTML.

export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "class") made.className = value;
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined).map((child) =>
    child instanceof Node ? child : document.createTextNode(String(child))));
  return made;
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export function count(value) {
  return value === null || value === undefined ? "–" : whole.format(value);
}

export function decimal(value, digits = 2) {
  return value === null || value === undefined ? "–" : value.toFixed(digits);
}

export function percent(value) {
  return value === null || value === undefined ? "–" : `${(100 * value).toFixed(value < 0.1 ? 1 : 0)} %`;
}

export function bytes(value) {
  const units = ["B", "KB", "MB", "GB", "TB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) { value /= 1024; unit += 1; }
  return `${value.toFixed(value < 10 && unit ? 1 : 0)} ${units[unit]}`;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 60) return `${seconds.toFixed(0)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
  const hours = Math.floor(seconds / 3600);
  return hours < 48 ? `${hours} h ${Math.floor((seconds % 3600) / 60)} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

export function rate(perSecond) {
  if (!perSecond) return "";
  return perSecond >= 1 ? `${perSecond.toFixed(1)}/s` : `${(60 * perSecond).toFixed(60 * perSecond < 10 ? 1 : 0)}/min`;
}

export function clock(unixSeconds) {
  return new Date(1000 * unixSeconds).toLocaleTimeString("en-GB");
}
