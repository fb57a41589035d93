"""Record the pictures of the explorer in docs/images from a running server: `python bench/record_explorer.py`.

It needs Chromium, `pip install playwright pillow`, and two models, that of `xformer demo` and a GGUF file:
`xformer serve --model xformer-demo --model SmolLM2-135M-Instruct.Q4_1.gguf --name xformer-demo SmolLM2-135M-Instruct`.
"""

from __future__ import annotations

import io
import shutil
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from PIL import Image
from playwright.sync_api import sync_playwright

TEXT = "eight hundred forty-six"
FOLDER = Path(__file__).parents[1] / "docs" / "images"
OUT = FOLDER / "explorer.webp"  # the picture in the README
SIZE, SCALE = {"width": 1060, "height": 860}, 0.74
NUMBER = {"a": "xformer-demo", "text": "eight hundred thirty-six"}
CAPITAL = {"a": "SmolLM2-135M-Instruct", "text": "The capital of France is", "a.max_new_tokens": 2, "a.prompt": "text"}
# What is set (the address of "Copy link"), the height, and what is clicked: the pictures without movement.
PICTURES: dict[str, tuple[dict[str, Any], int, list[str]]] = {
    "explorer": ({"a": "xformer-demo", "text": "seventy thousand eight hundred nine"}, 860, []),
    "explorer-attention": (NUMBER, 1045, [".head[data-layer='1'][data-head='2']"]),
    "explorer-beam": (NUMBER | {"a.method": "beam"}, 1210, ["[data-tab=beam]"]),
    "explorer-layers": (CAPITAL, 1345, [".output .token >> nth=0", "[data-tab=layers]"]),
    "explorer-switch": (
        CAPITAL,
        1085,
        [".output .token >> nth=0", "[data-tab=switches]", ".switch[title*='layer 24, head 5']"],
    ),
}
# A headless browser draws no pointer.
POINTER = """() => {
    const pointer = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    pointer.innerHTML = '<path d="M1 1v19l5-5 3 8 4-2-3-7h7z" fill="#111" stroke="#fff" stroke-width="1.5"/>';
    const style = { position: "fixed", width: "24px", height: "26px", pointerEvents: "none", zIndex: 9 };
    Object.assign(pointer.style, style);
    document.body.append(pointer);
    addEventListener("pointermove", (event) =>
        Object.assign(pointer.style, { left: `${event.clientX}px`, top: `${event.clientY}px` }));
}"""


def record(page: Any) -> list[tuple[Image.Image, int]]:
    """Return pictures, and for how many milliseconds each one is shown."""
    frames = []

    def show(milliseconds: int) -> None:
        page.wait_for_timeout(250)  # the shading of tokens changes slowly
        frames.append((Image.open(io.BytesIO(page.screenshot())).convert("RGB"), milliseconds))

    def point(selector: str, milliseconds: int) -> None:
        box = page.locator(selector).bounding_box()
        page.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 0.6 * box["height"])
        show(milliseconds)

    page.evaluate(POINTER)
    point("#text", 700)
    page.focus("#text")
    for start in range(0, len(TEXT), 4):
        page.keyboard.type(TEXT[start : start + 4])
        show(180)
    point("#generate", 400)
    page.click("#generate")
    page.wait_for_selector("#json:enabled")
    page.wait_for_selector(".heat-map")
    show(700)
    page.mouse.wheel(0, 100)
    num_tokens = page.locator(".output .token").count()
    for index in range(1, num_tokens):
        point(f".output .token >> nth={index}", 900)
    point("[data-tab=layers] >> nth=0", 400)
    page.mouse.down()
    page.mouse.up()
    page.wait_for_selector(".flow")
    show(1500)
    for index in (2, 3, num_tokens - 1):
        point(f".output .token >> nth={index}", 1100)
    frames[-1] = (frames[-1][0], 3000)
    return frames


def take(browser: Any, address: str, name: str) -> None:
    """Write one of the pictures without movement."""
    settings, height, clicks = PICTURES[name]
    page = browser.new_page(viewport={"width": 1280, "height": height}, color_scheme="light", bypass_csp=True)
    page.goto(f"{address}/#{urlencode(settings)}")
    page.wait_for_selector("#json:enabled")
    page.wait_for_selector(".heat-map")
    for selector in clicks:
        page.locator(selector).first.click()
        page.wait_for_function("!document.querySelector('.panel').innerText.includes('Running …')")
    page.mouse.move(1, 1)
    page.evaluate("scrollTo(0, 0)")
    page.wait_for_timeout(1000)
    picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    picture.quantize(128, dither=Image.Dither.NONE).save(FOLDER / f"{name}.png", optimize=True)
    print(FOLDER / f"{name}.png")


def main(address: str = "http://127.0.0.1:8000") -> None:
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport=SIZE, device_scale_factor=SCALE, color_scheme="light")
        page.goto(f"{address}/#text=")
        page.wait_for_selector(".column")
        images, durations = zip(*record(page), strict=True)
        for name in PICTURES:
            take(browser, address, name)
    # Fewer shades: two thirds of the size, and letters stay sharp.
    pictures = [image.point([5 * round(value / 5) for value in range(256)] * 3) for image in images]
    options: dict[str, Any] = {
        "duration": list(durations),
        "loop": 0,
        "lossless": True,
        "method": 6,
        "minimize_size": True,
    }
    pictures[0].save(OUT, save_all=True, append_images=pictures[1:], **options)
    print(f"{OUT}: {len(pictures)} pictures, {OUT.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(*sys.argv[1:])
