// The playground: a chat with pictures and videos, streamed, with what the server does and the time that each stage took.

import { $, bytes, INTERVALS, make, seconds, showIntervals } from "./dom.js";
import { thumbnail, Tray } from "./media.js";
import { shellCommand, pythonScript, bodyOf, otherFields } from "./request.js";
import { stream } from "./wire.js";

const DOING = {
  encode_queue: "waits until its pictures are encoded", encode: "encodes the pictures", ep_migration: "moves to prefill",
  prefill_queue: "waits for prefill", prefill: "prefill: reads the prompt", pd_migration: "moves to decode",
  decode_queue: "waits for decode", decode: "decode",
};
const OPTIONS = { stream_options: { include_usage: true }, timings: true, progress: true };
let history = []; // turns that went well, question and answer by turns
let running = null; // the answer that is being written

function facts(list, entries) {
  list.replaceChildren(...entries.filter(([, value]) => value != null).map(([name, value]) => {
    const span = make("span", "", `${name} `);
    span.append(make("b", "", value));
    return span;
  }));
}

function article(kind, who, ...parts) {
  const turn = make("article", `turn ${kind}`);
  turn.append(make("h3", "", who), ...parts);
  $("log-empty").hidden = true;
  $("log").append(turn);
  $("log").scrollTop = $("log").scrollHeight;
  return turn;
}

// Changes the log, which stays at its end if it was there.
function following(change) {
  const log = $("log"), follows = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
  change();
  if (follows) log.scrollTop = log.scrollHeight;
}

function showQuestion(turn) {
  const media = make("div", "media");
  media.append(...turn.media.map(thumbnail));
  return article("question", "You", ...(turn.media.length ? [media] : []), make("div", "text", turn.text));
}

// An answer on the page, while it comes and afterwards.
class Answer {
  constructor() {
    this.begin = performance.now();
    this.first = this.usage = this.why = null;
    this.content = "";
    this.phase = make("span", "", "sends the question");
    this.clock = make("span", "quiet");
    this.clock.setAttribute("aria-hidden", "true");
    this.status = make("p", "phase");
    this.status.append(this.phase, this.clock);
    this.phase.setAttribute("role", "status");
    this.thought = make("details", "thought");
    this.thought.append(make("summary", "", "Reasoning"));
    this.text = make("div", "text");
    this.facts = make("div", "facts");
    this.bar = make("div", "bar");
    this.bar.setAttribute("role", "img");
    this.legend = make("ul", "legend");
    this.thought.hidden = this.bar.hidden = this.legend.hidden = true;
    article("reply", "Answer", this.status, this.thought, this.text, this.facts, this.bar, this.legend);
    this.timer = setInterval(() => { this.clock.textContent = ` ${seconds(Math.round(this.age() * 10) / 10)}`; }, 100);
  }

  age() { return (performance.now() - this.begin) / 1000; }

  say(phase) { if (this.phase.textContent !== phase) this.phase.textContent = phase; }

  sent(n, of) { if (of > 1 << 16) this.say(`sends the question: ${Math.floor((100 * n) / of)} % of ${bytes(of)}`); }

  accepted() { this.say("the server has it: it waits its turn, or its pictures are prepared"); }

  event(event) {
    if (event.progress) this.say(DOING[event.progress.interval] ?? event.progress.interval);
    const choice = event.choices?.find((one) => one.index === 0), delta = choice?.delta ?? {};
    const thought = delta.reasoning_content ?? delta.reasoning;
    if (thought) this.#begun(this.thought, thought);
    if (delta.content) this.#begun(this.text, delta.content);
    for (const { function: call } of delta.tool_calls ?? []) {
      this.#begun(this.text, (call.name ? `${this.content ? "\n" : ""}${call.name} ` : "") + (call.arguments ?? ""));
    }
    this.why = choice?.finish_reason ?? this.why;
    this.usage = event.usage ?? this.usage;
  }

  #begun(element, words) {
    if (this.first === null) {
      this.first = this.age();
      this.say("decode");
      facts(this.facts, [["first token after", seconds(this.first)]]);
    }
    following(() => { element.hidden = false; element.append(words); });
    if (element === this.text) this.content += words;
  }

  fail(message) {
    this.status.replaceWith(make("p", "trouble", message));
  }

  // The end, for whatever reason; `stopped`: by the reader.
  end(stopped) {
    clearInterval(this.timer);
    this.status.remove();
    const told = this.usage?.hydrainfer, n = this.usage?.completion_tokens;
    const pace = told?.ttft_s != null && n > 1 ? (n - 1) / (told.e2e_s - told.ttft_s) : null;
    facts(this.facts, [
      ["first token after", told ? seconds(told.ttft_s) : this.first && seconds(this.first)],
      ["all after", seconds(told ? told.e2e_s : this.age())],
      ["tokens", this.usage && `${this.usage.prompt_tokens} in, ${n} out`],
      ["cached", this.usage?.prompt_tokens_details?.cached_tokens || null],
      ["pace", pace == null || !isFinite(pace) ? null : `${pace.toFixed(pace < 10 ? 1 : 0)} tokens/s`],
      ["per step", told?.n_steps ? `${(n / told.n_steps).toFixed(2)} tokens` : null],
      ["end", stopped ? "stopped by you" : this.why === "length" ? "at the limit of tokens" : null],
    ]);
    if (!told) return;
    showIntervals(this.bar, this.legend, Object.fromEntries(Object.keys(INTERVALS).map((name) => [name, told[`${name}_s`]])));
    this.bar.hidden = this.legend.hidden = false;
  }
}

