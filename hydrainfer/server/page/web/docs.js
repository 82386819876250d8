// openapi.json as a page: what each path takes and answers, to read and to try.

import { $, make } from "./dom.js";
import { fieldTable, parameterTable } from "./fields.js";
import { tryIt } from "./try.js";

let key = "", waiting = null;
const keys = {
  key: () => key,
  refused: (form) => {
    waiting = form;
    $("key-label").textContent = key ? "This key is not known; another API key" : "This server asks for an API key";
    $("key").hidden = false;
    $("key-text").focus();
  },
};

$("key").onsubmit = (e) => {
  e.preventDefault();
  key = $("key-text").value.trim();
  $("key").hidden = true;
  waiting.form.querySelector("button").focus();
  waiting.send();
};

function answers(operation) {
  const list = make("dl", "answers");
  for (const [status, answer] of Object.entries(operation.responses)) {
    const kinds = Object.keys(answer.content).join(" or "), what = make("dd", "", `${answer.description} `);
    if (status === "200") what.append(make("span", "quiet", kinds));
    list.append(make("dt", "", status), what);
  }
  return list;
}

function fill(box, id, method, path, operation, schemas) {
  const body = operation.requestBody?.content["application/json"].schema.$ref;
  box.append(make("p", "about", operation.description));
  box.append(make("p", "quiet", operation.security ? "Authorization: Bearer KEY, where the server has keys" : "Needs no key"));
  box.append(make("h2", "", "Try it"), tryIt(method, path, operation, id, keys));
  if (operation.parameters) box.append(make("h2", "", "Parameters"), parameterTable(operation.parameters));
  if (body) box.append(make("h2", "", "Body"), fieldTable(schemas[body.split("/").pop()], schemas, "Fields of the body"));
  box.append(make("h2", "", "Answers"), answers(operation));
}

// An operation, which is filled when it is opened.
function drawn(method, path, operation, schemas) {
  const box = make("details", "card operation"), head = make("summary");
  box.id = `${method}${path.replace(/[^a-z0-9]+/g, "-")}`;
  head.append(make("code", `method ${method}`, method.toUpperCase()), make("code", "", path));
  head.append(make("span", "quiet", operation.summary));
  box.append(head);
  box.ontoggle = () => {
    if (box.childElementCount === 1) fill(box, box.id, method, path, operation, schemas);
  };
  return box;
}

const api = await (await fetch("openapi.json")).json();
$("version").textContent = api.info.version;
$("about").textContent = api.info.description;
const all = Object.entries(api.paths).flatMap(([path, operations]) => (
  Object.entries(operations).filter(([method]) => method !== "head").map(([method, operation]) => ({ method, path, operation }))
));
const last = ({ operation }) => Number(!operation.requestBody) + Number(!operation.security); // probes
for (const { method, path, operation } of all.sort((a, b) => last(a) - last(b))) {
  $("paths").append(drawn(method, path, operation, api.components.schemas));
}

// An address such as docs#post-v1-chat-completions opens that operation.
const named = document.getElementById(location.hash.slice(1));
if (named?.matches("details")) {
  named.open = true;
  named.scrollIntoView();
}
