// The layout as a picture: a card per instance under the stages that it runs, and the ways that requests move.

import { $, draw, make } from "./dom.js";

const STAGES = ["encode", "prefill", "decode"];
const DOING = { encode: "encoding", prefill: "prefilling", decode: "decoding" };
const MOST_DOTS = 40;
const BUSY_MS = 5000;
const PALE = "Bars: blocks of the caches in use; pale, kept for reuse.";
const landed = new Map(); // instance and incarnation → how many had come when we last looked, and when more came

const runs = (instance, stage) => instance.role.includes(stage[0].toUpperCase());

function dots(load) {
  const row = make("div", "queue");
  const n = Math.min(load.waiting, MOST_DOTS);
  for (let i = 0; i < n; i++) row.append(make("i"));
  for (let i = 0; i < Math.min(load.arriving, MOST_DOTS); i++) row.append(make("i", "moving"));
  const words = [`${load.waiting} waiting`];
  if (load.arriving) words.push(`${load.arriving} offered by others`);
  if (load.migrating) words.push(`${load.migrating} waiting to be taken`);
  row.append(make("span", "quiet", words.join(", ")));
  return row;
}

function cache(kind, { total, leased, reusable }) {
  const row = make("div", `cache ${kind}`);
  const level = make("div", "level");
  for (const [name, n] of [["leased", leased], ["reusable", reusable]]) {
    const part = make("i", name);
    part.style.width = `${total ? (100 * n) / total : 0}%`;
    level.append(part);
  }
  row.title = `${leased} of ${total} blocks in use, ${reusable} kept for reuse`;
  row.append(make("span", "", kind), level, make("span", "number", `${leased} used, ${reusable} kept, of ${total}`));
  return row;
}

function card(instance) {
  const box = make("div", `card instance ${instance.state}`);
  const mine = STAGES.map((stage, i) => (runs(instance, stage) ? i : -1)).filter((i) => i >= 0);
  box.style.gridColumn = `${mine[0] + 1} / ${mine[mine.length - 1] + 2}`;
  box.dataset.id = instance.id;
  const head = make("div", "head");
  const state = instance.state === "alive" ? `pid ${instance.pid}` : instance.state;
  head.append(make("b", "", instance.id), make("span", "quiet", state));
  box.append(head);
  const load = instance.load;
  if (load) {
    const doing = make("div", "doing");
    for (const stage of STAGES.filter((s) => runs(instance, s))) {
      const n = load[DOING[stage]];
      doing.append(make("span", n ? `${stage} on` : stage, `${stage} ${n}`));
    }
    box.append(doing, dots(load), ...Object.entries(load.cache_blocks).map(([kind, blocks]) => cache(kind, blocks)));
    if (load.preemptions) box.append(make("div", "quiet", `${load.preemptions} preempted so far`));
    for (const [name, { tokens, accepted }] of Object.entries(load.drafts).filter(([, drafts]) => drafts.tokens))
      box.append(make("div", "quiet", `${accepted} of ${tokens} drafts right (${name})`));
  }
  if (instance.trouble) box.append(make("div", "trouble", instance.trouble));
  return box;
}

function noteLanded(instances) {
  const now = performance.now();
  for (const { id, incarnation, load } of instances) {
    if (!load) continue;
    const key = `${id}/${incarnation}`;
    const before = landed.get(key);
    const came = before !== undefined && load.landed > before.n;
    landed.set(key, { n: load.landed, at: came ? now : before?.at ?? -Infinity });
  }
}

// Pairs of instances between which requests move: the next stage does not run where the one before it does.
function ways(instances) {
  const found = [];
  const there = instances.filter((i) => i.state !== "dead");
  for (let s = 0; s + 1 < STAGES.length; s++) {
    for (const from of there.filter((i) => runs(i, STAGES[s]) && !runs(i, STAGES[s + 1]))) {
      for (const to of there.filter((i) => runs(i, STAGES[s + 1]) && i !== from)) found.push([from, to]);
    }
  }
  return found;
}

// From one card's side to the other's, or up and down where they share a column.
function curve(a, b, box) {
  if (b.left < a.right && a.left < b.right) {
    const x = (Math.max(a.left, b.left) + Math.min(a.right, b.right)) / 2 - box.left, down = a.top < b.top;
    return `M${x} ${(down ? a.bottom : a.top) - box.top} L${x} ${(down ? b.top : b.bottom) - box.top}`;
  }
  const back = b.left < a.right; // a stage that runs further left
  const x1 = (back ? a.left : a.right) - box.left, x2 = (back ? b.right : b.left) - box.left;
  const y1 = (a.top + a.bottom) / 2 - box.top, y2 = (b.top + b.bottom) / 2 - box.top, bend = (x1 + x2) / 2;
  return `M${x1} ${y1} C${bend} ${y1} ${bend} ${y2} ${x2} ${y2}`;
}

function drawWays(instances) {
  const svg = $("ways"), box = $("layout").getBoundingClientRect(), now = performance.now();
  const place = (i) => $("layout").querySelector(`[data-id="${CSS.escape(i.id)}"]`)?.getBoundingClientRect();
  svg.setAttribute("viewBox", `0 0 ${box.width} ${box.height}`);
  svg.replaceChildren(...ways(instances).flatMap(([from, to]) => {
    const a = place(from), b = place(to);
    if (!a || !b) return [];
    const d = curve(a, b, box);
    const busy = now - (landed.get(`${to.id}/${to.incarnation}`)?.at ?? -Infinity) < BUSY_MS;
    return [draw("path", { class: busy ? "way busy" : "way", d })];
  }));
  return svg.childElementCount;
}

let shown = [];

export function showLayout(name, instances) {
  noteLanded(instances);
  shown = instances;
  $("layout-name").textContent = name;
  const layout = $("layout");
  layout.querySelectorAll(".instance").forEach((old) => old.remove());
  layout.append(...instances.map(card));
  const n = drawWays(instances);
  const total = instances.reduce((sum, { load }) => sum + (load?.landed ?? 0), 0);
  if (!n) return $("layout-note").replaceChildren(PALE);
  const lines = make("span", "of-lines", " A line is violet where one has arrived in the last 5 seconds.");
  $("layout-note").replaceChildren(`${total} requests have moved between instances so far.`, lines, ` ${PALE}`);
}

addEventListener("resize", () => drawWays(shown));
