"""/v1/responses, fields of vLLM and llama.cpp, and the routes around them."""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import typing

import numpy as np
import pytest

openai = pytest.importorskip("openai")
pytest.importorskip("uvicorn")
from openai.types.responses import response_create_params  # noqa: E402

import xformer  # noqa: E402
from tests.serve.test_app import Client, make_encoders, make_generator  # noqa: E402
from tests.serve.test_app import chat as chat_model  # noqa: E402, F401
from tests.serve.test_openai import (  # noqa: E402, F401 - fixtures
    HERMES,
    SECOND,
    TOOL,
    USER,
    ScriptedGenerator,
    all_fields,
    client,
    directory,
    generator,
    scripted,
)
from xformer.errors import ConfigError  # noqa: E402
from xformer.serve.app import ServeConfig  # noqa: E402
from xformer.serve.metrics import Metrics  # noqa: E402

FLAT = {"type": "function", **TOOL["function"]}
PERSON = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["age"],
}


def body_of(response):
    return json.loads(response.text)


# --- Responses --------------------------------------------------------------------------------------------------------


def test_a_response_is_the_answer_of_a_chat(client):  # noqa: F811
    chat = [{"role": "system", "content": "Be kind."}, *USER]
    options = {"model": "llama", "temperature": 0, "extra_body": {"min_new_tokens": 9}}
    answer = client.chat.completions.create(messages=chat, max_tokens=20, logprobs=True, top_logprobs=2, **options)
    parts = [{"role": "user", "content": [{"type": "input_text", "text": USER[0]["content"]}]}]
    for given in (USER[0]["content"], USER, parts):
        response = client.responses.create(
            input=given, instructions="Be kind.", max_output_tokens=20, top_logprobs=2,
            include=["message.output_text.logprobs"], **options,
        )  # fmt: skip
        choice = answer.choices[0]
        assert response.output_text == choice.message.content
        assert response.status == ("incomplete" if choice.finish_reason == "length" else "completed")
        assert response.usage.input_tokens == answer.usage.prompt_tokens
        assert response.usage.output_tokens == answer.usage.completion_tokens
        content = response.output[0].content[0]
        assert [each.logprob for each in content.logprobs] == [each.logprob for each in choice.logprobs.content]


def test_a_streamed_response_is_the_whole_one(scripted, generator, monkeypatch):  # noqa: F811
    for text, kinds in (("Hello you", ["message"]), (HERMES + SECOND, ["message", "function_call", "function_call"])):
        ids = generator.tokenizer.encode(text, special_tokens=False)
        monkeypatch.setattr(ScriptedGenerator, "script", [*ids, 2])
        body = {"model": "scripted", "input": "Hi", "tools": [FLAT], "max_output_tokens": 300, "temperature": 0}
        whole = scripted.responses.create(**body)
        with scripted.responses.stream(**body) as stream:
            events = list(stream)
            streamed = stream.get_final_response()
        assert [each.type for each in whole.output] == [each.type for each in streamed.output] == kinds
        assert [each.sequence_number for each in events] == list(range(len(events)))
        assert [events[0].type, events[1].type] == ["response.created", "response.in_progress"]
        assert events[-1].type == "response.completed"
        assert streamed.output_text == whole.output_text
        assert whole.output_text == "".join(e.delta for e in events if e.type == "response.output_text.delta")
        for one, other in zip(whole.output[1:], streamed.output[1:], strict=True):
            assert (one.name, one.arguments) == (other.name, other.arguments)
        deltas = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
        assert "".join(deltas) == "".join(call.arguments for call in whole.output[1:])
        assert (len(deltas) > 10) == (len(kinds) > 1)
        done = [e.item for e in events if e.type == "response.output_item.done"]
        assert [each.id for each in done] == [each.id for each in streamed.output]


