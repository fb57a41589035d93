"""Programs that others publish, with a server that runs a tiny random chat model; `nox -s clients` installs them."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys

import pytest

openai = pytest.importorskip("openai")
pytest.importorskip("uvicorn")
pytest.importorskip("llguidance")
pydantic = pytest.importorskip("pydantic")
from tests.serve.test_openai import client, directory  # noqa: E402, F401 - fixtures

pytestmark = [
    pytest.mark.filterwarnings("default"),  # those of the clients are theirs
    pytest.mark.usefixtures("client"),
]


class Person(pydantic.BaseModel):
    """A person."""

    age: int = pydantic.Field(ge=0, le=99)
    gender: str = pydantic.Field(pattern="^[a-z]{1,5}$")


def weather(city: str) -> str:
    """Return the weather of a city."""
    return f"sun in {city}"


SAMPLED = {"temperature": 1.5, "max_tokens": 300}
ASK = [{"role": "user", "content": "A person"}]


@pytest.fixture
def url(client, monkeypatch):  # noqa: F811
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    return str(client.base_url).rstrip("/")


def test_openai_reads_models_of_pydantic(client):  # noqa: F811
    answer = client.chat.completions.parse(model="llama", messages=ASK, response_format=Person, **SAMPLED)
    assert isinstance(answer.choices[0].message.parsed, Person)
    answer = client.responses.parse(model="llama", input="A person", text_format=Person, max_output_tokens=300)
    assert isinstance(answer.output_parsed, Person)


@pytest.mark.parametrize("responses", [False, True])
def test_langchain(url, responses):
    langchain = pytest.importorskip("langchain_openai")
    model = langchain.ChatOpenAI(model="llama", base_url=url, use_responses_api=responses, temperature=1.5, seed=1)
    if responses:
        model = langchain.ChatOpenAI(model="llama", base_url=url, use_responses_api=True, temperature=1.5)
    model = model.bind(max_tokens=60)
    whole = model.invoke("Hi")
    assert whole.usage_metadata["output_tokens"] > 0
    assert "".join(part.text for part in model.stream("Hi"))
    plain = langchain.ChatOpenAI(
        model="llama", base_url=url, use_responses_api=responses, temperature=1.5, max_tokens=300
    )
    for method in ("json_schema", "function_calling"):
        assert isinstance(plain.with_structured_output(Person, method=method).invoke("A person"), Person)
    bound = plain.bind_tools([Person], tool_choice="Person")
    (call,) = bound.invoke("A person").tool_calls
    parts = None
    for part in bound.stream("A person"):
        parts = part if parts is None else parts + part
    assert call["name"] == parts.tool_calls[0]["name"] == "Person"
    Person(**parts.tool_calls[0]["args"])
    vectors = langchain.OpenAIEmbeddings(model="bert", base_url=url, check_embedding_ctx_length=False)
    assert len(vectors.embed_documents(["a", "b"])) == 2


def test_instructor(client):  # noqa: F811
    instructor = pytest.importorskip("instructor")
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS_STRICT):
        patched = instructor.from_openai(client, mode=mode)
        person = patched.chat.completions.create(
            model="llama", messages=ASK, response_model=Person, max_retries=1, **SAMPLED
        )
        assert isinstance(person, Person)
    parts = list(
        instructor.from_openai(client).chat.completions.create_partial(
            model="llama", messages=ASK, response_model=Person, **SAMPLED
        )
    )
    assert len(parts) > 2
    Person(**parts[-1].model_dump())


@pytest.mark.parametrize("name", ["OpenAIChatModel", "OpenAIResponsesModel"])
def test_pydantic_ai(url, name):
    pydantic_ai = pytest.importorskip("pydantic_ai")
    models = pytest.importorskip("pydantic_ai.models.openai")
    provider = pytest.importorskip("pydantic_ai.providers.openai").OpenAIProvider(base_url=url, api_key="none")
    model = getattr(models, name)("llama", provider=provider)
    settings = {"temperature": 1.5, "max_tokens": 300}
    for output in (Person, pydantic_ai.NativeOutput(Person)):
        agent = pydantic_ai.Agent(model, output_type=output, model_settings=settings, retries=3)
        assert isinstance(agent.run_sync("A person").output, Person)

    async def streamed():
        agent = pydantic_ai.Agent(model, model_settings=settings)
        async with agent.run_stream("Hi") as run:
            return [text async for text in run.stream_text(delta=True)]

    assert "".join(asyncio.run(streamed()))


def test_litellm(url, monkeypatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # without the network
    litellm = pytest.importorskip("litellm")
    options = {"model": "openai/llama", "base_url": url, "api_key": "none", "messages": ASK, **SAMPLED}
    assert json.loads(litellm.completion(**options, response_format=Person).choices[0].message.content)["age"] < 100
    assert "".join(part.choices[0].delta.content or "" for part in litellm.completion(**options, stream=True))
    vllm = options | {"model": "hosted_vllm/llama"}
    choice = {"extra_body": {"guided_choice": ["yes", "no"]}}
    assert litellm.completion(**vllm, **choice).choices[0].message.content in ("yes", "no")
    vectors = litellm.embedding(model="openai/bert", input=["a"], api_base=url, api_key="none", encoding_format="float")
    assert len(vectors.data) == 1
    answer = litellm.responses(model="openai/llama", input="Hi", api_base=url, api_key="none", max_output_tokens=20)
    assert answer.usage.output_tokens <= 20


def test_llm(url, tmp_path, monkeypatch):
    pytest.importorskip("llm")
    models = [{"model_id": "tiny", "model_name": "llama", "api_base": url, "supports_schema": True}]
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps(models))
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    command = [sys.executable, "-m", "llm", "-m", "tiny", "-o", "max_tokens", "300", "-o", "temperature", "1.5"]
    for options in ([], ["--no-stream"]):
        subprocess.run([*command, *options, "Hi"], check=True, capture_output=True, timeout=120)
        answer = subprocess.run(
            [*command, *options, "--schema", json.dumps(Person.model_json_schema()), "A person"],
            check=True, capture_output=True, timeout=120,
        )  # fmt: skip
        Person(**json.loads(answer.stdout))


def test_guidellm(url, directory, tmp_path):  # noqa: F811
    pytest.importorskip("guidellm")
    pytest.importorskip("transformers")
    command = [
        sys.executable,
        "-m",
        "guidellm",
        "run",
        "--profile",
        "kind=synchronous",
        "--disable-console-interactive",
    ]
    command += ["--backend", f"kind=openai_http,target={url.removesuffix('/v1')},model=llama"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={directory}", "--constraint", "kind=max_requests,count=4"]
    command += ["--data", "kind=synthetic_text,prompt_tokens=40,output_tokens=12"]
    command += ["--output", f"kind=json,path={tmp_path / 'report.json'}"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    benchmark = json.loads((tmp_path / "report.json").read_text())["benchmarks"][0]
    done = benchmark["requests"]["successful"]
    assert len(done) == 4
    assert {each["output_metrics"]["text_tokens"] for each in done} == {12}
