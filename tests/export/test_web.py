"""Exported pages generate what the pipelines generate, in Chromium and without a server of xformer."""

from __future__ import annotations

import functools
import os
import re
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import xformer as xf
from xformer.errors import ConfigError, XformerError

pytest.importorskip("onnxruntime")
pytest.importorskip("spox")

from tests.export.test_onnx import LANGUAGE_MODEL, LANGUAGE_MODELS, TRANSLATOR, Session, empty_past, random_model
from tests.pipelines.test_checkpoints import llama, marian  # noqa: F401
from tests.serve.test_explorer import STATIC, browser, tokens_of  # noqa: F401
from xformer.export import export_web, find_runtime
from xformer.models.transformer import attention_maps
from xformer.pipelines import TextGenerator, Translator
from xformer.pipelines.export import export_run

# Directory of `npm install onnxruntime-web @huggingface/tokenizers`.
NPM = os.environ.get("XFORMER_NPM", ".")
DOCS = Path(__file__).parents[2] / "docs"
GENERATE = """async ([text, ablations]) => {
  const api = await import(new URL("static/api.js", location));
  return (await api.generate({}, text, {}, { signal: {}, ablations })).outputs[0].tokens;
}"""
PARTS = ["self_attention", "cross_attention", "feed_forward"]


@pytest.mark.parametrize("is_translator", [False, True])
def test_a_step_has_the_attention_and_the_states_of_all_layers(is_translator: bool, tmp_path: Path) -> None:
    config = xf.TransformerConfig(**TRANSLATOR) if is_translator else xf.LanguageModelConfig(**LANGUAGE_MODEL)
    model = random_model(config).quantize()
    assert export_web(model, tmp_path, {}, {}).difference < 1e-4
    step, source, tokens = Session(tmp_path / "model/step.onnx"), np.asarray([[5, 6, 7, 2]]), np.asarray([[1, 9, 4, 8]])
    fixed: dict[str, Any] = {"source": source} if is_translator else {}
    on = np.ones((2, 3 if is_translator else 2, 5), np.float32)
    if is_translator:
        fixed |= Session(tmp_path / "model/encoder.onnx")(source=source, switches=on[:1, :2])
        documented = Session(DOCS / "assets/translator/model/step.onnx")  # docs/translator.py makes it again
        assert (documented.inputs, documented.outputs) == (step.inputs, step.outputs)
    fixed["switches"] = on
    states = np.zeros((1, 0, 24), np.float32)
    outputs = step(tokens=tokens, lens=states, **fixed, **empty_past(step, 1))
    maps = attention_maps(model, *([source] if is_translator else []), tokens)
    names = {"encoder": "encoder_attention", "decoder": "attention", "cross": "cross_attention"}
    for name, expected in maps.items():
        actual = (outputs | fixed)[names[name]]
        np.testing.assert_allclose(actual, np.stack(expected), rtol=0, atol=1e-5)
    assert outputs["lens_logits"].shape == (1, 0, 61)
    again = step(tokens=tokens[:, :1], lens=outputs["states"], **fixed, **empty_past(step, 1))
    assert again["lens_logits"].shape == (1, 3, 61)
    assert outputs["norms"].shape == (1, 2, 3 if is_translator else 2)
    np.testing.assert_allclose(again["lens_logits"][:, -1], outputs["logits"], rtol=0, atol=1e-4)


def without_head(x: np.ndarray) -> np.ndarray:
    x[:, 1] = 0
    return x


@pytest.mark.parametrize("is_translator", [False, True])
def test_heads_and_parts_are_switched_off(is_translator: bool, tmp_path: Path) -> None:
    gpt_oss = xf.LanguageModelConfig(**LANGUAGE_MODEL, **LANGUAGE_MODELS["gpt_oss"])
    model = random_model(xf.TransformerConfig(**TRANSLATOR) if is_translator else gpt_oss).quantize()
    export_web(model, tmp_path, {}, {})
    step, source, tokens = Session(tmp_path / "model/step.onnx"), np.asarray([[5, 6, 7, 2]]), np.asarray([[1, 9, 4, 8]])
    encode = Session(tmp_path / "model/encoder.onnx") if is_translator else None
    name, parts = ("decoder", PARTS) if is_translator else ("layers", PARTS[::2])

    def check(activation: str, change: Any, where: tuple[int, ...]) -> None:
        switches = {"encoder": np.ones((1, 2, 5), np.float32), name: np.ones((2, len(parts), 5), np.float32)}
        switches[activation.partition(".")[0]][where] = 0
        fixed = {"source": source, **encode(source=source, switches=switches["encoder"])} if encode else {}
        states = np.zeros((1, 0, 24), np.float32)
        actual = step(tokens=tokens, lens=states, switches=switches[name], **fixed, **empty_past(step, 1))["logits"]
        with xf.intervene(model, {activation: change}):
            expected = model(*([source] if is_translator else []), tokens)[:, -1]
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5)
        assert np.max(np.abs(actual - model(*([source] if is_translator else []), tokens)[:, -1])) > 1e-3

    for index, part in enumerate(parts):
        check(f"{name}.1.{part}.output", lambda x: 0 * x, (1, index, 4))
    check(f"{name}.0.{parts[-2]}.heads", without_head, (0, len(parts) - 2, 1))
    if is_translator:
        check("encoder.0.self_attention.heads", without_head, (0, 0, 1))
        check("encoder.0.feed_forward.output", lambda x: 0 * x, (0, 1, 4))