def test_calls_and_their_outputs_become_messages(scripted, generator, monkeypatch):  # noqa: F811
    seen = []
    monkeypatch.setattr(ScriptedGenerator, "script", [2])
    template = type(generator.tokenizer).apply_chat_template

    def record(self, messages, **options):
        seen.append([dict(each) for each in messages])
        return template(self, messages, **options)

    monkeypatch.setattr(type(generator.tokenizer), "apply_chat_template", record)
    call = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Bonn"}'}
    items = [*USER, {"type": "reasoning", "summary": []}, call, {**call, "call_id": "c2"}]
    items += [{"type": "function_call_output", "call_id": "c1", "output": "sun"}]
    scripted.responses.create(model="scripted", input=items, tools=[FLAT], instructions="Hi.")
    roles = [each["role"] for each in seen[-1]]
    assert roles == ["system", "user", "assistant", "tool"]
    assert [each["function"]["arguments"] for each in seen[-1][2]["tool_calls"]] == [{"city": "Bonn"}] * 2
    assert (seen[-1][3]["content"], seen[-1][3]["tool_call_id"]) == ("sun", "c1")


def test_responses_follow_schemas_and_call_tools(client):  # noqa: F811
    pytest.importorskip("llguidance")
    form = {"format": {"type": "json_schema", "name": "person", "schema": PERSON, "strict": True}}
    options = {"model": "llama", "input": "A person", "temperature": 2.0, "max_output_tokens": 100}
    assert 0 <= json.loads(client.responses.create(**options, text=form).output_text)["age"] <= 99
    tool = {"type": "function", "name": "person", "parameters": PERSON}
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "person"}]}
    for choice in ({"type": "function", "name": "person"}, allowed):
        answer = client.responses.create(**options, tools=[tool], tool_choice=choice, parallel_tool_calls=False)
        assert [each.type for each in answer.output] == ["function_call"]
        assert 0 <= json.loads(answer.output[0].arguments)["age"] <= 99


def test_what_responses_cannot_do_is_an_error(client):  # noqa: F811
    for options, message in (
        ({"previous_response_id": "resp_1"}, "keeps no responses; send the whole conversation"),
        ({"conversation": "conv_1"}, "keeps no responses"),
        ({"background": True}, "keeps no responses"),
        ({"tools": [{"type": "web_search"}]}, r"tools\[0\] has the type 'web_search'; expected 'function'"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, r"input\[0\] has the type 'item_reference'"),
        ({"input": []}, "input is empty"),
        ({"max_output_tokens": 10**6}, "max_output_tokens is 1000000"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type is"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice has the type 'mcp'"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "content other than text"),
    ):
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match=message) as caught:
                client.responses.create(**{"model": "llama", "input": "Hi", "stream": stream, **options})
            assert caught.value.param in (next(iter(options)), "text.format.type", None)


def test_all_documented_fields_of_responses_are_accepted(client):  # noqa: F811
    values = {
        "input": "Hi", "model": "llama", "instructions": "a", "max_output_tokens": 2, "temperature": 0, "top_p": 0.5,
        "tools": [FLAT], "tool_choice": "auto", "parallel_tool_calls": True, "text": {"format": {"type": "text"}},
        "include": [], "top_logprobs": 0, "background": False,
    }  # fmt: skip
    names = all_fields(response_create_params.ResponseCreateParamsBase) - {"previous_response_id", "conversation"}
    body = {name: values.get(name, {"a": "b"}) for name in names}
    headers = client.responses.with_raw_response.create(**body).headers
    assert set(headers["x-xformer-ignored"].split(", ")) == names - values.keys()


# --- Fields of vLLM and llama.cpp -------------------------------------------------------------------------------------


def create(client, **fields):  # noqa: F811
    options = {"model": "llama", "messages": USER, "max_tokens": 30, "temperature": 0}
    return client.chat.completions.with_raw_response.create(**options | {"extra_body": fields})


def test_minimum_lengths(client):  # noqa: F811
    assert create(client, ignore_eos=True).parse().usage.completion_tokens == 30
    assert create(client, min_tokens=9, logit_bias={"2": 100}).parse().usage.completion_tokens == 9
    assert create(client, top_k=-1).parse().choices == create(client).parse().choices


