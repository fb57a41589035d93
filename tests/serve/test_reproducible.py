"""A reproducible server: a request has the same text, log-probabilities and hash alone and beside others."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.conftest import needs_fused_products
from xformer import native
from xformer.errors import ConfigError
from xformer.models import LanguageModel, LanguageModelConfig, Transformer, TransformerConfig
from xformer.pipelines import TextGenerator, Tokenizers, Translator
from xformer.tokenizers import Tokenizer

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
from tests.serve.test_app import TASK, TEXTS, Client
from xformer.serve.models import Server

pytestmark = needs_fused_products
SIZES = {"d_model": 256, "num_heads": 8, "d_ff": 1024}
PROMPT = "the cat sat on the mat\n" * 7
LONG = [" ".join(TEXTS[i : i + 16]) for i in range(9)]  # by default, the BLAS library computes products of all of them


@pytest.fixture(scope="module")
def generator():
    tokenizer = Tokenizer.train([PROMPT], 60, model="characters")
    config = LanguageModelConfig(vocab_size=tokenizer.vocab_size, **SIZES, num_layers=2, positions="rotary")
    return TextGenerator(LanguageModel(config, xp=np, seed=3), tokenizer)


@pytest.fixture(scope="module")
def translator():
    tokenizer = Tokenizer.train([*TASK.train.source, *TASK.train.target], 100)
    vocab = {"source_vocab_size": tokenizer.vocab_size, "target_vocab_size": tokenizer.vocab_size}
    config = TransformerConfig(**vocab, **SIZES, num_encoder_layers=1, num_decoder_layers=2)
    return Translator(Transformer(config, xp=np, seed=0), Tokenizers(tokenizer, tokenizer))


@pytest.fixture
def client(mode, generator, translator):
    client = Client({"generator": generator, "translator": translator}, reproducible=True)
    yield client
    client.close()


def choice_of(answer):
    """Return what the numbers of an answer decide."""
    return {name: answer[name] for name in ("choices", "outputs") if name in answer}


REQUESTS = [
    ("/v1/completions", {"prompt": PROMPT, "max_tokens": 20, "temperature": 0, "logprobs": 3}),
    (
        "/v1/completions",
        {"prompt": PROMPT[:99], "max_tokens": 20, "temperature": 5.0, "seed": 5, "logprobs": 2, "n": 2},
    ),
    ("/v1/completions", {"prompt": [PROMPT[:50], PROMPT[:7]], "max_tokens": 9, "num_beams": 3, "logprobs": 1}),
    ("/translate", {"text": [LONG[0], "", TEXTS[1]], "max_new_tokens": 12}),
    ("/translate", {"text": TEXTS[2], "num_beams": 4, "num_return_sequences": 2, "max_new_tokens": 12}),
]


def test_a_request_is_the_same_alone_and_beside_others(client):
    alone = [choice_of(client.post(path, **body)) for path, body in REQUESTS]
    others = [
        *(("/v1/completions", {"prompt": PROMPT[i:], "max_tokens": 3 * i, "temperature": 0}) for i in range(1, 9)),
        *(("/translate", {"text": text, "max_new_tokens": 20}) for text in LONG[1:]),
    ]
    with ThreadPoolExecutor(32) as pool:
        noise = [pool.submit(client.post, path, **body) for path, body in others]
        calls = [pool.submit(client.post, path, **body) for path, body in REQUESTS]
        noise += [pool.submit(client.post, path, **body) for path, body in others]
        together = [choice_of(call.result()) for call in calls]
        assert all(call.result() for call in noise)
    assert together == alone
    hashes = [choice["logits_sha256"] for answer in alone[:3] for choice in answer["choices"]]
    rows = [row for answer in alone[3:] for row in answer["outputs"]]
    assert "logits_sha256" not in rows[1][0]  # a blank text
    hashes += [row[0]["logits_sha256"] for row in rows if "logits_sha256" in row[0]]
    assert len(set(hashes)) == len(hashes) == 8


def test_the_hash_is_that_of_the_logits_of_the_whole_text(client, generator):
    body = {"prompt": PROMPT, "max_tokens": 20, "temperature": 0}
    (choice,) = client.post("/v1/completions", **body)["choices"]
    ids, new = (generator.tokenizer.encode(text) for text in (PROMPT, choice["text"]))
    logits = np.array(generator.model(np.asarray([[*ids, *new]]))[0, len(ids) - 1 :][:20])
    logits[:, [0, 1, 2, 3]] = -np.inf  # special tokens
    assert choice["logits_sha256"] == hashlib.sha256(logits.astype("<f4").tobytes()).hexdigest()
    events = [data for _, data in client.events("/v1/completions", **body, stream=True)]
    assert [data["choices"][0].get("logits_sha256") for data in events[:-1]] == [
        *[None] * (len(events) - 2), choice["logits_sha256"]
    ]  # fmt: skip


def test_answers_have_no_hash_otherwise(mode, generator):
    client = Client({"generator": generator})
    (choice,) = client.post("/v1/completions", prompt="the", max_tokens=2)["choices"]
    client.close()
    assert "logits_sha256" not in choice


def test_a_server_that_cannot_be_reproducible_says_so(mode, generator, monkeypatch):
    from xformer.serve.config import ServeConfig
    from xformer.serve.models import ServedModel

    strict = pytest.importorskip("array_api_strict")
    other = TextGenerator(LanguageModel(generator.model.config, xp=strict), generator.tokenizer)
    double = TextGenerator(LanguageModel(generator.model.config, dtype="float64"), generator.tokenizer)
    for name, refused in (("array_api_strict", other), ("float64", double)):
        models = [ServedModel("generator", generator), ServedModel("refused", refused)]
        message = rf"^reproducible results need float32 on NumPy or CuPy; received {name}$"
        with pytest.raises(ConfigError, match=message):
            Server(models, ServeConfig(reproducible=True))
        assert not native.is_reproducible()
    bfloat16 = TextGenerator(generator.model.quantize("bfloat16"), generator.tokenizer)  # weights, not activations
    Server([ServedModel("bfloat16", bfloat16)], ServeConfig(reproducible=True))
    mode(False)
    monkeypatch.setattr("xformer.native.level", lambda: "")
    monkeypatch.setattr("xformer.native.WHY_NOT", "XFORMER_NATIVE=off")
    with pytest.raises(ConfigError, match=r"^reproducible results need the native library"):
        Server([ServedModel("generator", generator)], ServeConfig(reproducible=True))
