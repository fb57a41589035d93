"""The explorer in Chromium: type, generate, hover, switch heads, export; without a browser, its files only."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urljoin
from xml.etree import ElementTree

import pytest

import xformer
from tests.checkpoints import checkpoint
from xformer.cli.main import exit_code
from xformer.data.demo_tasks import numbers_task

STATIC = Path(xformer.__file__).parent / "serve" / "static"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
ARGUMENTS = ["--no-sandbox", "--headless=new", "--disable-gpu", "--disable-quic", "--disable-background-networking"]
PAGES = {"index.html", "docs.html", "page.html"}
TEXT = "two hundred and seven"
RECIPE = """
[model]
d_model = 32
num_heads = 4
d_ff = 64
num_encoder_layers = 2
num_decoder_layers = 2

[tokenizer]
vocab_size = 100

[training]
batch_tokens = 512
validate_every = 20
max_steps = 60
warmup_steps = 20
"""


def contrast(first: str, second: str) -> float:
    """Return the contrast of two colors (#rrggbb) as WCAG 2 defines it."""

    def luminance(color: str) -> float:
        channels = [int(color[start : start + 2], 16) / 255 for start in (1, 3, 5)]
        linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in channels]
        return sum(weight * x for weight, x in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    low, high = sorted(map(luminance, (first, second)))
    return (high + 0.05) / (low + 0.05)


def test_colors_of_both_schemes_have_enough_contrast() -> None:
    style = (STATIC / "style.css").read_text(encoding="utf-8")
    colors = re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\)", style)
    for scheme in ({name: each[index] for name, *each in colors} for index in (0, 1)):
        texts, surfaces = ("ink", "muted", "a", "b", "error"), ("page", "surface", "sunken")
        for text, surface in [*product(texts, surfaces), ("on-accent", "a"), ("on-accent", "b")]:
            assert contrast(scheme[text], scheme[surface]) >= 4.5, (text, surface)
        for surface in ("page", "surface"):
            assert contrast(scheme["control"], scheme[surface]) >= 3, surface


def test_the_page_has_no_inline_code_and_loads_only_its_own_files() -> None:
    page = "".join((STATIC / name).read_text(encoding="utf-8") for name in PAGES)
    assert not re.search(r"<style|\bstyle=|\bon\w+=|<script(?![^>]*\bsrc=)", page)
    links = [link.removeprefix("{root}") for link in re.findall(r'(?:src|href)="(?!#)([^"]*)"', page)]
    names = [link for link in links if link != "openapi.json"]
    for script in STATIC.glob("*.js"):
        names += [f"static/{name[2:]}" for name in re.findall(r'from "([^"]*)"', script.read_text(encoding="utf-8"))]
    files = {path.name for path in STATIC.iterdir()} - PAGES
    assert {name.removeprefix("static/") for name in names} == files


def test_each_tab_names_a_page_of_the_tutorial_that_the_server_shows() -> None:
    testclient = pytest.importorskip("starlette.testclient")
    from xformer.serve.app import create_app
    from xformer.serve.config import ServeConfig

    script = (STATIC / "column.js").read_text(encoding="utf-8")
    tabs = re.findall(r'^  \w+: \["[^"]+", draw\w+, "([^"]+\.)", "([\w-]+)"\],$', script, re.MULTILINE)
    assert len(tabs) == 8
    client = testclient.TestClient(create_app([], ServeConfig(token="secret-token")), base_url="http://localhost")
    for _, page in tabs:
        answer = client.get(f"/pages/tutorial/{page}.md")  # a link sends no token
        assert answer.status_code == 200
        assert f"<h1>{page.split('-')[0]} " in answer.text
        links = {link for link in re.findall(r'(?:src|href)="([^"#]+)', answer.text) if "://" not in link}
        assert any(link.endswith(".svg") for link in links)
        for link in links:
            assert client.get(urljoin(f"/pages/tutorial/{page}.md", link)).status_code == 200, (page, link)
    for name in ("tutorial/14-magic", "%2e%2e/README", "%2e%2e%2fREADME"):
        assert client.get(f"/pages/{name}.md").status_code == 404