def test_outputs_follow_what_vllm_calls_guided(client):  # noqa: F811
    pytest.importorskip("llguidance")
    pytest.importorskip("jsonschema")
    for fields, check in (
        ({"guided_json": PERSON}, lambda text: 0 <= json.loads(text)["age"] <= 99),
        ({"structured_outputs": {"json": json.dumps(PERSON)}}, lambda text: 0 <= json.loads(text)["age"] <= 99),
        ({"guided_regex": "[ab]{5}"}, lambda text: set(text) <= {"a", "b"} and len(text) == 5),
        ({"guided_choice": ['say "x"', "no\n"]}, lambda text: text in ('say "x"', "no\n")),
        ({"structured_outputs": {"choice": ["u", "v"]}}, lambda text: text in ("u", "v")),
        ({"guided_grammar": 'start: "x" "y"'}, lambda text: text == "xy"),
    ):
        assert check(create(client, **fields).parse().choices[0].message.content), fields
        answer = client.completions.create(model="llama", prompt="a", max_tokens=30, temperature=0, extra_body=fields)
        assert check(answer.choices[0].text), fields
    for fields, message in (
        ({"guided_regex": "["}, "regex is not valid"),
        ({"guided_json": {"type": "x"}}, "guided_json is not valid"),
        ({"structured_outputs": {"json": {"type": "x"}}}, r"structured_outputs\.json is not valid"),
    ):
        with pytest.raises(openai.BadRequestError, match=message):
            create(client, **fields)


def test_variables_and_the_end_of_a_chat(generator, monkeypatch):  # noqa: F811
    tokenizer = generator.tokenizer
    template = "{% for m in messages %}<|im_start|>{{ m.content }} <|im_end|>{% endfor %}"
    template += "{% if add_generation_prompt %}<|im_start|>A{{ mood }}{% endif %}"
    monkeypatch.setitem(tokenizer.chat_templates, "default", template)
    answered = [*USER, {"role": "assistant", "content": "I am <|im_end|> "}]
    first = f"<|im_start|>{USER[0]['content']} <|im_end|>"
    with contextlib.closing(Client({"chat": generator})) as server:
        for fields, expected in (
            ({}, f"{first}<|im_start|>A"),
            ({"add_generation_prompt": False}, first),
            ({"chat_template_kwargs": {"mood": " sad"}}, f"{first}<|im_start|>A sad"),
            ({"messages": answered, "continue_final_message": True}, f"{first}<|im_start|>I am <|im_end|>"),
        ):
            body = {"messages": USER, "max_tokens": 1, "return_token_ids": True, **fields}
            ids = server.post("/v1/chat/completions", **body)["prompt_token_ids"]
            assert tokenizer.decode(ids, skip_special_tokens=False) == expected
            assert ids.count(2) == 1  # a token that is spelled out in a message stays text
            fields = {key: value for key, value in body.items() if key not in ("max_tokens", "return_token_ids")}
            assert server.post("/tokenize", **fields)["tokens"] == ids
        for wrong in ({"chat_template_kwargs": {"tools": []}}, {"messages": [{"role": "user", "content": " "}]}):
            server.post("/v1/chat/completions", 400, **{"messages": USER, **wrong, "continue_final_message": True})


