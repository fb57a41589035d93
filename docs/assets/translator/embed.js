// Show the translator in place of its picture, in the colors of the page around it. Modules do not run in pages from the
// disk, where the translator would not run, either.

const frame = document.createElement("iframe");
const text = "forty-seven thousand two hundred sixty-three";
Object.assign(frame, { title: "A translator of number words", loading: "lazy", src: new URL(`index.html#${new URLSearchParams({ text })}`, import.meta.url) });

function setScheme() {
  frame.contentDocument.documentElement.dataset.scheme = document.body.dataset.mdColorScheme === "slate" ? "dark" : "light";
}

frame.addEventListener("load", setScheme);
new MutationObserver(setScheme).observe(document.body, { attributeFilter: ["data-md-color-scheme"] });
document.querySelector(".translator").replaceChildren(frame);