def test_the_pages_work_under_any_prefix() -> None:
    testclient = pytest.importorskip("starlette.testclient")
    from starlette.applications import Starlette
    from starlette.routing import Mount

    from xformer.serve.app import create_app
    from xformer.serve.config import ServeConfig

    app = Starlette(routes=[Mount("/user/proxy", create_app([], ServeConfig(token="secret-token")))])
    client = testclient.TestClient(app, base_url="http://localhost")
    for path in ("", "docs", "pages/index.md", "pages/tutorial/1-attention.md"):
        answer = client.get(f"/user/proxy/{path}")  # a link sends no token
        assert answer.status_code == 200
        files = re.findall(r'(?:src|href)="([^"]+\.(?:css|js|json|svg))"', answer.text)
        assert len(files) >= 2
        for file in files:
            assert client.get(urljoin(f"/user/proxy/{path}", file)).status_code == 200, (path, file)
    for script in STATIC.glob("*.js"):
        assert not re.search(r'(?:get|post|request|fetch)\(["`]/', script.read_text(encoding="utf-8"))
    assert client.get("/user/proxy/v1/models").status_code == 401
    assert client.get("/user/proxy/v1/models", headers={"Authorization": "Bearer secret-token"}).json()["data"] == []


def test_an_installed_server_shows_the_pages_of_the_clone_in_which_it_starts(monkeypatch, tmp_path) -> None:
    testclient = pytest.importorskip("starlette.testclient")
    from xformer.serve import app
    from xformer.serve.config import ServeConfig

    clone = app._PAGES.parent
    monkeypatch.setattr(app, "_PAGES", tmp_path)
    for folder, status in ((clone, 200), (tmp_path, 404)):
        monkeypatch.chdir(folder)
        client = testclient.TestClient(
            app.create_app([], ServeConfig(token="secret-token")), base_url="http://localhost"
        )
        assert client.get("/pages/tutorial/1-attention.md").status_code == status


def evaluate(script: str) -> Any:
    """Return what a script of Node writes as JSON."""
    if (node := shutil.which("node")) is None:
        pytest.skip("needs node")
    return json.loads(subprocess.check_output([node, "--input-type=module", "-e", script], cwd=STATIC, text=True))


