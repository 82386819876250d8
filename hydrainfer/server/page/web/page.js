// Asks the server once a second how it is, while the page is looked at, and shows it.

import { showCharts } from "./charts.js";
import { $ } from "./dom.js";
import { showLayout } from "./layout.js";
import { playground } from "./chat.js";

const EVERY_MS = 1000, PATIENCE_MS = 3000, KEPT_MS = 300_000;
const NOTHING = { pictures: 0, videos: 0, picture_bytes: 0, video_bytes: 0, body_bytes: 0 };
let key = "", model = "", takes = NOTHING, last = 0, ended = [];

const headers = () => (key ? { Authorization: `Bearer ${key}` } : {});

function say(text, kind) {
  $("state").textContent = text;
  $("state").className = `state ${kind}`;
}

function show(seen) {
  const now = performance.now(), n = seen.live, dead = seen.instances.filter((i) => i.state === "dead").length;
  model = seen.model;
  takes = seen.takes;
  for (const one of seen.ended) {
    ended.push({ ...one, at_ms: now - one.ago_s * 1000 });
    last = one.number;
  }
  ended = ended.filter((one) => now - one.at_ms < KEPT_MS);
  $("facts").textContent = seen.model;
  $("version").textContent = `version ${seen.version}`;
  $("pick").hidden = $("pick-text").hidden = !takes.pictures;
  $("pick").textContent = takes.videos ? "Add pictures or videos" : "Add pictures";
  if (!takes.pictures && $("question").value === $("question").defaultValue) $("question").value = "Tell me something.";
  const words = [n ? `${n} request${n > 1 ? "s" : ""} at work` : "no requests now"];
  if (seen.refused) words.push(`${seen.refused} refused so far`);
  if (dead) words.push(`${dead} of ${seen.instances.length} instances down`);
  if (seen.draining) words.unshift("shutting down");
  say(words.join(", "), dead || seen.draining ? "bad" : "good");
  showLayout(seen.layout, seen.instances);
  showCharts(ended);
}

async function look() {
  try {
    const signal = AbortSignal.timeout(PATIENCE_MS);
    const response = await fetch(`v1/overview?after=${last}`, { headers: headers(), signal });
    $("key").hidden = response.status !== 401;
    if (response.status === 401) say(key ? "this key is not known" : "an API key is needed", "bad");
    else if (response.ok) show(await response.json());
    else say(`the server answers ${response.status}`, "bad");
  } catch {
    say("the server does not answer", "bad");
  }
}

async function follow() {
  if (!document.hidden) await look();
  setTimeout(follow, $("key").hidden ? EVERY_MS : 3 * EVERY_MS);
}

$("key").onsubmit = (e) => {
  e.preventDefault();
  key = $("key-text").value.trim();
  look();
};
playground(() => ({ model, takes, headers: headers() }));
follow();
