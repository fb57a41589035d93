// The text and the settings in the address: text=...&a=model&a.num_beams=4&b=...

/** Write `{text, sides: [{model, settings}]}` as the part of an address after #. */
export function toHash({ text, sides }) {
  const values = new URLSearchParams({ text });
  sides.forEach(({ model, settings }, index) => {
    const side = "ab"[index];
    values.set(side, model);
    for (const [name, value] of Object.entries(settings)) values.set(`${side}.${name}`, value);
  });
  return `#${values}`;
}

/** Read what `toHash` wrote; null without a text. Settings are strings. */
export function fromHash(hash) {
  const values = new URLSearchParams(hash.replace(/^#/, ""));
  if (!values.has("text")) return null;
  const sides = [..."ab"]
    .filter((side) => values.has(side))
    .map((side) => ({
      model: values.get(side),
      settings: Object.fromEntries(
        [...values].filter(([name]) => name.startsWith(`${side}.`)).map(([name, value]) => [name.slice(2), value]),
      ),
    }));
  return { text: values.get("text"), sides };
}