def test_the_page_has_the_functions_that_the_explorer_calls() -> None:
    api = (Path(xf.__file__).parent / "export" / "web_api.js").read_text(encoding="utf-8")
    defined = set(re.findall(r"^export (?:async function|const) (\w+)", api, re.MULTILINE))
    scripts = [path.read_text(encoding="utf-8") for path in STATIC.glob("*.js") if path.name != "api.js"]
    called = {name for script in scripts for name in re.findall(r"\bapi\.(?!js)(\w+)", script)}
    assert defined == called - {"changesAttention", "tutorial"}  # the page hides what needs them


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"runtime": "/nowhere"}, r"/nowhere/node_modules/onnx.* is missing; run: npm install onnxruntime-web @hugg.*"),
        ({"quantization": "int4"}, "quantization is 'int4'; expected one of float32, int8"),
    ],
)
def test_wrong_calls(llama: Path, tmp_path: Path, options: dict[str, Any], message: str) -> None:  # noqa: F811
    with pytest.raises(ConfigError, match=f"^{message}$"):
        export_run(llama, tmp_path / "page", "web", **options)
    assert not (tmp_path / "page").exists()


def test_models_that_no_page_shows(tmp_path: Path) -> None:
    encoder = xf.Encoder(xf.EncoderConfig(vocab_size=11, d_model=8, num_heads=2, d_ff=8, num_layers=1))
    with pytest.raises(ConfigError, match="model is an Encoder; a page expects a LanguageModel or a Transformer"):
        export_web(encoder, tmp_path, {}, {})
    model = random_model(xf.TransformerConfig(**TRANSLATOR, length_encoding=True))
    with pytest.raises(ConfigError, match="the model has a length encoding; a page expects"):
        export_web(model, tmp_path, {}, {})
    with pytest.raises(ConfigError, match="max_length is 3; expected more than 5"):
        export_web(random_model(xf.TransformerConfig(**TRANSLATOR)), tmp_path, {}, {}, max_length=3)
    model = random_model(xf.TransformerConfig(**TRANSLATOR | {"num_decoder_layers": 0}))
    with pytest.raises(ConfigError, match="the model has no layers that compute logits"):
        export_web(model, tmp_path, {}, {})
    with pytest.raises(XformerError, match="expects none"):
        export_run("run", tmp_path / "page", "onnx", runtime=".")


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Any]:
    """Export a model and serve the page; return its address."""
    try:
        find_runtime(NPM)
    except ConfigError as error:
        pytest.skip(str(error))
    handler = functools.partial(SimpleHTTPRequestHandler, directory=tmp_path)
    handler.log_message = lambda *arguments: None  # type: ignore[attr-defined]
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()

    def export(directory: Path) -> str:
        export_run(directory, tmp_path / "site" / "page", "web", runtime=NPM)
        return f"http://127.0.0.1:{server.server_port}/site/page/"

    yield export
    server.shutdown()
    thread.join()
    server.server_close()


def open_page(browser: Any, address: str, settings: str) -> Any:  # noqa: F811
    """Open a page, which generates at once from the text in its address and loads nothing from elsewhere."""
    page = browser.new_page()
    page.set_default_timeout(20_000)
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: errors.append(request.url) if not request.url.startswith(address) else None)
    page.goto(f"{address}#{settings}")
    page.wait_for_selector("#json:enabled")
    assert not errors
    return page


@pytest.mark.slow
def test_a_translator_in_the_browser(browser: Any, serve: Any, marian: Path) -> None:  # noqa: F811
    page = open_page(browser, serve(marian), "text=two+man+a")
    pipeline = Translator.from_pretrained(marian, quantize="int8")
    (output,) = pipeline.outputs(["two man a"], num_beams=1, max_new_tokens=11)[0]
    assert tokens_of(page) == [pipeline.target_tokenizer.id_to_token(index) for index in output.tokens]
    page.click("[data-tab=attention]")
    assert page.locator(".head").count() == pipeline.model.config.num_decoder_layers * pipeline.model.config.num_heads
    page.click("[data-tab=layers]")
    page.wait_for_selector(".flow")
    cells = page.locator(".lens .token-text").all_text_contents()
    assert len(cells) == (1 + pipeline.model.config.num_decoder_layers) * len(output.tokens)
    assert cells[: len(output.tokens)] == tokens_of(page)  # the last layer, in the first row, predicts the output
    page.click("[data-tab=switches]")
    for kind, switch in {"encoder": 1, "cross": 8}.items():  # head 2 of layer 1, and the attention of layer 2
        page.select_option("[data-field=switches]", kind)
        page.click(f".switch >> nth={switch}")
    page.wait_for_selector(".change .bars")
    parts = [("encoder", 0, 1), ("cross", 1, None)]
    off = [{"kind": kind, "layer": layer, "part": "attention", "head": head} for kind, layer, head in parts]
    found = page.evaluate(GENERATE, ["two man a", off])
    model, c = pipeline.model.unpack(), pipeline.model.config
    changes = {"encoder.0.self_attention.heads": without_head, "decoder.1.cross_attention.output": lambda x: 0 * x}
    with xf.intervene(model, changes):
        logits = model(pipeline.token_ids(["two man a"]), [[c.bos_id, *(token["id"] for token in found[:-1])]])[0]
    logits[:, list({60, *c.suppressed_ids})] = -np.inf
    expected = np.max(np.exp(logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))), axis=-1)
    np.testing.assert_allclose([token["probability"] for token in found], expected, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_a_language_model_in_the_browser(browser: Any, serve: Any, llama: Path) -> None:  # noqa: F811
    page = open_page(browser, serve(llama), "text=two&a=llama&a.prompt=chat&a.max_new_tokens=6")
    pipeline = TextGenerator.from_pretrained(llama, quantize="int8")
    chat = [{"role": "user", "content": "two"}]
    (output,) = pipeline.outputs([chat], do_sample=False, max_new_tokens=6)[0]
    assert tokens_of(page) == [pipeline.tokenizer.id_to_token(index) for index in output.tokens]
