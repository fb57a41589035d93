"""Invalid requests: every response has a documented status, errors are JSON, and the server answers afterwards."""

from __future__ import annotations

import json
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("starlette")
from tests.serve.test_app import Client, make_generator, make_translator
from tests.stress.conftest import byte_mutations, json_mutations, limits

STATUSES = {200, 400, 401, 403, 404, 405, 411, 413, 415, 429, 503}
BODIES = {
    "/translate": {"text": ["one", "two"], "num_beams": 2, "length_penalty": 0.6, "prefix": "ein", "seed": 1},
    "/summarize": {"text": "one", "max_new_tokens": 4, "target_length": 3, "length_unit": "words"},
    "/explore": {"text": "one", "num_alternatives": 3, "num_beams": 2, "stream": True, "max_new_tokens": 4},
    "/explore?generator": {
        "text": "the", "prefix_ids": [5, 6], "model": "generator", "max_new_tokens": 3,
        "ablations": [
            {"kind": "decoder", "layer": 1, "head": 0},
            {"kind": "decoder", "layer": 0, "part": "feed_forward"}
        ],
    },
    "/layers": {
        "text": "one", "output_ids": [5, 6], "lens": True, "num_alternatives": 2,
        "attention_rows": [{"kind": "decoder", "layer": 2, "query": 1, "weights": [0.5, 1]}],
        "ablations": [{"kind": "encoder", "layer": 0}],
    },
    "/attention": {"text": "one", "output_ids": [1, 2], "kinds": ["cross"], "layer": 0, "model": "translator"},
    "/v1/completions": {
        "prompt": ["the", "cat"], "max_tokens": 4, "n": 2, "stop": ["t"], "stream": False, "logprobs": 2, "echo": True,
        "temperature": 0.5, "top_p": 0.9, "seed": 3, "model": "generator", "sequence_bias": ["cat"],
    },
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "stream": True, "temperature": 0,
    },
    "/v1/embeddings": {"input": ["a"], "encoding_format": "float"},
    "/classify": {"input": "a", "model": "translator"},
}  # fmt: skip
HEADERS = st.dictionaries(
    st.sampled_from(["Content-Type", "Accept", "Authorization", "Origin", "Host", "Content-Encoding", "X-Odd"]),
    st.sampled_from(["", "x", "application/json", "text/html", "Bearer x", "a" * 5000, "gzip", "http://a.example"]),
    max_size=2,
)


@pytest.fixture(scope="module")
def client():
    client = Client({"translator": make_translator(), "generator": make_generator()}, max_tokens=16)
    yield client
    client.close()


@pytest.fixture(autouse=True)
def no_errors_in_the_log(caplog):
    yield
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert not errors, errors[0].getMessage()


def check(client, method, path, body, headers):
    with limits():
        status, _, text = client.send(method, path, body, headers)
        assert status in STATUSES, (status, text[:300])
        if status >= 400 and method != "HEAD" and not path.startswith("/static"):
            message = json.loads(text)["error"]["message"]
            assert "\n" not in message
            assert 0 < len(message) <= 1000
        assert client.send("GET", "/health")[0] == 200


@pytest.mark.parametrize("path", BODIES)
@given(data=st.data())
def test_invalid_fields_are_answered_by_a_documented_status(client, path, data):
    content = json.dumps(BODIES[path]).encode()
    body = data.draw(json_mutations(BODIES[path]) | byte_mutations(content))
    check(client, "POST", path, body, data.draw(st.just({}) | HEADERS))


@given(
    method=st.sampled_from(["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"]),
    path=st.sampled_from([*BODIES, "/", "/health", "/v1/models", "/runs", "/openapi.json", "/docs"])
    | st.sampled_from(
        ["/runs/translator", "/runs/..%2f..%2fetc", "/static/../../../etc/passwd", "/static/%2e%2e/app.py"]
    )
    | st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=40).map(lambda text: "/" + text),
    headers=HEADERS,
    body=st.none() | st.binary(max_size=50),
)
def test_any_method_and_path_is_answered_by_a_documented_status(client, method, path, headers, body):
    check(client, method, path, body, headers)
