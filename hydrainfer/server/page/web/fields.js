// The fields of a JSON schema as a table: name, type, what it does, default, example. Objects inside unfold.

import { make } from "./dom.js";

const inner = (schema, schemas) => (schema.$ref ? schemas[schema.$ref.split("/").pop()] : schema);

// The alternatives of a schema, without null.
function choices(schema) {
  return schema.anyOf ? schema.anyOf.filter((one) => one.type !== "null") : [schema];
}

function typeOf(schema) {
  if (schema.$ref) return schema.$ref.split("/").pop().split(".").pop();
  if (schema.anyOf) return choices(schema).map(typeOf).join(" or ");
  if (schema.type === "array" && schema.items) return `list of ${typeOf(schema.items)}`;
  return schema.type ?? "any";
}

// The objects with fields of their own that a schema refers to.
function objects(schema) {
  return choices(schema).flatMap((one) => {
    if (one.$ref) return [one];
    return one.type === "array" && one.items ? objects(one.items) : [];
  });
}

function limits({ minimum, maximum, enum: words }) {
  if (words) return `one of ${words.join(", ")}`;
  if (minimum != null && maximum != null) return `from ${minimum} to ${maximum}`;
  if (minimum != null) return `at least ${minimum}`;
  return maximum == null ? "" : `at most ${maximum}`;
}

function cell(label, name, ...children) {
  const box = make("td", name);
  box.dataset.label = label;
  box.append(...children);
  return box;
}

function defaultOf(field, required) {
  if (required) return "required";
  return field["x-unset"] ?? JSON.stringify(field.default);
}

function row(name, field, required) {
  const line = make("tr"), head = make("th"), about = make("p", "", field.description), more = limits(field);
  head.scope = "row";
  head.append(make("code", "name", name), make("span", "quiet", typeOf(field)));
  const what = cell("what", "what", about);
  if (more) what.append(make("p", "quiet", more));
  const examples = (field.examples ?? []).map((one) => make("code", "", JSON.stringify(one)));
  line.append(head, what, cell("default", required ? "needed" : "", make("span", "", defaultOf(field, required))),
    cell("example", "", ...examples));
  return line;
}

function unfolding(ref, schemas) {
  const line = make("tr", "inside"), box = make("td"), details = make("details"), schema = inner(ref, schemas);
  details.append(make("summary", "quiet", `fields of ${typeOf(ref)}`));
  if (schema.description) details.append(make("p", "quiet", schema.description));
  details.append(fieldTable(schema, schemas, `Fields of ${typeOf(ref)}`));
  box.colSpan = 4;
  box.append(details);
  line.append(box);
  return line;
}

// `caption`: what the fields belong to. `schemas`: those that `$ref` names.
export function fieldTable(schema, schemas, caption) {
  const table = make("table", "fields-of"), head = make("thead"), titles = make("tr"), body = make("tbody");
  for (const title of ["field", "what it does", "default", "example"]) {
    const one = make("th", "", title);
    one.scope = "col";
    titles.append(one);
  }
  head.append(titles);
  const required = new Set(schema.required ?? []), named = Object.entries(schema.properties ?? {});
  for (const [name, field] of [...named.filter(([n]) => required.has(n)), ...named.filter(([n]) => !required.has(n))]) {
    body.append(row(name, field, required.has(name)), ...objects(field).map((ref) => unfolding(ref, schemas)));
  }
  table.append(make("caption", "", caption), head, body);
  return table;
}

// The same for the parameters of a path and of a query.
export function parameterTable(parameters) {
  const named = parameters.map(({ name, schema, description }) => [name, { ...schema, description }]);
  const required = parameters.filter((one) => one.required).map((one) => one.name);
  return fieldTable({ properties: Object.fromEntries(named), required }, {}, "Parameters");
}