def test_the_least_certain_token_is_a_word() -> None:
    tokens = [[" ", 0.1], [" a", 0.9], ["é", 0.3], [".", 0.2]], [[".", 0.4], ["!", 0.2]], [["a", None]], []
    texts = [[{"text": text, "probability": value} for text, value in each] for each in tokens]
    script = 'import { leastCertain } from "./tokens.js"; '
    assert evaluate(f"{script}console.log(JSON.stringify({json.dumps(texts)}.map(leastCertain)))") == [2, 1, 0, 0]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Runs of a translator and a language model that have learned little, and a random classifier."""
    directory = tmp_path_factory.mktemp("explorer")
    task = numbers_task(num_train=400, num_valid=10, num_test=1, largest=9999)
    for name, corpus in (("train", task.train), ("valid", task.valid)):
        (directory / f"{name}.en").write_text("\n".join(corpus.source) + "\n", encoding="utf-8")
        (directory / f"{name}.de").write_text("\n".join(corpus.target) + "\n", encoding="utf-8")
    (directory / "translator.toml").write_text(RECIPE, encoding="utf-8")
    decoder = RECIPE.replace("num_encoder_layers = 2\nnum_decoder_layers", "num_layers")
    decoder = decoder.replace("batch_tokens = 512", "batch_size = 4")
    (directory / "lm.toml").write_text(f'task = "language_modeling"\n{decoder}', encoding="utf-8")
    names = {"source": "train.en", "target": "train.de", "valid-source": "valid.en", "valid-target": "valid.de"}
    files = [str(option) for name, file in names.items() for option in (f"--{name}", directory / file)]
    texts = ["--text", str(directory / "train.en"), "--valid-text", str(directory / "valid.en")]
    for command, data, name in (("train", files, "translator"), ("train-lm", texts, "lm")):
        recipe = str(directory / f"{name}.toml")
        assert exit_code([command, *data, "--recipe", recipe, "--out", str(directory / name)]) == 0
    tokens = {"pad_token": "[PAD]", "unk_token": "<unk>", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    classifier = checkpoint(directory, "bert_classifier", tokenizer_config=tokens)
    return [directory / "translator", directory / "lm", classifier]


@pytest.fixture(scope="module")
def address(models: list[Path]) -> Iterator[str]:
    """The address of a server of the models."""
    pytest.importorskip("uvicorn")
    options = [str(option) for model in models for option in ("--model", model)]
    command = [sys.executable, "-m", "xformer", "serve", "--port", "0", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if found := re.search(r"http://\S+", line):
                break
        else:
            pytest.fail("".join(lines))
        try:
            yield found[0]
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
    if BROWSER is None:
        pytest.skip("needs chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=BROWSER, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Any, address: str) -> Iterator[Callable[..., Any]]:
    """Open the explorer; its scripts must not fail, and the security policy must not block anything."""
    contexts, errors = [], []

    def open_(settings: dict[str, Any] | None = None, width: int = 1280, scheme: str = "light") -> Any:
        context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.goto(f"{address}/#{urlencode(settings)}" if settings else address)
        page.wait_for_selector(".column")
        if settings:
            page.wait_for_selector("#json:enabled")
        return page

    yield open_
    for context in contexts:
        context.close()
    assert not errors


BEAM = {"text": TEXT, "a": "translator", "a.method": "beam", "a.num_beams": "4", "a.max_new_tokens": "20"}
GREEDY = {"text": TEXT, "a": "translator", "a.method": "greedy", "a.max_new_tokens": "8"}


def tokens_of(page: Any, row: str = ".output") -> list[str]:
    """Return the texts of a row of tokens."""
    return page.locator(f"{row} .token").all_inner_texts()


@pytest.mark.slow
def test_typed_text_is_translated_and_a_token_shows_its_alternatives_and_attention(open_page: Any) -> None:
    page = open_page()
    page.fill("#text", TEXT)
    page.fill("#max_new_tokens-a", "8")
    page.press("#text", "Control+Enter")
    page.wait_for_selector("#json:enabled")
    assert 0 < len(tokens_of(page)) <= 8
    assert "Output of translator" in page.inner_text("#announcer")

    labels = page.eval_on_selector_all(".output .token", "tokens => tokens.map(({ ariaLabel }) => ariaLabel)")
    words = [float(label.split()[-2]) for label in labels if label[0].isalnum()]
    assert float(page.get_attribute(".output [aria-pressed=true]", "aria-label").split()[-2]) == min(words)
    assert page.get_attribute("[aria-selected=true]", "data-tab") == "attention"
    page.click("[data-tab=tokens]")

    token = page.locator(".output .token").nth(1)
    token.hover()
    assert token.get_attribute("aria-pressed") == "true"
    bars = page.locator(".bars [role=button]")
    assert bars.count() == 10
    assert "chosen" in bars.first.get_attribute("aria-label")
    page.wait_for_selector('.token-row:first-child .token[style*="--weight: 1.000"]')

    page.keyboard.press("Tab")  # from the text to the tokens with the keyboard alone
    page.locator(".output .token").first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.locator(".output .token").nth(2).get_attribute("aria-pressed") == "true"


@pytest.mark.slow
def test_the_page_begins_with_an_example_of_the_model_and_keeps_a_text_that_was_typed(open_page: Any) -> None:
    page = open_page()
    page.wait_for_selector("#json:enabled")
    example = page.input_value("#text")
    assert {"hundred", "thousand"} & set(example.split())  # of the validation text
    page.select_option("#model-a", "lm")
    page.wait_for_function("() => document.querySelector('.status').textContent.includes(' s')")
    assert page.input_value("#text")
    assert page.input_value("#text") != example
    page.fill("#text", TEXT)
    page.select_option("#model-a", "translator")
    assert page.input_value("#text") == TEXT


FIGURES = """async () => {
    const { pathOf } = await import("/static/beam_tree.js");
    const { tempered } = await import("/static/bars.js");
    const { smooth } = await import("/static/curves.js");
    const { entropy, leavesOutFirst, maxima, rowOf } = await import("/static/attention_maps.js");
    const candidate = (id, parent, log_probability, finished = false) =>
        ({ id, parent, log_probability, finished, kept: true });
    // The output 3 4 is also the end of 9 3 4, and of a path with another log-probability.
    const steps = [
        [candidate(9, null, -0.1), candidate(3, null, -0.2), candidate(3, null, -0.3)],
        [candidate(3, 0, -0.4), candidate(4, 1, -0.5), candidate(4, 2, -0.6)],
        [candidate(4, 0, -0.7), candidate(1, 1, -0.8, true), candidate(1, 2, -0.9, true)],
        [candidate(1, 0, -0.9, true)],
    ];
    const output = { tokens: [{ id: 7 }, { id: 3 }, { id: 4 }], log_probability: -0.9, numForced: 1 };
    const tokens = [0.5, 0.3, 0.1].map((p, id) => ({ id, probability: p, log_probability: Math.log(p) }));
    const head = [[1, 0, 0, 0], [0.9, 0.1, 0, 0], [0.8, 0.1, 0.1, 0], [0.8, 0, 0.15, 0.05]];
    const map = { weights: [[head]], queries: "abcd".split(""), keys: "abcd".split(""), isCausal: true };
    const selection = { layer: null, head: null, leaveOutFirst: null, scaleRows: null };
    const rows = head.map((_, query) => rowOf(map, selection, query));
    return {
        path: pathOf(steps, output).map(({ log_probability }) => log_probability),
        one: tempered(tokens, tokens, 1), half: tempered(tokens.slice(0, 1), tokens, 0.5)[0],
        short: smooth([[0, 5], [1, 2]]), long: smooth(Array.from({ length: 100 }, (_, x) => [x, 2 * x])),
        leavesOut: leavesOutFirst(map, selection), last: rows[3], maxima: maxima(map, selection, rows),
        entropy: entropy([[0.5, 0.5], [0.25, 0.25]]), none: entropy([[0, 0]]),
    };
}"""


@pytest.mark.slow
def test_figures_show_the_values_of_their_data(open_page: Any) -> None:
    found = open_page().evaluate(FIGURES)
    assert found["path"] == [-0.3, -0.6, -0.9]
    assert found["one"] == [0.5, 0.3, 0.1]
    assert found["half"] == pytest.approx(0.25 / (0.25 + 0.09 + 0.01))
    assert found["short"] == [[0, 5], [1, 2]]
    assert found["long"] == [[x, 2 * x] for x in range(100)]  # a straight line stays where it is
    assert found["leavesOut"]
    assert found["last"] == [0, 0, 0.15, 0.05]
    assert found["maxima"] == [0.02, 0.1, 0.1, 0.15]
    assert (found["entropy"], found["none"]) == (1, None)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["translator", "lm"])
def test_the_output_continues_with_an_alternative_that_is_clicked(open_page: Any, model: str) -> None:
    method = "beam" if model == "translator" else "greedy"
    page = open_page({"text": TEXT, "a": model, "a.method": method, "a.max_new_tokens": "12", "a.num_beams": "2"})
    before = tokens_of(page)
    page.click("[data-tab=tokens]")
    page.hover(".output .token >> nth=1")
    row = page.locator(".bars .selectable:not(:has(.marked))").first
    label = row.locator(".label").text_content()
    row.click()
    page.wait_for_selector(".token.forced")
    page.wait_for_function("() => document.querySelector('.status').textContent.includes(' s')")
    after = tokens_of(page)
    assert (after[0], after[1]) == (before[0], label)
    assert page.locator(".token.forced").get_attribute("aria-pressed") == "true"
    assert page.locator(".bars .selectable:has(.label.marked)").get_attribute("aria-label").startswith(label)
    if model == "translator":
        page.click("[data-tab=beam]")
        assert page.locator(".node.best .token-text").all_text_contents()[: len(after) - 2] == after[2:]
    page.click("#generate")
    page.wait_for_selector(".token.forced", state="detached")


@pytest.mark.slow
def test_attention_is_shown_for_each_kind_layer_and_head(open_page: Any) -> None:
    page = open_page(GREEDY)
    page.click("[data-tab=attention]")
    figure = page.locator(".heat-map")
    assert figure.get_attribute("aria-label").startswith("Cross-attention: ")
    assert page.locator(".head").count() == 2 * 4
    page.click('.head[data-layer="1"][data-head="2"]')
    lines = page.locator(".attention-lines")
    page.hover(".output .token >> nth=1")
    assert lines.locator(".lines:not(.dimmed)").count() == 1
    assert f": {tokens_of(page)[1]} attends to " in lines.get_attribute("aria-label")
    assert figure.get_attribute("aria-label").startswith("Cross-attention, layer 2, head 3: ")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Enter")
    assert figure.get_attribute("aria-label").startswith("Cross-attention, layer 1, head 3: ")
    page.select_option("[data-field=head]", "0")
    page.select_option("[data-field=kind]", "decoder")
    assert figure.get_attribute("aria-label").startswith("Self-attention of the decoder, layer 1, head 1: ")
    # The first query can attend to the first key only.
    figure.focus()
    page.uncheck("text=Leave out the first token")
    figure.focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowUp")
    assert page.inner_text("#announcer").endswith(": 1")
    page.select_option("[data-field=order]", "focused")
    entropies = [float(label.split()[-2]) for label in page.eval_on_selector_all(".head", "x => x.map(e => e.title)")]
    assert len(entropies) == 8
    assert entropies == sorted(entropies)
    page.select_option("[data-field=kind]", "encoder")
    assert len(tokens_of(page, ".token-row:first-child")) == len(page.query_selector_all("[data-row]"))


@pytest.mark.slow
def test_beam_search_is_a_tree_with_pruned_candidates(open_page: Any) -> None:
    page = open_page(BEAM)
    assert page.locator(".nbest button").count() == 4
    best = tokens_of(page)
    page.click("[data-tab=beam]")
    assert page.locator(".node.best .token-text").all_text_contents()[: len(best)] == best
    assert page.locator(".node.pruned").count() > 0
    page.uncheck("text=Show pruned")
    assert page.locator(".node.pruned").count() == 0
    page.locator(".node.best").nth(1).focus()
    assert page.inner_text(".path").startswith(page.locator(".nbest .text").first.inner_text()[:1])
    page.click(".nbest button >> nth=1")
    assert page.locator(".nbest button").nth(1).get_attribute("aria-pressed") == "true"


@pytest.mark.slow
def test_figures_settings_and_results_are_exported(open_page: Any) -> None:
    page = open_page(BEAM)

    def download(selector: str) -> bytes:
        with page.expect_download() as started:
            page.click(selector)
        return Path(started.value.path()).read_bytes()

    for tab in ("tokens", "attention", "layers", "alignment", "beam", "training"):
        page.click(f"[data-tab={tab}]")
        image = download("[data-export=svg] >> nth=0")
        ElementTree.fromstring(image)
        assert b"var(" not in image
        assert b"class=" not in image
        assert download("[data-export=png] >> nth=0").startswith(b"\x89PNG")
    data = json.loads(download("#json"))
    assert data["sides"][0]["settings"]["num_beams"] == "4"
    (result,) = data["results"]
    assert len(result["outputs"]) == 4
    assert result["attention"]["cross"]["weights"][0][0]
    assert result["beam"]
    again = open_page()
    again.goto(data["link"])
    again.reload()
    again.wait_for_selector("#json:enabled")
    assert tokens_of(again) == tokens_of(page)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["translator", "lm"])
def test_layers_show_what_they_would_predict(open_page: Any, model: str) -> None:
    page = open_page({"text": TEXT, "a": model, "a.method": "greedy", "a.max_new_tokens": "6"})
    output = tokens_of(page)
    page.click("[data-tab=layers]")
    page.wait_for_selector(".flow")
    # The last layer, which is drawn first, predicts the greedy output.
    cells = page.locator(".lens .token-text").all_text_contents()
    num_columns = len(cells) // 3
    first = num_columns - len(output) - (model == "lm")
    assert [cell[:8] for cell in cells[first : first + len(output)]] == [token[:8] for token in output]
    page.hover(".output .token >> nth=2")
    column = page.locator(".lens .label").nth(first + 2).text_content()
    assert f"“{column}”" in page.locator(".flow").get_attribute("aria-label")
    assert page.locator(".flow [role=listitem]").count() == 3
    page.focus(".lens")
    page.keyboard.press("ArrowUp")
    assert page.inner_text("#announcer").startswith("layer 1, after ")


@pytest.mark.slow
def test_the_names_of_rows_stay_in_sight(open_page: Any) -> None:
    page = open_page(GREEDY, width=390)
    page.click("[data-tab=layers]")
    name = page.locator(".row-labels text").first
    page.locator(".scroll:has(.lens)").evaluate("box => box.scrollTo(0, 0)")
    before = name.bounding_box()
    page.locator(".scroll:has(.lens)").evaluate("box => box.scrollTo(150, 0)")
    page.wait_for_selector(".scrolled")
    assert name.bounding_box() == pytest.approx(before)


@pytest.mark.slow
def test_two_clicks_switch_a_head_off(open_page: Any) -> None:
    page = open_page({"text": TEXT, "a": "translator", "a.method": "greedy", "a.max_new_tokens": "6"})
    page.click("[data-tab=switches]")
    page.click(".switch >> nth=1")
    row = page.locator(".change .bars [role=listitem]").first
    assert re.search(r" [<\d].* %, before \d.* %", row.get_attribute("aria-label"))
    page.wait_for_selector(".change .token")
    page.hover(".output .token >> nth=2")
    title = page.locator(".change .bars").get_attribute("aria-label")
    assert title == f"“{tokens_of(page)[2]}” and its alternatives"
    page.click(".switch.wide >> nth=1")
    assert page.locator(".switch[aria-pressed=true]").count() == 2
    page.click("text=Switch everything on")
    assert page.locator(".change .bars").count() == 0
    assert page.locator(".switch[aria-pressed=true]").count() == 0


@pytest.mark.slow
def test_attention_is_changed_by_hand(open_page: Any) -> None:
    page = open_page(GREEDY)
    page.click("[data-tab=attention]")
    page.click('.head[data-layer="1"][data-head="2"]')
    page.hover(".output .token >> nth=1")
    page.hover(".heat-map >> nth=0")  # on the way to the sliders
    picked = page.locator(".editor .hint").text_content()
    page.click(".heat-map", position={"x": 120, "y": 75})
    assert page.locator(".editor .hint").text_content() != picked
    sliders = page.locator(".weight input[type=range]")
    assert sliders.count() == len(tokens_of(page, ".token-row:first-child"))
    sliders.first.focus()
    page.keyboard.press("End")
    page.wait_for_selector(".editor .bars")
    page.locator(".weight input[type=number]").nth(1).fill("30")
    shown = page.eval_on_selector_all(
        ".weight input[type=number]", "inputs => inputs.map(({ value }) => Number(value))"
    )
    assert shown[:3] == [70, 30, 0]  # the others keep their proportions
    page.click("text=Restore")
    assert page.locator(".editor .bars").count() == 0
