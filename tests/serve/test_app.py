"""The HTTP API, served by uvicorn on a free port, with small random models."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import copy
import http.client
import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import numpy as np
import pytest
import tokenizers

from tests.checkpoints import LLAMA, checkpoint
from xformer.data.demo_tasks import numbers_task
from xformer.errors import ConfigError
from xformer.generation import GenerationConfig, alignments
from xformer.generation.sampling import DraftModel
from xformer.generation.steps import DecodingSteps
from xformer.models import (
    Encoder,
    EncoderConfig,
    LanguageModel,
    LanguageModelConfig,
    Transformer,
    TransformerConfig,
    attention_maps,
)
from xformer.pipelines import Classifier, Embedder, Reranker, TextGenerator, Tokenizers, Translator
from xformer.tokenizers import Tokenizer, load_tokenizer
from xformer.tree import replace

pytest.importorskip("starlette")
uvicorn = pytest.importorskip("uvicorn")
from xformer.serve.app import ServeConfig, create_app  # noqa: E402
from xformer.serve.models import ServedModel  # noqa: E402
from xformer.serve.openai import plain_message  # noqa: E402
from xformer.serve.routes import openapi  # noqa: E402

TASK = numbers_task(num_train=200, num_valid=1, num_test=64, largest=9999)
TEXTS = [line for line in TASK.test.source if line]
SIZES = {"d_model": 16, "num_heads": 2, "d_ff": 32}
TOKEN = "secret-töken"
OFF = [{"kind": "decoder", "layer": 0}]


def bytes_of(name):
    """Return the bytes of a token of a completion; one that is a part of a character is named by them."""
    return bytes.fromhex(name[6:].replace("\\x", "")) if name[:6] == "bytes:" else name.encode()


def text_of(names):
    """Return the text of tokens of a completion."""
    return b"".join(map(bytes_of, names)).decode(errors="replace")


class SlowLanguageModel(LanguageModel):
    """A model whose steps take long enough to be interrupted."""

    def decode_step(self, tokens, cache):
        time.sleep(0.03)
        return super().decode_step(tokens, cache)


def make_translator(**settings):
    tokenizer = Tokenizer.train([*TASK.train.source, *TASK.train.target], 100)
    vocab = {"source_vocab_size": tokenizer.vocab_size, "target_vocab_size": tokenizer.vocab_size}
    config = TransformerConfig(**vocab, **SIZES, num_encoder_layers=2, num_decoder_layers=3, **settings)
    return Translator(Transformer(config, xp=np, seed=0, dtype="float64"), Tokenizers(tokenizer, tokenizer))


def make_generator(cls=LanguageModel, **settings):
    tokenizer = Tokenizer.train(["the cat sat\non the mat\n"], 60, model="characters")
    config = LanguageModelConfig(vocab_size=tokenizer.vocab_size, **SIZES, num_layers=2, **settings)
    return TextGenerator(cls(config, xp=np, seed=3, dtype="float64"), tokenizer)


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    template = "{% for m in messages %}{{ m['role'] }} : {{ m['content'] }} {% endfor %}assistant :"
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    directory = checkpoint(
        tmp_path_factory.mktemp("chat"), "llama", tokenizer_config=config, generation_config={"eos_token_id": 2},
    )  # fmt: skip
    return TextGenerator.from_pretrained(directory, dtype="float64"), load_tokenizer(directory)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    """A chat whose tokens are bytes; some are parts of characters."""
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    files = {"tokenizer_config": config, "generation_config": {"eos_token_id": 2}}
    directory = checkpoint(tmp_path_factory.mktemp("bytes"), "llama", **files)
    pieces = [*LLAMA, *"abcdefghijklmnopqrstuvwxyz.!?ABCDEFGHIJKLMNOP", "\u010a", "\u0120", "\u00c3", "\u00a9"]
    pieces += ["\u00e2", "\u0124", "\u00ac", "th", "an", "\u010aa", "\u0120b", "ing"]
    inner = tokenizers.Tokenizer(tokenizers.models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens(list(LLAMA))
    inner.save(str(directory / "tokenizer.json"))
    return TextGenerator.from_pretrained(directory, dtype="float64")


OPENAPI = openapi(1024)


def check_answer(method, path, status, answer):
    """Compare an answer with its schema."""
    responses = OPENAPI["paths"][path][method]["responses"]
    schema = responses["200" if status == 200 else "default"]["content"]["application/json"]["schema"]
    jsonschema.Draft202012Validator({**schema, "components": OPENAPI["components"]}).validate(answer)


class Client:
    """A client of a server in a thread."""

    def __init__(self, pipelines, **config):
        self.models = [
            ServedModel(name, pipeline, ServeConfig(max_tokens=config.get("max_tokens", 1024)))
            for name, pipeline in pipelines.items()
        ]
        self.app = create_app(self.models, ServeConfig(**config))
        self.server = uvicorn.Server(uvicorn.Config(self.app, port=0, log_config=None, ws="none", lifespan="on"))
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.005)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]

    def close(self):
        self.server.should_exit = True
        self.thread.join()

    def open(self, method, path, body=None, headers=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        body = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(method, path, body, {"Content-Type": "application/json", **(headers or {})})
        return connection, connection.getresponse()

    def send(self, method, path, body=None, headers=None):
        connection, response = self.open(method, path, body, headers)
        with contextlib.closing(connection):
            return response.status, dict(response.getheaders()), response.read().decode()

    def get(self, path):
        return json.loads(self.send("GET", path)[2])

    def post(self, path, status=200, **body):
        received, _, text = self.send("POST", path, body)
        assert received == status, text
        answer = json.loads(text)
        check_answer("post", path, status, answer)
        return answer

    def events(self, path, **body):
        """Return the events of a stream as (name, data)."""
        status, headers, text = self.send("POST", path, body)
        assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        assert text.endswith("\n\n")
        events = []
        for block in text.removesuffix("\n\n").split("\n\n"):
            fields = dict(line.split(": ", 1) for line in block.split("\n"))
            data = fields["data"]
            events.append((fields.get("event", ""), data if data == "[DONE]" else json.loads(data)))
        return events

    def idle(self):
        """Wait until no request runs."""
        end = time.monotonic() + 20
        while (health := self.get("/health"))["running"] + health["waiting"]:
            assert time.monotonic() < end, health
            time.sleep(0.02)


@pytest.fixture(scope="module")
def translator():
    return make_translator()


@pytest.fixture(scope="module")
def generator():
    return make_generator()


def make_encoders(tokenizer):
    config = {"vocab_size": 61, **SIZES, "num_layers": 2, "max_positions": 32}
    return {
        "embedder": Embedder(Encoder(EncoderConfig(**config), xp=np, seed=0), tokenizer),
        "classifier": Classifier(Encoder(EncoderConfig(**config, num_labels=2), xp=np, seed=0), tokenizer),
        "reranker": Reranker(Encoder(EncoderConfig(**config, num_labels=1), xp=np, seed=0), tokenizer),
    }


@pytest.fixture(scope="module")
def client(translator, generator, chat, byte_level):
    pipelines = {
        "translator": translator, "generator": generator, "chat": chat[0], "bytes": byte_level,
        **make_encoders(chat[1]),
    }  # fmt: skip
    client = Client(pipelines, max_body=5_000, max_tokens=50, timeout=30.0)
    yield client
    client.close()


def test_a_draft_model_belongs_to_a_model(generator, monkeypatch):
    calls, draft = [], DraftModel.__call__
    monkeypatch.setattr(
        DraftModel, "__call__", lambda self, tokens: calls.append(self.num_tokens) or draft(self, tokens)
    )
    assisted = TextGenerator(generator.model, generator.tokenizer, draft_model=make_generator(rope_theta=5.0).model)
    client, expected = Client({"assisted": assisted}), generator(["the"], max_new_tokens=9, do_sample=False)
    request = {"prompt": "the", "max_tokens": 9, "do_sample": False, "model": "assisted"}
    for options, number in (({"num_draft_tokens": 3}, 3), ({}, 5), ({"num_beams": 1}, 5), ({"num_beams": 2}, None)):
        calls.clear()
        (choice,) = client.post("/v1/completions", **request, **options)["choices"]
        assert {*calls, None} == {number, None}
        assert number is None or choice["text"] == expected[0]
    client.close()


def test_models_are_listed(client):
    models = {model["id"]: model for model in client.get("/v1/models")["data"]}
    assert [model["task"] for model in models.values()] == [
        "translation", "language_modeling",
        "language_modeling", "language_modeling", "embedding", "classification", "reranking",
    ]  # fmt: skip
    assert (models["translator"]["encoder_layers"], models["translator"]["decoder_layers"]) == (2, 3)
    assert [model["supports"]["chat"] for model in models.values()] == [False, False, True, True, *[False] * 3]
    assert models["embedder"]["defaults"] is None
    assert (models["embedder"]["encoder_layers"], models["embedder"]["decoder_layers"]) == (2, 0)
    assert client.get("/runs") == {"runs": []}


def test_translations_are_those_of_the_pipeline(client, translator):
    texts = [TEXTS[0], "", TEXTS[1]]
    response = client.post("/translate", text=texts, num_beams=3, length_penalty=1.0, max_new_tokens=20)
    expected = translator.outputs(texts, num_beams=3, length_penalty=1.0, max_new_tokens=20)
    outputs = response["outputs"]
    assert [each["text"] for (each,) in outputs] == [each[0].text if each else "" for each in expected]
    assert outputs[2][0]["score"] == pytest.approx(expected[2][0].score)
    assert [each["finished"] for (each,) in outputs] == [each[0].finished if each else True for each in expected]


def test_concurrent_requests_share_steps_and_are_not_mixed_up(client, translator, monkeypatch):
    sizes, step = [], DecodingSteps.step
    expected = [translator([text], max_new_tokens=20)[0] for text in TEXTS]

    def record(self, tokens, **options):
        sizes.append(len(tokens))
        return step(self, tokens, **options)

    monkeypatch.setattr(DecodingSteps, "step", record)
    with ThreadPoolExecutor(len(TEXTS)) as pool:
        calls = [pool.submit(client.post, "/translate", text=text, max_new_tokens=20) for text in TEXTS]
        received = [call.result()["outputs"][0][0]["text"] for call in calls]
    assert received == expected
    assert len(set(received)) > 1
    assert max(sizes) > 1


def test_texts_may_all_be_blank(client):
    blank = [{"text": "", "score": 0.0, "log_probability": 0.0, "finished": True}]
    for text in ("", [""], ["", "\u200b"]):
        assert client.post("/translate", text=text)["outputs"] == [blank] * max(len(text), 1)
    assert client.events("/translate", text=" ", stream=True)[-1][0] == "result"
    vectors = [each["embedding"] for each in client.post("/v1/embeddings", input=["", "a man"])["data"]]
    (alone,) = client.post("/v1/embeddings", input="")["data"]
    np.testing.assert_allclose(alone["embedding"], vectors[0], atol=1e-6)
    assert (
        client.post("/classify", input=[""])["data"][0]["label"]
        == client.post("/classify", input="")["data"][0]["label"]
    )
    assert len(client.post("/rerank", query="", documents=["", ""])["results"]) == 2


@pytest.mark.parametrize("settings", [{"temperature": 1.0, "seed": 3}, {"num_beams": 2}])
def test_streamed_translations_concatenate_to_the_result(client, settings):
    body = {"text": TEXTS[0], "max_new_tokens": 12, **settings}
    *tokens, (name, result) = client.events("/translate", **body, stream=True)
    assert {name for name, _ in tokens} == {"token"}
    assert name == "result"
    text = result["outputs"][0][0]["text"]
    assert "".join(data["text"] for _, data in tokens) == text
    assert len(tokens) > 1 or "num_beams" in settings
    assert client.post("/translate", **body)["outputs"][0][0]["text"] == text


def test_the_stream_of_an_empty_answer_has_the_role(client):
    body = {"model": "bytes", "messages": [{"role": "user", "content": "a"}], "max_tokens": 5, "temperature": 0}
    first = client.post("/v1/chat/completions", **body)["choices"][0]["message"]["content"][0]
    chunks = [data for _, data in client.events("/v1/chat/completions", **body, stop=first, stream=True)[:-1]]
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [{"role": "assistant", "content": ""}, {}]


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", {"model": "bytes", "prompt": "the"}), ("/translate", {"text": TEXTS[0]})],
)  # fmt: skip
def test_seeds_are_those_of_the_protocol(client, path, body):
    def send(seed):
        answer = client.post(path, **body, temperature=2.0, max_new_tokens=9, seed=seed)
        return answer.get("choices") or answer["outputs"]

    seeds = (-1, -(2**63), 2**63 - 1, 0)
    outputs = [send(seed) for seed in seeds]
    assert [send(seed) for seed in seeds] == outputs
    assert all(each not in outputs[:index] for index, each in enumerate(outputs))
    for seed in (2**63, -(2**63) - 1, 0.5, True):
        assert client.post(path, status=400, **body, seed=seed)["error"]["param"] == "seed"


def test_an_open_server_needs_a_token():
    assert ServeConfig().host == "127.0.0.1"
    for options in ({"host": "0.0.0.0"}, {"host": "10.0.0.7"}, {"host": "0.0.0.0", "token": "short"}):
        with pytest.raises(ConfigError, match="token"):
            create_app([], ServeConfig(**options))


@pytest.mark.parametrize(("token", "address", "status"), [
    (None, "127.0.0.1", 200), (None, "::1", 200), (None, "10.0.0.9", 403), ("long-enough", "127.0.0.1", 401),
    ("long-enough", "10.0.0.9", 401),
])  # fmt: skip
def test_an_application_without_a_token_serves_this_machine_only(token, address, status):
    """Whatever address it listens on."""
    app = create_app([], ServeConfig(token=token))

    def send(host):
        messages = []

        async def receive():
            return {"type": "http.request", "body": b""}

        async def reply(message):
            messages.append(message)

        scope = {"type": "http", "method": "GET", "path": "/v1/models", "client": (address, 1)}
        asyncio.run(app({**scope, "headers": [(b"host", host)], "query_string": b""}, receive, reply))
        return messages[0]["status"]

    assert send(b"localhost") == status
    assert send(b"evil.example") == 403
    app = create_app([], ServeConfig(token=token, cors_origins=("https://hub.example:8443",)))  # behind a proxy
    assert send(b"hub.example:8443") == status
    assert send(b"evil.example") == 403


def test_texts_are_tokenized_outside_of_the_event_loop(client, monkeypatch):
    threads = []
    for pipeline in (TextGenerator, Translator, Embedder):

        def token_ids(*args, token_ids=pipeline.token_ids, **options):
            threads.append(threading.current_thread())
            return token_ids(*args, **options)

        monkeypatch.setattr(pipeline, "token_ids", token_ids)
    chat = [{"role": "user", "content": "a"}]
    for path, body in (
        ("/translate", {"text": TEXTS[0]}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
        ("/v1/chat/completions", {"model": "bytes", "messages": chat, "max_tokens": 1}),
        ("/v1/embeddings", {"input": "a man"}),
        ("/explore", {"text": TEXTS[0], "max_new_tokens": 1}),
        ("/attention", {"text": TEXTS[0]}),
    ):
        client.post(path, **body)
    assert len(threads) >= 6
    assert client.thread not in threads


def test_messages_keep_all_keys_and_may_have_no_content(client):
    call = {"id": "1", "type": "function", "function": {"name": "walk", "arguments": '{"far": true}'}}
    read = {**call, "function": {"name": "walk", "arguments": {"far": True}}}
    assistant = {"role": "assistant", "content": None, "tool_calls": [call]}
    messages = [{"role": "user", "name": "Ann", "content": [{"type": "text", "text": "the dog"}]}, assistant]
    assert [plain_message(each) for each in messages] == [
        {"role": "user", "name": "Ann", "content": "the dog"},
        {**assistant, "content": "", "tool_calls": [read]},
    ]
    body = {"model": "chat", "max_tokens": 2, "temperature": 0}
    assert client.post("/v1/chat/completions", **body, messages=messages)["choices"]


def test_embeddings_and_classes_are_those_of_the_pipelines(client):
    texts = ["a man", "the dog runs"]
    pipelines = {model.name: model.pipeline for model in client.models}
    data = client.post("/v1/embeddings", input=texts)["data"]
    np.testing.assert_allclose([each["embedding"] for each in data], pipelines["embedder"](texts), atol=1e-6)
    encoded = client.post("/v1/embeddings", input="a man", encoding_format="base64")["data"][0]["embedding"]
    np.testing.assert_allclose(np.frombuffer(base64.b64decode(encoded), "<f4"), data[0]["embedding"], atol=1e-6)
    classes = client.post("/classify", input=texts)["data"]
    assert [each["label"] for each in classes] == [each.label for each in pipelines["classifier"](texts)]


def test_documents_are_ordered_by_a_query(client):
    documents = [f"{text} {number}" for number in range(40) for text in ("a man", "the dog runs")]
    (reranker,) = (model.pipeline for model in client.models if model.name == "reranker")
    ranked = reranker("the dog", documents)
    with ThreadPoolExecutor(3) as pool:
        body = {"query": "the dog", "documents": documents}
        calls = [pool.submit(client.post, path, **body) for path in ("/rerank", "/v1/rerank")]
        other = pool.submit(client.post, "/rerank", query="a man", documents=documents[:5], top_n=2)
    for answer in [call.result() for call in calls]:
        assert [each["index"] for each in answer["results"]] == [each.position for each in ranked]
        probabilities = [1 / (1 + np.exp(-each.score)) for each in ranked]
        np.testing.assert_allclose([each["relevance_score"] for each in answer["results"]], probabilities, rtol=1e-5)
        assert answer["usage"]["total_tokens"] > 80
    assert [each["index"] for each in other.result()["results"]] == [
        each.position for each in reranker("a man", documents[:5], top_k=2)
    ]
    (result,) = client.post("/rerank", query="", documents=["a man"], return_documents=True)["results"]
    assert result["document"] == {"text": "a man"}
    for invalid in ({"documents": []}, {"documents": ["a", 3]}, {"documents": ["a"], "top_n": 0}, {"documents": "a"}):
        client.post("/rerank", status=400, query="a", **invalid)
    client.post("/classify", status=400, model="reranker", input="a")


@pytest.mark.parametrize(
    ("problem_type", "total"), [("single_label_classification", 1.0), ("multi_label_classification", None)]
)
def test_classes_and_relevance_have_the_functions_of_the_pipelines(chat, problem_type, total):
    config = {"vocab_size": 61, **SIZES, "num_layers": 1, "max_positions": 32}
    model = Encoder(EncoderConfig(**config, num_labels=3, problem_type=problem_type), xp=np, seed=0)
    ranker = Encoder(EncoderConfig(**config, num_labels=1), xp=np, seed=0)
    served = {"classes": Classifier(model, chat[1]), "ranks": Reranker(ranker, chat[1], activation="sigmoid")}
    client = Client(served)
    (answer,) = client.post("/classify", input="the dog", model="classes")["data"]
    (expected,) = served["classes"](["the dog"])
    assert answer["probabilities"] == pytest.approx(expected.probabilities)
    assert (sum(answer["probabilities"].values()) == pytest.approx(1.0)) == (total is not None)
    ranked = client.post("/rerank", query="the", documents=["a", "dog"], model="ranks")["results"]
    assert [each["relevance_score"] for each in ranked] == pytest.approx(
        [each.score for each in served["ranks"]("the", ["a", "dog"])]
    )
    client.close()


def test_exploring_a_beam_search(client, translator):
    settings = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 9}
    body = {"text": TEXTS[0], **settings}
    response = client.post("/explore", **body)
    (expected,) = translator.outputs([TEXTS[0]], **settings)
    assert [[token["id"] for token in output["tokens"]] for output in response["outputs"]] == [
        output.tokens for output in expected
    ]
    assert [output["text"] for output in response["outputs"]] == [output.text for output in expected]
    tokens = response["outputs"][0]["tokens"]
    total = sum(token["log_probability"] for token in tokens)
    assert total == pytest.approx(expected[0].log_probability) or expected[0].finished
    assert all(len(token["alternatives"]) == 10 for token in tokens)
    source = [token["id"] for token in response["source"]["tokens"]]
    (weights,) = alignments(translator.model, [source], [expected[0].tokens])
    np.testing.assert_allclose(response["alignment"], weights, atol=1e-5)
    # The best output is a path through the tree.
    steps = response["beam"]["steps"]
    parents = {None}
    for position, token in enumerate(tokens):
        parents = {
            index
            for index, candidate in enumerate(steps[position])
            if candidate["id"] == token["id"] and candidate["status"] == "kept" and candidate["parent"] in parents
        }
        assert parents
    assert {candidate["status"] for step in steps for candidate in step} >= {"kept", "pruned"}
    events = client.events("/explore", **body, stream=True)
    assert [name for name, _ in events] == ["source", *["step"] * len(steps), "result"]
    assert [data["candidates"] for name, data in events if name == "step"] == steps


def test_exploring_a_language_model_token_by_token(client, generator):
    body = {"model": "generator", "text": "the", "max_new_tokens": 5, "temperature": 0, "num_alternatives": 3}
    events = client.events("/explore", **body, stream=True)
    assert [name for name, _ in events] == ["source", *["token"] * 5, "result"]
    (output,) = events[-1][1]["outputs"]
    assert [data["text"] for _, data in events[1:-1]] == [token["text"] for token in output["tokens"]]
    assert output["text"] == generator(["the"], max_new_tokens=5, do_sample=False)[0]
    assert [token["alternatives"][0]["id"] for token in output["tokens"]] == [t["id"] for t in output["tokens"]]
    assert output["log_probability"] == pytest.approx(sum(t["log_probability"] for t in output["tokens"]))


def test_attention_is_that_of_the_model(client, translator):
    explored = client.post("/explore", text=TEXTS[0], max_new_tokens=4)
    ids = [token["id"] for token in explored["outputs"][0]["tokens"]]
    source = [token["id"] for token in explored["source"]["tokens"]]
    attention = client.post("/attention", text=TEXTS[0], output_ids=ids)["attention"]
    maps = attention_maps(translator.model, [source], [[translator.model.config.bos_id, *ids[:-1]]])
    assert attention.keys() == maps.keys()
    for kind, layers in maps.items():
        array = np.frombuffer(base64.b64decode(attention[kind]["data"]), "<f4").reshape(attention[kind]["shape"])
        np.testing.assert_allclose(array, np.concatenate(layers), atol=1e-6)
        assert (len(attention[kind]["queries"]), len(attention[kind]["keys"])) == array.shape[2:]
    one = client.post("/attention", text=TEXTS[0], output_ids=ids, kinds=["cross"], layer=1)["attention"]
    assert one["cross"]["shape"][0] == 1
    assert client.post("/attention", model="embedder", text="a man")["attention"].keys() == {"encoder"}


# Requests to routes for models that do not translate.
OF_OTHERS = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/responses": {"input": "a"},
    "/v1/embeddings": {"input": "a"},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
}


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/translate", {"txt": "a"}, 400, "unknown key 'txt' in the request; did you mean 'text'?"),
        ("/translate", {"text": 1}, 400, "text is 1; expected `str | array`, got `int`"),
        ("/translate", {"text": "a", "num_beams": 33}, 400, "num_beams is 33; expected `int` <= 32"),
        ("/translate", {"text": "a", "max_new_tokens": 51}, 400, "max_new_tokens is 51; expected at most 50"),
        ("/translate", {"text": "a", "length_unit": "x" * 3000}, 400, "invalid enum value 'xxxxx"),
        ("/translate", {"text": ["a"] * 65}, 400, "text has 65 texts; expected 1 to 64"),
        ("/translate", {"text": "a", "num_beams": 2, "temperature": 0.5}, 400, "num_beams is 2 and sampling"),
        ("/translate", {"text": "a", "model": "none"}, 404, "model 'none' does not exist"),
        ("/translate", {"text": "a", "model": "../x"}, 404, "model '../x' does not exist"),
        ("/translate", {"text": "a", "model": "generator"}, 400,
         "model 'generator' cannot translate: it is for language modeling; expected /v1/completions"),
        *((path, {"model": "translator", **body}, 400, "it is for translation; expected /translate")
          for path, body in OF_OTHERS.items()),
        ("/v1/completions", {"model": "embedder", "prompt": "a"}, 400, "for embedding; expected /v1/embeddings"),
        ("/translate", {"text": "a" * 6000}, 413, "the body is too long; expected at most 5000 bytes"),
        ("/translate", b"[" * 4000, 400, "the body is not JSON"),
        ("/translate", b'{"text": "\\ud800"}', 400, "the body is not JSON"),
        ("/translate", [1], 400, "the body is a list; expected a JSON object"),
        ("/summarize", {"text": "a"}, 404, "no model on this server can summarize; expected /translate for tr"),
        ("/explore", {"text": "a", "model": "generator", "prefix": "b"}, 400, "prefix applies to encoder-decoders"),
        ("/v1/chat/completions", {"messages": [], "model": "generator"}, 400, "has no chat template"),
        ("/v1/completions", {"prompt": "a", "tools": [1]}, 400, "unknown key 'tools' in the request; expected one of"),
        ("/explore", {"text": "a", "prefix_ids": [100_000]}, 400, "token id 100000"),
        ("/explore", {"text": "a", "prefix_ids": [5], "prefix": "a"}, 400, "prefix and prefix_ids are both given"),
        ("/explore", {"model": "generator", "text": "a", "prefix_ids": [-1]}, 400, "prefix_ids has token id -1"),
        ("/attention", {"text": "a", "output_ids": [100_000]}, 400, "output_ids has token id 100000"),
        ("/nothing", {}, 404, "Not Found"),
        ("/v1/completions", {"model": "generator", "prompt": "a", "max_tokens": 51}, 400, "max_tokens is 51; expected"),
        ("/explore", {"text": "one", "stream": True, "ablations": OFF}, 400, "stream is true with ablations"),
    ],
)  # fmt: skip
def test_invalid_requests_get_one_line(client, path, body, status, message):
    received, headers, text = client.send("POST", path, body)
    error = json.loads(text)["error"]
    assert (received, headers["content-type"]) == (status, "application/json")
    assert message in error["message"]
    assert len(error["message"]) <= 800
    assert "\n" not in error["message"]
    assert error.keys() == {"message", "type", "param", "code"}


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_body_has_at_most_the_limit(client, is_chunked):
    body = json.dumps({"text": ""}).encode()
    for size, expected in ((5_000, 200), (5_001, 413)):
        content = body + b" " * (size - len(body))
        headers = {"Transfer-Encoding": "chunked"} if is_chunked else {}
        sent = b"%x\r\n%s\r\n0\r\n\r\n" % (size, content) if is_chunked else content
        assert client.send("POST", "/translate", sent, headers)[0] == expected


def test_sixteen_stop_strings_are_allowed(client):
    for path, body in (("/translate", {"text": "a"}), ("/v1/completions", {"model": "generator", "prompt": "a"})):
        stop = [f"#{index}" for index in range(17)]
        assert client.post(path, **body, stop=stop[:16])["usage"]["completion_tokens"] > 0
        error = client.post(path, 400, **body, stop=stop)["error"]
        assert "expected up to 16 texts that are not empty" in error["message"]


def test_only_json_is_accepted(client):
    assert client.send("POST", "/translate", b"{}", {"Content-Type": "text/plain"})[0] == 415
    assert client.send("GET", "/translate")[0] == 405


def test_other_hosts_and_origins_are_refused(client):
    assert client.send("GET", "/health", headers={"Host": "evil.example:80"})[0] == 403
    assert client.send("GET", "/health", headers={"Origin": "http://evil.example"})[0] == 403
    own = f"127.0.0.1:{client.port}"
    status, headers, _ = client.send("GET", "/health", headers={"Origin": f"http://{own}", "Host": own})
    assert status == 200
    assert headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")


LONG = "a " * 70


@pytest.fixture(scope="module")
def short(byte_level):
    client = Client({"bytes": byte_level, "short": make_translator(positions="learned", max_positions=32)})
    yield client
    client.close()


@pytest.mark.parametrize(("path", "body", "message", "param"), [
    ("/v1/completions", {"prompt": LONG}, "prompt 1 has 140 tokens; the context of the model has 64", "prompt"),
    ("/v1/completions", {"prompt": ["a", [5] * 60], "max_tokens": 9}, "60 tokens and max_tokens is 9; the", "prompt"),
    ("/v1/completions", {"prompt": [5] * 64, "max_tokens": 0, "echo": True, "logprobs": 1}, "has 64 tok", "prompt"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}, "shorten the prompt", "messages"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 60}], "max_completion_tokens": 9},
     "max_completion_tokens is 9; the context of the model has 64, so 5 do not fit: shorten the prompt or lower",
     "messages"),
    ("/explore", {"text": "a" * 60, "max_new_tokens": 9, "num_beams": 2}, "max_new_tokens is 9", "text"),
    ("/attention", {"text": LONG}, "the text has 140 tokens; the context of the model has 64", None),
    ("/translate", {"text": ["a", "a " * 1100]}, "text 2 has 2201 tokens; expected at most 31", "text"),
    ("/translate", {"text": "a", "target_length": 32}, "target_length is 32; expected at most 31", "target_length"),
    ("/attention", {"model": "short", "text": "a", "output_ids": [5] * 33}, "the output has 33 tokens", None),
])  # fmt: skip
def test_an_overflow_of_the_context_has_its_code(short, path, body, message, param):
    model = "short" if path == "/translate" else "bytes"
    error = short.post(path, status=400, **{"model": model, **body})["error"]
    assert message in error["message"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert not re.search("context=|max_source_length|train ", error["message"])  # which no request can change


def test_the_context_may_be_full(short):
    for size, new in ((60, 4), (63, 1)):
        body = {"model": "bytes", "prompt": [20] * size}
        assert short.post("/v1/completions", **body, max_tokens=new)["usage"]["total_tokens"] == 64
        error = short.post("/v1/completions", 400, **body, max_tokens=new + 1)["error"]
        assert error["code"] == "context_length_exceeded"
    (output,) = short.post("/translate", model="short", text="a", target_length=31)["outputs"][0]
    assert len(output["text"]) == 31
    error = short.post("/translate", 400, model="short", text="a", target_length=32)["error"]
    assert error["code"] == "context_length_exceeded"


def test_prompts_without_tokens_are_refused(client):
    for path, body, message in (
        ("/v1/chat/completions", {"messages": []}, "messages is empty; expected at least one message"),
        ("/explore", {"messages": []}, "messages is empty; expected some text"),
        ("/attention", {"messages": []}, "messages is empty; expected some text"),
        ("/layers", {"messages": [], "output_ids": [5]}, "messages is empty; expected some text"),
        ("/v1/completions", {"prompt": []}, "prompt is empty or of another kind; expected a text, a list of texts, to"),
        ("/v1/completions", {"prompt": [[]]}, "prompt is empty or of another kind"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": ""}]}, "prompt 1 is empty; expected some t"),
    ):
        error = client.post(path, status=400, model="bytes", **body)["error"]
        assert message in error["message"]
        assert error["param"] in body


@pytest.mark.parametrize("kind", ["translator", "generator"])
def test_the_default_length_of_a_checkpoint_is_cut_to_the_limit(translator, generator, kind):
    pipeline = copy.copy({"translator": translator, "generator": generator}[kind])
    pipeline.defaults, settings = GenerationConfig(max_new_tokens=30), {"text": TEXTS[0], "suppress_tokens": [2]}
    if kind == "generator":
        pipeline.default_max_length, settings["text"] = 30, "the"
    client = Client({kind: pipeline}, max_tokens=7)
    try:
        (output,) = client.post("/explore", **settings)["outputs"]
        assert len(output["tokens"]) == 7
        assert client.get("/v1/models")["data"][0]["defaults"]["max_new_tokens"] == 7
        assert client.post("/explore", status=400, **settings, max_new_tokens=8)["error"]["param"] == "max_new_tokens"
    finally:
        client.close()


IDS = [5] * 9


@pytest.fixture(scope="module")
def limited(chat, translator):
    client = Client({"chat": chat[0], "translator": translator}, max_request_tokens=200)
    yield client
    client.close()


def test_the_tokens_of_a_request_are_limited(limited):
    for path, body, more in (
        ("/v1/completions", {"prompt": [IDS] * 5, "max_tokens": 1, "n": 4, "temperature": 1}, {"n": 5}),
        ("/v1/completions", {"prompt": [IDS] * 20, "max_tokens": 1}, {"max_tokens": 2, "stream": True}),
        ("/v1/completions", {"prompt": [IDS] * 64, "max_tokens": 0, "echo": True, "logprobs": 1}, {"max_tokens": 1}),
        ("/explore", {"text": "a man", "max_new_tokens": 9, "num_beams": 8}, {"num_beams": 32, "stream": True}),
        ("/explore", {"text": "a man", "max_new_tokens": 9, "num_beams": 8}, {"num_beams": 32, "ablations": OFF}),
        ("/explore", {"model": "translator", "text": TEXTS[0], "max_length_ratio": 2.0},
         {"max_length_ratio": 100.0, "stream": True}),
    ):  # fmt: skip
        assert limited.post(path, **body)
        message = limited.post(path, status=400, **{**body, **more})["error"]["message"]
        numbers = re.search(r"takes (\d+) tokens \((\d+) texts, outputs or beams of up to (\d+)\)", message).groups()
        total, rows, length = map(int, numbers)
        assert rows * length == total > 200
        assert "expected at most 200, the limit of this server" in message


def test_openapi_has_the_limits_of_the_server(client):
    schemas = client.get("/openapi.json")["components"]["schemas"]
    fields = schemas["CompletionRequest"]["properties"]
    assert fields["max_tokens"]["maximum"] == 50
    assert fields["num_beams"]["maximum"] == 32
    assert fields["temperature"]["minimum"] == 0
    assert "default" not in fields["temperature"]


def test_openapi_describes_every_path(client):
    described = client.get("/openapi.json")["paths"]
    served = {route.path for route in client.app.app.routes if hasattr(route, "methods")}
    assert set(described) == served - {"/", "/docs", "/openapi.json", "/pages/{page:path}.md"}
    assert client.send("GET", "/docs")[0] == 200


LAYERS = [
    {"model": "translator", "text": "one hundred", "output_ids": [30, 40, 41]},
    {"model": "generator", "text": "the cat", "output_ids": [5, 9]},
]


def predicted(pipeline, body, model=None):
    """Return the log-probabilities of the next tokens at each position of an output."""
    model, output = model or pipeline.model, body["output_ids"]
    ids = pipeline.input_ids(body["text"])
    logits = model([ids], [[1, *output[:-1]]])[0] if pipeline.has_source else model([[*ids, *output]])[0]
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def without(model, ablation):
    """Return a model whose parameters make a part of it add nothing."""
    layers = ("encoder" if ablation["kind"] == "encoder" else "decoder") if hasattr(model, "encoder") else "layers"
    part = {"cross": "cross_attention"}.get(ablation["kind"], "self_attention")
    part = "feed_forward.down" if ablation.get("part") == "feed_forward" else f"{part}.output"
    arrays = {
        name: np.array(array)
        for name, array in model.named_parameters()
        if f"{layers}.{ablation['layer']}.{part}." in name
    }
    weight = next(array for name, array in arrays.items() if name.endswith("weight"))
    if (head := ablation.get("head")) is None:
        for array in arrays.values():
            array[...] = 0
    else:
        weight[8 * head : 8 * head + 8] = 0
    return replace(model, dict(model.named_parameters()) | arrays)


@pytest.mark.parametrize("body", LAYERS, ids=lambda body: body["model"])
def test_layers_are_described(client, translator, generator, body):
    pipeline = {"translator": translator, "generator": generator}[body["model"]]
    answer = client.post("/layers", **body, num_alternatives=3, lens=True)
    log_probs, num_layers = predicted(pipeline, body), 3 if pipeline.has_source else 2
    first = 0 if pipeline.has_source else len(log_probs) - len(body["output_ids"]) - 1
    for position, (id_, token) in enumerate(zip(body["output_ids"], answer["output"], strict=True)):
        assert token["id"] == id_
        assert token["log_probability"] == pytest.approx(log_probs[first + position, id_])
        assert token["alternatives"][0]["id"] == log_probs[first + position].argmax()
    assert [layer["name"] for layer in answer["layers"]] == [
        "embedding",
        *(f"layer {n + 1}" for n in range(num_layers)),
    ]
    # The last layer predicts what the model does.
    assert [token["id"] for token in answer["layers"][-1]["tokens"]] == log_probs.argmax(axis=-1).tolist()
    assert [token["probability"] for token in answer["layers"][-1]["tokens"]] == pytest.approx(
        np.exp(log_probs.max(-1))
    )
    parts = ["attention", "cross-attention", "feed-forward"] if pipeline.has_source else ["attention", "feed-forward"]
    assert list(answer["layers"][1]["parts"]) == parts
    assert len(answer["layers"][1]["norms"]) == len(log_probs)


@pytest.mark.parametrize(("body", "ablation"), [
    (LAYERS[0], {"kind": "decoder", "layer": 1, "head": 1}), (LAYERS[0], {"kind": "cross", "layer": 2, "head": 0}),
    (LAYERS[0], {"kind": "encoder", "layer": 0, "part": "feed_forward"}), (LAYERS[1], {"kind": "decoder", "layer": 0}),
    (LAYERS[1], {"kind": "decoder", "layer": 1, "part": "feed_forward"}), (LAYERS[1], {"kind": "cross", "layer": 0}),
], ids=str)  # fmt: skip
def test_parts_of_a_model_are_switched_off(client, translator, generator, body, ablation):
    pipeline = {"translator": translator, "generator": generator}[body["model"]]
    if ablation["kind"] not in pipeline.attention_kinds:
        assert (
            "expected any of decoder" in client.post("/layers", 400, **body, ablations=[ablation])["error"]["message"]
        )
        return
    changed = without(pipeline.model, ablation)
    tokens = client.post("/layers", **body, ablations=[ablation])["output"]
    log_probs, before = predicted(pipeline, body, changed), predicted(pipeline, body)
    first = 0 if pipeline.has_source else len(log_probs) - len(tokens) - 1
    values = [log_probs[first + position, token["id"]] for position, token in enumerate(tokens)]
    assert [token["log_probability"] for token in tokens] == pytest.approx(values)
    assert abs(log_probs - before).max() > 1e-6
    # So does the generated output, and nothing else that the server computes.
    search = {
        "model": body["model"], "text": body["text"], "temperature": 0, "max_new_tokens": 5, "num_alternatives": 1,
    }  # fmt: skip
    free = client.post("/explore", **search)["outputs"]
    with ThreadPoolExecutor(2) as pool:
        off, on = pool.map(lambda ablations: client.post("/explore", **search, ablations=ablations), [[ablation], []])
    assert on["outputs"] == free
    pipeline = copy.copy(pipeline)
    pipeline.model = changed
    ((expected,),) = pipeline.outputs([body["text"]], max_new_tokens=5, do_sample=False)
    assert [token["id"] for token in off["outputs"][0]["tokens"]] == expected.tokens
    assert off["outputs"][0]["log_probability"] == pytest.approx(expected.log_probability)


@pytest.mark.parametrize(("body", "kind"), [(LAYERS[0], "cross"), (LAYERS[1], "decoder")], ids=["cross", "decoder"])
def test_a_row_of_attention_is_replaced(client, body, kind):
    maps = client.post("/attention", **body, kinds=[kind])["attention"][kind]
    weights = np.frombuffer(base64.b64decode(maps["data"]), "<f4").reshape(maps["shape"])
    layer, query = len(weights) - 1, weights.shape[2] - (1 if kind == "cross" else 2)  # predicts the last token
    row = {"kind": kind, "layer": layer, "head": 1, "query": query}
    row["weights"] = (7 * weights[layer, 1, query].astype(float)).tolist()

    def log_probabilities(**changes):
        return [token["log_probability"] for token in client.post("/layers", **body, **changes)["output"]]

    before = log_probabilities()
    assert log_probabilities(attention_rows=[row]) == pytest.approx(before, abs=1e-6)  # weights of the model itself
    row["weights"] = [1.0] + [0.0] * (len(row["weights"]) - 1)
    after = log_probabilities(attention_rows=[row])
    assert after[-1] != pytest.approx(before[-1], abs=1e-6)
    if kind == "cross":
        assert after[:2] == pytest.approx(before[:2])  # earlier tokens do not see it


ROW = {"kind": "cross", "layer": 0, "query": 0, "weights": [1.0]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ablations": [{"kind": "cross", "layer": 3}]}, "layer is 3; expected 0 to 2"),
        ({"ablations": [{"kind": "cross", "layer": 0, "head": 2}]}, "head is 2; expected 0 to 1"),
        ({"ablations": [{"kind": "cross", "layer": 0, "part": "feed_forward"}]}, "a feed_forward part has no head"),
        ({"ablations": [{"kind": "self", "layer": 0}]}, "ablations[0].kind is"),
        ({"ablations": {"kind": "cross"}}, "ablations is"),
        ({"attention_rows": [{**ROW, "weights": [1.0, 2.0]}]}, "weights has 2 numbers; expected"),
        ({"attention_rows": [{**ROW, "weights": [0.0]}]}, "weights sum to 0"),
        ({"attention_rows": [{**ROW, "weights": [-1.0]}]}, "attention_rows[0].weights[0] is -1.0"),
        ({"attention_rows": [{**ROW, "query": 3, "weights": [1.0] * 3}]}, "query is 3; expected 0 to 2"),
        ({"attention_rows": [{**ROW, "kind": "decoder", "weights": [1.0, 1.0, 0.0]}]}, "weights has some after key 0"),
        ({"output_ids": []}, "output_ids is empty"),
    ],
)
def test_invalid_changes_of_a_model_are_refused(client, changes, message):
    error = client.post("/layers", 400, **LAYERS[0] | changes)["error"]["message"]
    assert message in error
    assert "\n" not in error


@pytest.mark.parametrize("model", ["translator", "generator"])
def test_an_output_continues_forced_tokens(client, model):
    body = {"model": model, "text": "one" if model == "translator" else "the", "num_alternatives": 2, "temperature": 0}
    body |= {"max_new_tokens": 6}
    (free,) = client.post("/explore", **body)["outputs"]
    ids = [free["tokens"][0]["id"], free["tokens"][1]["alternatives"][1]["id"]]
    (output,) = client.post("/explore", **body, prefix_ids=ids)["outputs"]
    assert [token["id"] for token in output["tokens"][:2]] == ids
    assert [bool(token["alternatives"]) for token in output["tokens"][:3]] == [False, False, True]
    assert "".join(token["text"] for token in output["tokens"]) == output["text"]
    shown = [
        event["id"] for name, event in client.events("/explore", **body, prefix_ids=ids, stream=True) if name == "token"
    ]
    assert shown == [token["id"] for token in output["tokens"]]
    # The model sees the forced tokens: those that it chose itself have the same continuation.
    chosen = [token["id"] for token in free["tokens"]]
    (same,) = client.post(
        "/explore", **body | {"max_new_tokens": 6 if model == "translator" else 4}, prefix_ids=chosen[:2]
    )["outputs"]
    assert [token["id"] for token in same["tokens"]] == chosen


def test_answers_have_their_schema(client):
    for path in ("/health", "/v1/models", "/runs"):
        check_answer("get", path, 200, client.get(path))


def test_a_client_that_disconnects_stops_its_generation(caplog):
    client = Client({"slow": make_generator(SlowLanguageModel, window=8)}, max_tokens=1000, max_requests=1)
    try:
        body = {"prompt": "the", "max_tokens": 1000, "stream": True}
        connection, response = client.open("POST", "/v1/completions", body)
        assert response.readline().startswith(b"data: {")
        assert client.get("/health")["running"] == 1
        status, headers, _ = client.send("POST", "/v1/completions", body)
        assert (status, headers["retry-after"]) == (429, "1")
        response.close()
        connection.close()
        client.idle()
        assert not [record for record in caplog.records if record.levelname == "ERROR"]
        connection, _ = client.open("POST", "/v1/completions", {**body, "max_tokens": 1, "stream": False})
        connection.close()
    finally:
        client.close()


def test_a_request_that_takes_too_long_is_stopped():
    client = Client({"slow": make_generator(SlowLanguageModel, window=8)}, timeout=0.2)
    try:
        body = {"prompt": "the", "max_tokens": 1000}
        assert client.post("/v1/completions", 504, **body)["error"]["code"] == "timeout"
        assert client.events("/v1/completions", **body, stream=True)[-2][0] == "error"
        client.idle()
    finally:
        client.close()


COMPUTED = {
    "/v1/embeddings": {"input": ["a man", "the dog"]},
    "/classify": {"input": "a man"},
    "/rerank": {"query": "a", "documents": ["a man"]},
    "/v1/rerank": {"query": "a", "documents": ["a man"]},
    "/attention": {"model": "generator", "text": "the"},
    "/layers": {"model": "generator", "text": "the", "output_ids": [5]},
    "/explore": {"model": "generator", "text": "the", "ablations": OFF},
}


def test_computed_routes_have_the_timeout_too(chat, generator):
    client = Client({"generator": generator, **make_encoders(chat[1])}, timeout=0.1)
    proceed = threading.Event()
    try:
        for model in client.models:
            model.worker._computing.submit(proceed.wait, 60)
        for path, body in COMPUTED.items():
            assert client.post(path, status=504, **body)["error"]["code"] == "timeout"
        client.idle()
    finally:
        proceed.set()
        client.close()


def test_a_token_is_required():
    client = Client({"generator": make_generator()}, host="0.0.0.0", token=TOKEN)
    try:
        assert client.send("GET", "/v1/models")[0] == 401
        assert client.send("GET", "/v1/models", headers={"Authorization": "Bearer wrong"})[0] == 401
        assert client.send("GET", "/v1/models", headers={"Authorization": f"Bearer {TOKEN}".encode()})[0] == 200
        assert client.send("GET", "/health")[0] == 200
    finally:
        client.close()
