"""Record docs/images/explorer.webp, the picture in the README, from a running server.

It needs Chromium, `pip install playwright pillow`, and `xformer serve --model xformer-demo` (of `xformer demo`):
`python bench/record_explorer.py`.
"""

from __future__ import annotations

import io
import shutil
import sys
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

TEXT = "eight hundred forty-six"
OUT = Path(__file__).parents[1] / "docs" / "images" / "explorer.webp"
SIZE, SCALE = {"width": 1060, "height": 860}, 0.74
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


with sync_playwright() as driver:
    browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
    page = browser.new_page(viewport=SIZE, device_scale_factor=SCALE, color_scheme="light")
    page.goto(f"{(sys.argv[1:] or ['http://127.0.0.1:8000'])[0]}/#text=")
    page.wait_for_selector(".column")
    images, durations = zip(*record(page), strict=True)
# Fewer shades: two thirds of the size, and letters stay sharp.
pictures = [image.point([5 * round(value / 5) for value in range(256)] * 3) for image in images]
options: dict[str, Any] = {"duration": list(durations), "loop": 0, "lossless": True, "method": 6, "minimize_size": True}
pictures[0].save(OUT, save_all=True, append_images=pictures[1:], **options)
print(f"{OUT}: {len(pictures)} pictures, {OUT.stat().st_size:,} bytes")
