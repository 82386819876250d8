// The playground: one question about one picture, streamed, with the time that each stage took.

import { $, INTERVALS, make, seconds, showIntervals } from "./dom.js";

const KINDS = ["image/jpeg", "image/png", "image/webp", "image/gif"];
let picture = null; // a data: URL
let running = null; // an AbortController

function show(file) {
  if (!file || !KINDS.includes(file.type)) {
    if (file) fail("This is no JPEG, PNG, WebP or GIF picture.");
    return;
  }
  const reader = new FileReader();
  reader.onload = () => setPicture(reader.result);
  reader.readAsDataURL(file);
}

function setPicture(url) {
  picture = url;
  $("picture").hidden = $("unpick").hidden = url === null;
  $("drop-text").hidden = url !== null;
  if (url) $("picture").src = url;
  else $("picture").removeAttribute("src");
}

function fail(message) {
  const text = $("answer");
  text.classList.add("bad");
  text.textContent = message;
}

function facts(entries) {
  const parts = entries.filter(([, value]) => value != null).map(([name, value]) => {
    const span = make("span", "", `${name} `);
    span.append(make("b", "", value));
    return span;
  });
  $("answer-facts").replaceChildren(...parts);
  $("answer-facts").hidden = parts.length === 0;
}

// The JSON objects of a stream of server-sent events.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: {")) yield JSON.parse(line.slice(6));
    }
  }
}

function body(model) {
  const content = [{ type: "text", text: $("question").value }];
  if (picture) content.unshift({ type: "image_url", image_url: { url: picture } });
  const temperature = $("temperature").value;
  return {
    model, stream: true, stream_options: { include_usage: true }, timings: true,
    max_tokens: Number($("max-tokens").value) || 128,
    ...(temperature === "" ? {} : { temperature: Number(temperature) }),
    messages: [{ role: "user", content: picture ? content : $("question").value }],
  };
}

async function ask(model, headers) {
  const begin = performance.now(), text = $("answer");
  let first = null, usage = null, why = null;
  const response = await fetch("v1/chat/completions", {
    method: "POST", body: JSON.stringify(body(model)), signal: running.signal,
    headers: { "Content-Type": "application/json", ...headers },
  });
  if (!response.ok) throw new Error((await response.json()).error.message);
  for await (const event of events(response)) {
    if (event.error) throw new Error(event.error.message);
    const choice = event.choices[0];
    if (choice?.delta.content) {
      first ??= performance.now();
      text.append(choice.delta.content);
      text.scrollTop = text.scrollHeight;
      facts([["first token after", seconds((first - begin) / 1000)]]);
    }
    why = choice?.finish_reason ?? why;
    usage = event.usage ?? usage;
  }
  finish(begin, usage, why);
}

function finish(begin, usage, why) {
  const told = usage?.hydrainfer, n = usage?.completion_tokens;
  const pace = told?.ttft_s != null && n > 1 ? (n - 1) / (told.e2e_s - told.ttft_s) : null;
  facts([
    ["first token after", told ? seconds(told.ttft_s) : null],
    ["all after", seconds(told ? told.e2e_s : (performance.now() - begin) / 1000)],
    ["tokens", usage ? `${usage.prompt_tokens} in, ${n} out` : null],
    ["pace", pace == null || !isFinite(pace) ? null : `${pace.toFixed(pace < 10 ? 1 : 0)} tokens/s`],
    ["per step", told?.n_steps ? `${(n / told.n_steps).toFixed(2)} tokens` : null],
    ["end", why === "length" ? "at the limit of tokens" : null],
  ]);
  if (!told) return;
  const times = Object.fromEntries(Object.keys(INTERVALS).map((name) => [name, told[`${name}_s`]]));
  showIntervals($("answer-bar"), $("answer-legend"), times);
  $("answer-bar").hidden = $("answer-legend").hidden = false;
}

// `settings` says the model's name, the headers of requests, and whether the model takes pictures.
export function playground(settings) {
  const drop = $("drop");
  drop.onclick = (e) => { if (e.target !== $("unpick")) $("file").click(); };
  drop.onkeydown = (e) => { if (e.target === drop && (e.key === "Enter" || e.key === " ")) { e.preventDefault(); $("file").click(); } };
  drop.ondragover = (e) => { e.preventDefault(); drop.classList.add("over"); };
  drop.ondragleave = () => drop.classList.remove("over");
  drop.ondrop = (e) => { e.preventDefault(); drop.classList.remove("over"); show(e.dataTransfer.files[0]); };
  addEventListener("paste", (e) => { if (e.clipboardData.files.length) show(e.clipboardData.files[0]); });
  $("file").onchange = () => { show($("file").files[0]); $("file").value = ""; };
  $("unpick").onclick = () => setPicture(null);
  $("stop").onclick = () => running?.abort();
  $("question").onkeydown = (e) => { if (e.key === "Enter" && !e.shiftKey) { e.preventDefault(); $("ask").requestSubmit(); } };
  $("ask").onsubmit = async (e) => {
    e.preventDefault();
    if (running) return;
    running = new AbortController();
    const text = $("answer");
    text.replaceChildren();
    text.classList.remove("bad");
    text.classList.add("running");
    facts([]);
    $("answer-bar").hidden = $("answer-legend").hidden = true;
    $("send").disabled = true;
    $("stop").hidden = false;
    try {
      await ask(settings().model, settings().headers);
    } catch (error) {
      if (error.name !== "AbortError") fail(error.message);
    } finally {
      running = null;
      text.classList.remove("running");
      $("send").disabled = false;
      $("stop").hidden = true;
    }
  };
}
