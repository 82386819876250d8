// Small helpers. Text goes into the page as text, never as HTML.

export const $ = (id) => document.getElementById(id);

export function make(tag, name = "", text = "") {
  const element = document.createElement(tag);
  if (name) element.className = name;
  if (text !== "") element.textContent = text;
  return element;
}

export function draw(tag, attributes, text = "") {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== "") element.textContent = text;
  return element;
}

export function seconds(s) {
  if (s == null) return "–";
  if (s < 0.9995) return `${(s * 1000).toFixed(s < 0.00995 ? 1 : 0)} ms`;
  return s < 9.95 ? `${s.toFixed(2)} s` : `${s.toFixed(s < 99.5 ? 1 : 0)} s`;
}

// A text as one word of a shell.
export const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

export function bytes(n) {
  return n < 1 << 20 ? `${Math.ceil(n / 1024)} KiB` : `${(n / (1 << 20)).toFixed(1)} MiB`;
}

export function quantile(sorted, q) {
  return sorted.length ? sorted[Math.min(sorted.length - 1, Math.floor(q * sorted.length))] : null;
}

export const INTERVALS = {
  encode_queue: "waits for encode", encode: "encode", ep_migration: "moves to prefill", prefill_queue: "waits for prefill",
  prefill: "prefill", pd_migration: "moves to decode", decode_queue: "waits for decode", decode: "decode",
};

// A bar of the eight intervals, in seconds by name, and its legend.
export function showIntervals(bar, legend, times) {
  const parts = Object.keys(INTERVALS).filter((name) => times[name] > 0);
  const total = parts.reduce((sum, name) => sum + times[name], 0);
  bar.replaceChildren(...parts.map((name) => {
    const part = make("i", name);
    part.style.width = `${(100 * times[name]) / total}%`;
    part.title = `${INTERVALS[name]}: ${seconds(times[name])}`;
    return part;
  }));
  const said = parts.map((name) => `${INTERVALS[name]} ${seconds(times[name])}`);
  bar.setAttribute("aria-label", said.join(", ") || "no requests yet");
  legend.replaceChildren(...parts.filter((name) => times[name] >= 0.005 * total).map((name) => {
    const item = make("li");
    item.append(make("i", name), `${INTERVALS[name]} ${seconds(times[name])}`);
    return item;
  }));
}
