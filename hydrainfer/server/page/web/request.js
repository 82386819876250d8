// What the playground asks: the body of the next request, and the same as curl and as Python.

import { $, quoted } from "./dom.js";
import { isVideo } from "./media.js";

const NUMBERS = { "max-tokens": "max_tokens", temperature: "temperature", "top-p": "top_p", seed: "seed" };
const OF_OPENAI = new Set(["model", "messages", "max_tokens", "temperature", "top_p", "seed", "stop", "stream", "n", "logprobs",
  "top_logprobs", "presence_penalty", "frequency_penalty", "logit_bias", "response_format", "tools", "tool_choice", "user",
  "max_completion_tokens", "reasoning_effort", "parallel_tool_calls", "prediction", "stream_options"]);

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`this is no JSON object (${error.message})`);
  }
}

// The object in the box of other fields. Fails if it is none, or asks for what the playground does not show.
export function otherFields() {
  const text = $("others").value.trim();
  if (text === "") return {};
  const value = parsed(text);
  if (value === null || typeof value !== "object" || Array.isArray(value)) throw new Error("this is no JSON object");
  if (value.n > 1) throw new Error("the playground shows one answer to a question, so n cannot be more than 1 here");
  return value;
}

function message({ role, text, media = [] }, urlOf) {
  if (!media.length) return { role, content: text };
  const parts = media.map((one) => {
    const type = isVideo(one) ? "video_url" : "image_url";
    return { type, [type]: { url: urlOf(one) } };
  });
  return { role, content: [...parts, { type: "text", text }] };
}

// The body of a request with these turns. `urlOf`: the URL of a picture or video.
export function bodyOf(model, turns, urlOf = (one) => one.url) {
  const system = $("system").value.trim(), stop = $("stops").value.split("\n").filter((line) => line !== "");
  const numbers = Object.entries(NUMBERS).filter(([id]) => $(id).value !== "").map(([id, name]) => [name, Number($(id).value)]);
  const first = system ? [{ role: "system", text: system }] : [];
  return {
    model, messages: [...first, ...turns].map((turn) => message(turn, urlOf)), ...Object.fromEntries(numbers),
    ...(stop.length ? { stop } : {}), ...otherFields(), stream: true,
  };
}

// A command for a shell. Pictures are read from files with the names that they had.
export function shellCommand(url, model, turns, hasKey) {
  const files = [], mark = `file-${Math.random().toString(36).slice(2)}-`; // a text that nobody has written
  const body = bodyOf(model, turns, (one) => `${mark}${files.push(one) - 1}`);
  const json = JSON.stringify(body, null, 2).replace(/[\\$`]/g, "\\$&").replace(new RegExp(`${mark}(\\d+)`, "g"), (_, i) => {
    const { kind, name } = files[i];
    return `data:${kind};base64,$(base64 < ${quoted(name)} | tr -d '\\n')`;
  });
  const key = hasKey ? ` -H "Authorization: Bearer $HYDRAINFER_API_KEY" \\\n ` : "";
  return `curl -N ${url} -H 'Content-Type: application/json' \\\n ${key} -d @- <<JSON\n${json}\nJSON\n`;
}

class Code {
  constructor(text) { this.text = text; }
}

function python(value, indent) {
  if (value instanceof Code) return value.text;
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const more = `${indent}    `;
  const [open, close, entries] = Array.isArray(value)
    ? ["[", "]", value.map((one) => python(one, more))]
    : ["{", "}", Object.entries(value).map(([name, one]) => `${JSON.stringify(name)}: ${python(one, more)}`)];
  const flat = open + entries.join(", ") + close;
  if (flat.length < 80 && !flat.includes("\n")) return flat;
  return `${open}\n${entries.map((entry) => `${more}${entry},\n`).join("")}${indent}${close}`;
}

// A script that uses OpenAI's client.
export function pythonScript(url, model, turns, hasKey) {
  const files = turns.some((turn) => turn.media?.length);
  const body = bodyOf(model, turns, (one) => new Code(`encoded(${JSON.stringify(one.name)}, ${JSON.stringify(one.kind)})`));
  const own = Object.entries(body).filter(([name]) => OF_OPENAI.has(name));
  const extra = Object.fromEntries(Object.entries(body).filter(([name]) => !OF_OPENAI.has(name)));
  const lines = own.map(([name, value]) => `    ${name}=${python(value, "    ")},\n`);
  if (Object.keys(extra).length) lines.push(`    extra_body=${python(extra, "    ")},\n`);
  const reads = `
def encoded(path, kind):
    with open(path, "rb") as file:
        return f"data:{kind};base64,{base64.b64encode(file.read()).decode()}"

`;
  return `${files ? "import base64\n" : ""}${hasKey ? "import os\n" : ""}${files || hasKey ? "\n" : ""}from openai import OpenAI
${files ? `\n${reads}` : ""}
client = OpenAI(base_url=${JSON.stringify(url.replace("/chat/completions", ""))}, api_key=${hasKey ? 'os.environ["HYDRAINFER_API_KEY"]' : '"none"'})
answer = client.chat.completions.create(
${lines.join("")})
for chunk in answer:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
`;
}