def test_token_ids_and_log_probabilities_of_prompts(client, generator):  # noqa: F811
    rows = [generator.token_ids([text])[0] for text in ("the thin", "a thing")]
    fields = {"return_token_ids": True, "prompt_logprobs": 1}
    options = {"model": "llama", "prompt": rows, "max_tokens": 3, "temperature": 0, "n": 2, "extra_body": fields}
    whole = body_of(client.completions.with_raw_response.create(**options))["choices"]
    ends = [c for chunk in client.completions.create(**options, stream=True) for c in chunk.choices if c.finish_reason]
    for number, choice in enumerate(whole):
        row = rows[number // 2]
        assert choice["prompt_token_ids"] == row
        assert generator.tokenizer.decode(choice["token_ids"]) == choice["text"]
        (end,) = (each for each in ends if each.index == number)
        assert (end.token_ids, end.prompt_logprobs) == (choice["token_ids"], choice["prompt_logprobs"])
        logits = np.asarray(generator.model([row])[0], np.float64)
        expected = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        assert choice["prompt_logprobs"][0] is None
        for position, found in enumerate(choice["prompt_logprobs"][1:]):
            token = row[position + 1]
            assert found[str(token)]["logprob"] == pytest.approx(expected[position, token], abs=1e-4)
            (best,) = (key for key, each in found.items() if each["rank"] == 1)
            assert int(best) == int(expected[position].argmax())
    chat = body_of(create(client, prompt_logprobs=0))
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]


def test_fields_without_effect_are_listed(client):  # noqa: F811
    header = create(client, skip_special_tokens=True, cache_prompt=True).headers.get("x-xformer-ignored")
    assert header is None
    fields = {"skip_special_tokens": False, "cache_prompt": False, "priority": 1}
    assert create(client, **fields).headers["x-xformer-ignored"] == "cache_prompt, priority, skip_special_tokens"


# --- Tokens, scores, metrics and pages of other sites -----------------------------------------------------------------


@pytest.fixture(scope="module")
def encoders(chat_model):  # noqa: F811
    return make_encoders(chat_model[1])


@pytest.fixture(scope="module")
def server(encoders):
    models = {"text": make_generator(), **encoders}
    models = {name: each for name, each in models.items() if name != "classifier"}
    server = Client(models, cors_origins=("https://a.org", "http://b.org:80"), token="12345678")
    send = server.send
    secret = {"Authorization": "Bearer 12345678"}
    server.send = lambda method, path, body=None, headers=None: send(method, path, body, headers or secret)
    yield server
    server.close()


def test_tokens(client, generator):  # noqa: F811
    def post(path, **body):
        return client.post(f"/../{path}", body=body, cast_to=typing.cast("typing.Any", object))

    answer = post("tokenize", prompt="the thin", return_token_strs=True)
    ids = generator.tokenizer.encode("the thin")
    assert (answer["tokens"], answer["count"]) == (ids, len(ids))
    assert answer["token_strs"] == generator.tokenizer.tokens(ids)
    assert answer["max_model_len"] == generator.context_length
    (chat,) = generator.token_ids([USER])
    assert post("tokenize", messages=USER)["tokens"] == chat
    assert post("detokenize", tokens=chat)["prompt"] == generator.tokenizer.decode(chat, skip_special_tokens=False)
    for path, body in (("tokenize", {}), ("detokenize", {"tokens": [10**6]}), ("detokenize", {"tokens": [-1]})):
        with pytest.raises(openai.BadRequestError, match="expected"):
            post(path, **body)


def test_metrics_count():
    metrics = Metrics()
    for seconds in (0.02, 0.3, 500.0):
        metrics.observe("a_seconds", seconds, path="/x")
    metrics.add("b_total", 2, model='m"\n')
    metrics.add("b_total", model='m"\n')
    lines = metrics.text([("c", "m", 3)]).splitlines()
    assert "# TYPE a_seconds histogram" in lines
    for bound, count in (("0.01", 0), ("0.025", 1), ("0.5", 2), ("120.0", 2), ("+Inf", 3)):
        assert f'a_seconds_bucket{{path="/x",le="{bound}"}} {count}' in lines
    assert 'a_seconds_count{path="/x"} 3' in lines
    assert 'b_total{model="m\\"\\n"} 3' in lines
    assert 'c{model="m"} 3' in lines


def values_of(text):
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if line[0] != "#"}


