// openapi.json as a page: what each path takes and answers.

import { $, make } from "./dom.js";

const said = (schema) => {
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.anyOf) return schema.anyOf.filter((s) => s.type !== "null").map(said).join(" or ");
  if (schema.type === "array" && schema.items) return `list of ${said(schema.items)}`;
  return schema.type ?? "any";
};

function fields(schema) {
  const list = make("dl", "fields");
  const required = schema.required ?? [];
  for (const [name, kind] of Object.entries(schema.properties ?? {})) {
    list.append(make("dt", required.includes(name) ? "required" : "", name), make("dd", "quiet", said(kind)));
  }
  return list;
}

function operation(method, path, what, schemas) {
  const box = make("details", "card operation");
  const head = make("summary");
  head.append(make("code", `method ${method}`, method.toUpperCase()), make("code", "", path), make("span", "quiet", what.summary));
  box.append(head);
  const body = what.requestBody?.content["application/json"].schema.$ref;
  if (body) box.append(make("h3", "", "Body (JSON)"), fields(schemas[body.split("/").pop()]));
  const asked = (what.parameters ?? []).map((p) => `${p.name} (${p.in}, ${said(p.schema)})`);
  if (asked.length) box.append(make("h3", "", "Parameters"), make("p", "", asked.join(", ")));
  box.append(make("h3", "", "Answers"));
  for (const [status, answer] of Object.entries(what.responses)) {
    box.append(make("p", "quiet", `${status}: ${answer.description} (${Object.keys(answer.content).join(" or ")})`));
  }
  box.append(make("p", "quiet", what.security ? "Authorization: Bearer KEY, where the server has keys" : "needs no key"));
  return box;
}

const api = await (await fetch("openapi.json")).json();
$("version").textContent = api.info.version;
for (const [path, operations] of Object.entries(api.paths)) {
  for (const [method, what] of Object.entries(operations)) {
    if (method !== "head") $("paths").append(operation(method, path, what, api.components.schemas));
  }
}
