// The page of routes: each one with its structures, and the fields of all structures, from openapi.json.

import { html } from "./dom.js";

/** The structure of a body, as a link. */
const link = (body) => {
  const name = Object.values(body?.content ?? {})[0]?.schema.$ref?.split("/").pop();
  return name ? [html("a", { href: `#${name}` }, name), " "] : [];
};

/** A type in a schema for readers. */
function kind(field) {
  if (field.anyOf) return field.anyOf.map(kind).join(" or ");
  if (field.enum) return field.enum.join(" or ");
  if (field.type === "array") return field.items?.type || field.items?.$ref ? `list of ${kind(field.items)}` : "list";
  const bounds = [["≥", field.minimum], ["≤", field.maximum]].filter(([, bound]) => bound != null);
  return [field.$ref?.split("/").pop() ?? field.type ?? "any", ...bounds.flat()].join(" ");
}

const { paths, components } = await (await fetch("openapi.json")).json();
const routes = Object.entries(paths).flatMap(([path, methods]) => Object.entries(methods).flatMap(([method, route]) => {
  const answer = link(route.responses[200]);
  const events = route.responses[200].content["text/event-stream"]?.schema.description;
  return [
    html("h2", {}, `${method.toUpperCase()} ${path}`),
    html("p", {}, `${route.summary} `, ...link(route.requestBody), ...(answer.length ? ["→ ", ...answer] : [])),
    ...(events ? [html("p", {}, `Stream: ${events}`)] : []),
  ];
}));
const structures = Object.entries(components.schemas).flatMap(([name, { description = "", properties = {}, required = [] }]) => [
  html("h2", { id: name }, name),
  html("p", {}, description),
  html("table", { tabindex: 0 }, ...Object.entries(properties).map(([key, field]) => html("tr", {}, ...[
    key, kind(field), required.includes(key) ? "required" : JSON.stringify(field.default) ?? "", field.description ?? "",
  ].map((cell) => html("td", {}, cell))))),
]);
document.getElementById("routes").append(...routes, ...structures);