def test_a_server_measures_its_requests(generator):  # noqa: F811
    with contextlib.closing(Client({"chat": generator})) as server:
        chat = [{"role": "user", "content": "How are you? " * 20}]
        body = {"messages": chat, "max_tokens": 5, "temperature": 0, "ignore_eos": True}
        for stream in (False, True):
            server.send("POST", "/v1/chat/completions", {**body, "stream": stream})
        server.post("/v1/chat/completions", 400, messages=[])
        server.idle()
        status, headers, text = server.send("GET", "/metrics")
        assert server.get("/version") == {"version": xformer.__version__}
        assert (status, headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
        values = values_of(text)
    path = 'path="/v1/chat/completions"'
    assert values[f'xformer_requests_total{{{path},status="200"}}'] == 2
    assert values[f'xformer_requests_total{{{path},status="400"}}'] == 1
    assert values[f"xformer_request_seconds_count{{{path}}}"] == 3
    assert values['xformer_generation_tokens_total{model="chat"}'] == 10
    assert values['xformer_first_token_seconds_count{model="chat"}'] == 1
    assert values['xformer_prompt_tokens_cached_total{model="chat"}'] >= 64
    assert values['xformer_requests_running{model="chat"}'] == values['xformer_requests_waiting{model="chat"}'] == 0


def test_pages_of_allowed_sites_may_use_the_server(server):
    def ask(method, origin, **headers):
        connection = http.client.HTTPConnection("127.0.0.1", server.port)
        connection.request(method, "/v1/models", headers={"Origin": origin, **headers})
        response = connection.getresponse()
        response.read()
        connection.close()
        return response.status, dict(response.getheaders())

    secret = {"Authorization": "Bearer 12345678"}
    preflight = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    for origin, allowed in (("https://a.org", True), ("http://b.org:80", True), ("https://c.org", False)):
        status, headers = ask("GET", origin, **secret)
        assert status == (200 if allowed else 403)
        assert headers.get("access-control-allow-origin") == (origin if allowed else None)
        status, headers = ask("OPTIONS", origin, **preflight)
        assert status == (200 if allowed else 400)
        assert headers.get("access-control-allow-origin") == (origin if allowed else None)
    assert ask("GET", "https://a.org")[0] == 401
    for origin in ("*", "a.org", "https://a.org/x", "https://*.org"):
        with pytest.raises(ConfigError, match=r"expected origins such as https://example\.org"):
            ServeConfig(cors_origins=(origin,))


def test_scores(server, encoders):
    texts = ["a b", "the cat"]
    for model, expected in (("reranker", None), ("embedder", None)):
        body = {"model": model, "text_1": "a", "text_2": texts}
        answer = json.loads(server.send("POST", "/v1/score", body)[2])
        if model == "reranker":
            logits = encoders[model].scores([("a", text) for text in texts])
            is_logit = encoders[model].activation != "sigmoid"
            expected = [1 / (1 + math.exp(-each)) if is_logit else each for each in logits]
        else:
            vectors = encoders[model](["a", *texts])
            expected = vectors[1:] @ vectors[0]
        assert [each["index"] for each in answer["data"]] == [0, 1]
        np.testing.assert_allclose([each["score"] for each in answer["data"]], expected, atol=1e-5)
    status, _, text = server.send("POST", "/score", {"text_1": ["a"] * 2, "text_2": ["a"] * 3})
    assert (status, "expected as many, or one" in text) == (400, True)


def test_vectors_of_token_ids(server, encoders):
    texts = ["a b", "the cat"]
    rows = encoders["embedder"].token_ids(texts)

    def vectors(given):
        answer = json.loads(server.send("POST", "/v1/embeddings", {"model": "embedder", "input": given})[2])
        return [each["embedding"] for each in answer["data"]], answer["usage"]["prompt_tokens"]

    expected = vectors(texts)
    assert vectors(rows) == expected
    assert vectors([texts[0], rows[1]]) == expected
    np.testing.assert_allclose(vectors(rows[0])[0], expected[0][:1], atol=1e-6)
    for wrong in ([[]], ["a", 3], [10**6], [[-1]], []):
        assert server.send("POST", "/v1/embeddings", {"model": "embedder", "input": wrong})[0] == 400
