// The text and the settings in the address: text=...&a=model&a.num_beams=4&b=...&b.text=...

/** Write `{text, sides: [{model, settings, text}]}` as the part of an address after #; a side may have its own text. */
export function toHash({ text, sides }) {
  const values = new URLSearchParams({ text });
  sides.forEach(({ model, settings, text: own }, index) => {
    const side = "ab"[index];
    values.set(side, model);
    if (own != null) values.set(`${side}.text`, own);
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
    .map((side) => {
      const own = [...values].filter(([name]) => name.startsWith(`${side}.`)).map(([name, value]) => [name.slice(2), value]);
      const { text, ...settings } = Object.fromEntries(own);
      return { model: values.get(side), settings, text };
    });
  return { text: values.get("text"), sides };
}
