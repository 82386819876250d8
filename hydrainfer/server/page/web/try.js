// "Try it": sends a request that the reader may change, and shows what comes back as it comes.

import { make, quoted, seconds } from "./dom.js";

// A command for a shell that sends the same request.
export function shellCommand(method, url, body, hasKey) {
  const words = ["curl -sN"];
  if (method !== "get") words.push(`-X ${method.toUpperCase()}`);
  words.push(quoted(url));
  if (hasKey) words.push('-H "Authorization: Bearer $HYDRAINFER_API_KEY"');
  if (body !== null) words.push("-H 'Content-Type: application/json'", `-d ${quoted(body)}`);
  return words.join(" \\\n  ");
}

function parameterInput({ name, schema, description }, id) {
  const label = make("label", "", name), input = make("input");
  label.htmlFor = input.id = id;
  input.value = schema.examples?.[0] ?? "";
  input.title = description;
  return { label, input };
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

function button(text, name = "plain", type = "button") {
  const made = make("button", name, text);
  made.type = type;
  return made;
}

class Try {
  // `operation`: of openapi.json. `key()`: the API key or "". `refused(try)`: called when the server asks for a key.
  constructor(method, path, operation, id, { key, refused }) {
    Object.assign(this, { method, path, key, refused, request: null });
    this.form = make("form", "try");
    this.parameters = (operation.parameters ?? []).map((one, i) => ({ ...one, ...parameterInput(one, `${id}-${i}`) }));
    for (const { label, input } of this.parameters) this.form.append(label, input);
    this.example = operation.requestBody?.content["application/json"].example;
    if (this.example !== undefined) this.addBody(id);
    this.addButtons();
    this.form.onsubmit = (e) => {
      e.preventDefault();
      this.send();
    };
  }

  addBody(id) {
    const label = make("label", "", "Body (JSON)");
    this.text = make("textarea");
    this.text.value = JSON.stringify(this.example, null, 2);
    this.text.rows = this.text.value.split("\n").length + 1;
    this.text.spellcheck = false;
    label.htmlFor = this.text.id = `${id}-body`;
    this.form.append(label, this.text);
  }

  addButtons() {
    const row = make("div", "row"), copy = button("Copy as curl");
    this.stop = button("Stop");
    this.stop.hidden = true;
    this.stop.onclick = () => this.request?.abort();
    copy.onclick = () => this.copy();
    row.append(button("Send", "", "submit"), this.stop, copy);
    this.status = make("p", "status quiet");
    this.status.setAttribute("role", "status");
    this.answer = make("pre", "answer");
    this.answer.tabIndex = 0;
    this.answer.setAttribute("aria-label", "The answer");
    this.answer.hidden = true;
    this.form.append(row, this.status, this.answer);
  }

  get address() {
    const query = new URLSearchParams();
    let path = this.path;
    for (const { name, in: place, input } of this.parameters) {
      if (place === "path") path = path.replace(`{${name}}`, encodeURIComponent(input.value));
      else if (input.value !== "") query.set(name, input.value);
    }
    const url = new URL(path.slice(1), location.href);
    url.search = query;
    return url.href;
  }

  // The body as text, null if the path takes none. Fails if it is no JSON.
  get body() {
    if (!this.text) return null;
    JSON.parse(this.text.value);
    return this.text.value;
  }

  say(text, bad = false) {
    this.status.textContent = text;
    this.status.className = `status ${bad ? "trouble" : "quiet"}`;
  }

  show(text) {
    this.answer.textContent = text;
    this.answer.hidden = false;
  }

  // What is to be sent; null if the body is no JSON, which is then said.
  checked() {
    try {
      return { url: this.address, body: this.body };
    } catch (e) {
      this.answer.hidden = true;
      this.say(`The body is no JSON: ${e.message}`, true);
      return null;
    }
  }

  async send() {
    const asked = this.checked();
    if (asked === null) return;
    this.request?.abort();
    const request = this.request = new AbortController();
    const headers = asked.body === null ? {} : { "Content-Type": "application/json" };
    if (this.key()) headers.Authorization = `Bearer ${this.key()}`;
    this.say("sent, waiting");
    this.answer.hidden = true;
    this.stop.hidden = false;
    try {
      await this.read({ method: this.method.toUpperCase(), headers, body: asked.body, signal: request.signal }, asked.url);
    } catch (e) {
      if (this.request !== request) return; // another one has been sent since
      if (e.name === "AbortError") this.say("stopped by you");
      else this.say("the server does not answer, or the connection broke", true);
    }
    if (this.request === request) this.stop.hidden = true;
  }

  async read(options, url) {
    const begun = performance.now();
    const response = await fetch(url, options);
    const state = `${response.status} ${response.statusText}`.trim(), kind = response.headers.get("content-type") ?? "";
    const reader = response.body.getReader(), decoder = new TextDecoder();
    let text = "";
    this.say(`${state}, the answer comes`, !response.ok);
    for (let part; !(part = await reader.read()).done;) {
      text += decoder.decode(part.value, { stream: true });
      this.show(text);
    }
    this.show(kind.startsWith("application/json") ? pretty(text) : text);
    this.say(`${state} · ${kind.split(";")[0]} · ${seconds((performance.now() - begun) / 1000)}`, !response.ok);
    if (response.status === 401) this.refused(this);
  }

  async copy() {
    const asked = this.checked();
    if (asked === null) return;
    const command = shellCommand(this.method, asked.url, asked.body, this.key() !== "");
    this.show(command);
    try {
      await navigator.clipboard.writeText(command);
      this.say("copied");
    } catch {
      this.say("This browser does not let the page copy; here is the command:");
    }
  }
}

// The form of an operation.
export function tryIt(method, path, operation, id, keys) {
  return new Try(method, path, operation, id, keys).form;
}