function busy(now) {
  $("clear").disabled = now;
  $("stop").hidden = !now;
  checkOthers();
}

async function ask(settings, tray) {
  if (!(await tray.ready())) return;
  const question = { role: "user", text: $("question").value, media: tray.items };
  if ($("send").disabled || !(question.text.trim() || question.media.length)) return;
  const body = { ...bodyOf(settings.model, [...history, question]), ...OPTIONS };
  const shown = showQuestion(question), answer = new Answer();
  tray.take();
  $("question").value = "";
  running = stream("v1/chat/completions", settings.headers, body, answer);
  busy(true);
  let stopped = false, failed = false;
  $("stop").onclick = () => { stopped = true; running.stop(); };
  try {
    await running.done;
  } catch (error) {
    failed = true;
    answer.fail(error.message);
  }
  running = null;
  busy(false);
  following(() => answer.end(stopped));
  if (!failed && (answer.content || !stopped)) {
    history.push(question, { role: "assistant", text: answer.content });
    return;
  }
  shown.classList.add("failed"); // it is asked no more, but can be sent again
  if ($("question").value === "" && !tray.items.length) {
    $("question").value = question.text;
    tray.put(question.media);
  }
}

// The turns of the next request: those so far, and what is in the box now.
function next(tray) {
  const text = $("question").value;
  if (text.trim() || tray.items.length) return [...history, { role: "user", text, media: tray.items }];
  return history.length ? history.slice(0, -1) : [{ role: "user", text: "Hello" }];
}

function snippets(settings, tray) {
  const show = (write) => () => {
    const url = new URL("v1/chat/completions", location.href).href, { model, headers } = settings();
    $("snippet-text").textContent = write(url, model, next(tray), "Authorization" in headers);
    $("snippet-copy").textContent = "Copy";
    $("snippet").showModal();
  };
  $("as-curl").onclick = show(shellCommand);
  $("as-python").onclick = show(pythonScript);
  $("snippet-close").onclick = () => $("snippet").close();
  $("snippet-copy").onclick = async () => {
    getSelection().selectAllChildren($("snippet-text")); // where a page may not write the clipboard, it is marked at least
    try {
      await navigator.clipboard.writeText($("snippet-text").textContent);
      $("snippet-copy").textContent = "Copied";
    } catch {
      $("snippet-copy").textContent = "Marked: copy it";
    }
  };
}

function checkOthers() {
  let trouble = "";
  try {
    otherFields();
  } catch (error) {
    trouble = `Other fields: ${error.message}.`;
  }
  $("others-trouble").textContent = trouble;
  $("send").disabled = trouble !== "" || running !== null;
  $("as-curl").disabled = $("as-python").disabled = trouble !== "";
}

// Files that are dropped anywhere go to the tray: the browser would open them, or a link, in place of the chat. What is
// dropped into a field as text is left to the browser.
function catchDrops(tray) {
  const over = (now) => $("chat").classList.toggle("over", now);
  const hasFiles = (e) => e.dataTransfer.types.includes("Files");
  const isText = (e) => !hasFiles(e) && e.target.matches?.("textarea, input");
  addEventListener("dragover", (e) => {
    if (isText(e)) return;
    e.preventDefault();
    over(hasFiles(e));
  });
  addEventListener("dragleave", (e) => { if (e.relatedTarget === null) over(false); });
  addEventListener("drop", (e) => {
    over(false);
    if (isText(e)) return;
    e.preventDefault();
    tray.add(e.dataTransfer.files);
  });
}

// `settings()`: the model's name, the headers of requests, and what the server takes (of /v1/overview).
export function playground(settings) {
  const tray = new Tray(() => settings().takes);
  catchDrops(tray);
  addEventListener("paste", (e) => { if (e.clipboardData.files.length) tray.add(e.clipboardData.files); });
  $("pick").onclick = () => $("file").click();
  $("file").onchange = () => { tray.add($("file").files); $("file").value = ""; };
  $("question").onkeydown = (e) => {
    if (e.key === "Enter" && !e.shiftKey && !e.isComposing) { e.preventDefault(); $("ask").requestSubmit(); }
  };
  $("others").oninput = checkOthers;
  $("clear").onclick = () => {
    history = [];
    $("log").replaceChildren($("log-empty"));
    $("log-empty").hidden = false;
    tray.clear();
    $("question").focus();
  };
  $("ask").onsubmit = (e) => { e.preventDefault(); if (!running && !$("send").disabled) ask(settings(), tray); };
  snippets(settings, tray);
  if (matchMedia("(max-width: 760px)").matches) $("settings").open = false;
}
