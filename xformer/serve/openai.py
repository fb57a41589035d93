"""OpenAI-compatible routes: completions, chats, embeddings and models; and the tokenizer, as vLLM has it."""

from __future__ import annotations

import base64
import itertools
import json
import secrets
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from xformer.errors import ConfigError, DataError
from xformer.generation import Grammar, LogitsProcessor, token_bytes
from xformer.generation.engine import Task
from xformer.generation.grammar import check_json_schema
from xformer.generation.json_schema import closed_schema
from xformer.models.token_ids import check_tokens
from xformer.pipelines import Embedder, Output, Pipeline, TextGenerator, chat
from xformer.pipelines.output_text import Token, overlap
from xformer.serve import schema
from xformer.serve.jobs import Event, Job, JobError
from xformer.serve.models import ServedModel, Server
from xformer.serve.native import MAX_COMPUTED_BYTES, finite, texts_of
from xformer.serve.routes import Chunks, event_bytes, route, stream


@route("GET", "/v1/models")
async def list_models(server: Server) -> schema.Models:
    """List the models."""
    return schema.Models([model.describe() for model in server.models.values()])


@route("GET", "/v1/models/{model}")
async def show_model(server: Server, model: str) -> schema.Model:
    """Return a model."""
    if model not in server.models:
        raise JobError(f"model {model[:80]!r} does not exist", 404, "model_not_found", "model")
    return server.models[model].describe()


@route("POST", "/v1/embeddings")
async def embeddings(server: Server, request: schema.EmbeddingsRequest) -> schema.Embeddings:
    """Compute vectors of texts with an encoder."""
    model = server.model(request.model, Embedder, task="compute vectors")
    given: Any = request.input
    is_ids = isinstance(given, list) and given != [] and all(isinstance(each, int) for each in given)
    texts: list[Any] = texts_of("input", [given] if is_ids else given, schema.MAX_INPUTS)
    if any(each == [] or isinstance(each, int) for each in texts):
        raise JobError("input is of several kinds or empty; expected texts, or token ids", param="input")
    size = model.pipeline.num_features
    if request.dimensions is not None and request.dimensions > size:
        message = f"dimensions is {request.dimensions}; expected at most {size}, the size of the vectors of this model"
        raise JobError(message, param="dimensions")
    num_tokens = sum(map(len, await server.in_thread(model.pipeline.encoded, texts)))

    def compute(texts: list[Any]) -> list[Any]:
        return [np.asarray(vector, "<f4") for vector in model.pipeline(texts)]

    vectors = await model.worker.join(compute, texts)
    if request.dimensions is not None:  # texts of several requests are computed together
        vectors = [*model.pipeline.truncate(np.stack(vectors), request.dimensions)]
    is_base64 = request.encoding_format == "base64"
    shown = [base64.b64encode(each.tobytes()).decode() if is_base64 else each.tolist() for each in vectors]
    data = [schema.Embedding(index, each) for index, each in enumerate(shown)]
    return schema.Embeddings(model.name, data, schema.usage(num_tokens, 0))


@route("POST", "/v1/completions", 'OpenAI-compatible chunks ("object": "text_completion"), then [DONE].')
async def completions(server: Server, request: schema.CompletionRequest) -> schema.Completion | Chunks:
    """Continue prompts with a language model."""
    model = server.model(request.model, TextGenerator, task="continue prompts")
    prompt: Any = request.prompt
    prompts = [prompt] if isinstance(prompt, str) or all(isinstance(each, int) for each in prompt) else prompt
    if not all(isinstance(each, str) or (each and isinstance(each, list)) for each in prompts):
        message = "prompt is empty or of another kind; expected a text, a list of texts, token ids, or a list of them"
        raise JobError(message, param="prompt")
    model.check_limit("max_tokens", request.max_tokens)
    settings = {"max_new_tokens": max(1, request.max_tokens), **request.settings()}
    return await _Completion(model, request, prompts, settings, request.logprobs).respond(server)


@route("POST", "/v1/chat/completions", 'OpenAI-compatible chunks ("object": "chat.completion.chunk"), then [DONE].')
async def answer_chat(server: Server, request: schema.ChatRequest, answer: Any = None) -> schema.Chat | Chunks:
    """Answer a chat with a language model.

    The answer, or its stream, is written by `answer`: a subclass of `_ChatAnswer`, or the class.
    """
    model, settings = server.model(request.model, TextGenerator, task="answer chats"), request.settings()
    if not model.pipeline.has_chat:
        raise DataError(f"model {model.name!r} has no chat template; expected /v1/completions")
    if not request.messages:
        raise JobError("messages is empty; expected at least one message", param="messages")
    for name in ("max_tokens", "max_completion_tokens"):
        if (limit := getattr(request, name)) is not None:
            model.check_limit(name, limit)
            settings["max_new_tokens"] = limit
    messages = [plain_message(message) for message in request.messages]
    logprobs = request.top_logprobs if request.logprobs else None
    made: _ChatAnswer = (answer or _ChatAnswer)(model, request, [messages], settings, logprobs)
    found: schema.Chat | Chunks = await made.respond(server)
    return found


@route("POST", "/tokenize")
async def tokenize(server: Server, request: schema.TokenizeRequest) -> schema.Json:
    """Split a text or a chat into tokens."""
    model = server.model(request.model, Pipeline, task="split texts")
    tokenizer = model.pipeline.source_tokenizer
    if (request.prompt is None) == (request.messages is None):
        raise DataError("expected one of prompt and messages")
    if request.messages is None:
        text, special = request.prompt, request.add_special_tokens
        ids = await server.in_thread(lambda: tokenizer.encode(text, special_tokens=special))
    else:
        messages = [plain_message(each) for each in request.messages]
        ids = await server.in_thread(chat_ids, tokenizer, messages, request.tools, request)
    names = tokenizer.tokens(ids) if request.return_token_strs else None
    length = getattr(model.pipeline, "context_length", getattr(model.pipeline.model.config, "max_positions", None))
    return {"count": len(ids), "max_model_len": length, "tokens": list(map(int, ids)), "token_strs": names}


@route("POST", "/detokenize")
async def detokenize(server: Server, request: schema.DetokenizeRequest) -> schema.Json:
    """Join token ids to a text."""
    tokenizer = server.model(request.model, Pipeline, task="split texts").pipeline.source_tokenizer
    check_tokens("tokens", request.tokens, tokenizer.vocab_size)
    return {"prompt": await server.in_thread(lambda: tokenizer.decode(request.tokens, skip_special_tokens=False))}


def plain_message(message: schema.Json) -> schema.Json:
    """Return a message as chat templates expect it: with a text, and with arguments of calls as objects.

    Raises:
        DataError: For other content than text.
    """
    role, content = message.get("role"), message.get("content", None if message.get("tool_calls") else 0)
    if isinstance(content, list):
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            raise DataError("messages has content other than text; expected text only")
        content = "".join(part["text"] for part in content)
    if not isinstance(role, str) or not isinstance(content, str | None):
        raise DataError("messages has an entry without role or content; expected both, as strings")
    plain = {**message, "role": "system" if role == "developer" else role, "content": content or ""}
    if calls := message.get("tool_calls"):
        try:
            functions = [{**call["function"], "arguments": json.loads(call["function"]["arguments"])} for call in calls]
        except (KeyError, TypeError, ValueError) as error:
            raise DataError("messages has an invalid entry in tool_calls; expected name and arguments") from error
        plain["tool_calls"] = [{**call, "function": function} for call, function in zip(calls, functions, strict=True)]
    return plain


def chat_ids(tokenizer: Any, messages: Sequence[schema.Json], tools: Any, request: Any) -> list[int]:
    """Return the token ids of a chat, with the options of a request."""
    options = {name: getattr(request, name) for name in ("add_generation_prompt", "continue_final_message")}
    return chat.encode_chat(tokenizer, messages, tools or None, variables=request.chat_template_kwargs, **options)


class _Answer:
    """The answer of a request for completions or chats, or its stream.

    Args:
        model: The model.
        request: The request.
        prompts: Prompts, or chats.
        settings: Fields of `GenerationConfig`.
        logprobs: Alternatives of each token; None: no log-probabilities.
    """

    answer: Any  # method (outputs) of a subclass that returns the answer
    chunk: Any  # method (number, text, tokens, output) that returns a part of a choice; the last one has its output
    end = b"data: [DONE]\n\n"  # of a stream
    chunk_of: Any  # method (choices, usage) that returns a part of the stream

    def __init__(
        self, model: ServedModel, request: Any, prompts: Sequence[Any], settings: schema.Json, logprobs: int | None
    ) -> None:
        self.model, self.request, self.prompts, self.logprobs = model, request, prompts, logprobs
        if not 1 <= len(prompts) * request.n <= schema.MAX_TEXTS:
            received = f"prompt has {len(prompts)} texts and n is {request.n}"
            raise DataError(f"{received}; expected 1 to {schema.MAX_TEXTS} outputs")
        if request.ignore_eos:
            settings["min_new_tokens"] = settings.get("max_new_tokens") or model.pipeline.default_max_length
        self.config = model.resolve(settings)
        if self.config.num_return_sequences > 1:
            raise JobError("num_return_sequences is above 1; use n", param="num_return_sequences")
        self.copies = request.n
        if self.config.method == "beam":  # the best hypotheses of one search
            self.config, self.copies = model.resolve({**settings, "num_return_sequences": request.n}), 1
        prefix = "chatcmpl" if isinstance(request, schema.ChatRequest) else "cmpl"
        self.processors: list[LogitsProcessor] = []
        self.head: schema.Json = {"id": f"{prefix}-{secrets.token_hex(12)}", "created": int(time.time())}
        self.head["model"] = model.name
        self.num_prompt_tokens = 0
        self.sent: dict[int, int] = {}  # characters of each choice in a stream
        self.has_begun = False

    async def respond(self, server: Server) -> Any:
        """Run the request and return the answer, or its stream."""
        request, options = self.request, dict[str, Any](logits_processors=self.processors)
        if request.stream and self.config.method != "beam":
            options["on_text"] = lambda job, *part: job.emit("text", part)
        options |= {"stop": request.stop, "logprobs": self.logprobs}
        job = await server.make_job(self.model, request, self.config, self._encode, self._run, **options)
        self.model.worker.submit(job)
        if request.stream:
            return await stream(job.events(), self._write, self.end)
        return self.answer(await job.result())

    def _encode(self) -> list[list[int]]:
        if (found := self.request.structure()) is not None:
            field, kind, value = found
            if kind == "json":
                form = {"json_schema": _checked(field, value)}
            elif kind == "choice":
                form = {"lark": f"start: {' | '.join(json.dumps(each, ensure_ascii=False) for each in value)}"}
            else:
                form = {"regex" if kind == "regex" else "lark": value}
            self._add_grammar(**form)
        return [ids for ids in self._prompt_ids() for _ in range(self.copies)]

    def _prompt_ids(self) -> list[list[int]]:
        return self.model.token_ids(self.prompts)

    def _add_grammar(self, **form: Any) -> None:
        ends = {self.model.pipeline.model.config.eos_id, *self.config.stop_token_ids} - {None}
        self.processors.append(Grammar(token_bytes(self.model.pipeline.target_tokenizer), sorted(ends), **form))

    def _run(self, job: Job, ids: list[list[int]], task: Task[list[list[Output]]]) -> Task[list[Output]]:
        prompts, request = ids[:: self.copies], self.request
        self.num_prompt_tokens = sum(map(len, prompts))
        self.shown: list[Any] = [{"prompt_token_ids": each} if request.return_token_ids else {} for each in prompts]
        if request.prompt_logprobs is not None:
            read = yield from self._read(prompts, request.prompt_logprobs)
            for shown, tokens in zip(self.shown, read, strict=True):
                shown["prompt_logprobs"] = [*map(_prompt_logprob, tokens)]
        return [output for outputs in (yield from task) for output in outputs]

    def _read(self, prompts: list[list[int]], count: int) -> Task[list[list[Token]]]:
        """Return a task whose result has the tokens of prompts with log-probabilities."""
        size = 4 * self.model.pipeline.model.vocab_size * max(map(len, prompts))
        if size > MAX_COMPUTED_BYTES:
            raise DataError(f"the log-probabilities of the prompt take {size / 1e6:.0f} MB; expected a shorter one")
        return (yield from self.model.pipeline.prompt_logprobs(prompts, count))

    def ending(self, output: Output | None, calls: Sequence[Any] = ()) -> dict[str, Any]:
        """Return the fields of the end of a choice, if there is one."""
        if output is None:
            return {}
        reason = "tool_calls" if calls else output.finish_reason
        ids = {"token_ids": output.tokens} if self.request.return_token_ids else {}
        return {"finish_reason": reason, "logits_sha256": output.logits_sha256 or msgspec.UNSET, **ids}

    def _write(self, event: Event) -> list[bytes]:
        chunks = [] if self.has_begun else self.first_chunks()
        self.has_begun = True
        if event.name == "text":
            chunks.append(self.chunk(*event.data))
            return [each for chunk in chunks if chunk is not None for each in self.events(chunk)]
        for number, output in enumerate(event.data):
            text, tokens = (output.text, output.logprobs) if self.config.method == "beam" else ("", None)
            chunks.append(self.chunk(number, text, tokens or [], output))
        if self.request.stream_options.include_usage:
            chunks.append(self.chunk_of([], self.usage(event.data)))
        return [each for chunk in chunks for each in self.events(chunk)]

    def events(self, chunk: Any) -> list[bytes]:
        """Return the server-sent events of a part of the stream."""
        return [event_bytes("", chunk)]

    def usage(self, outputs: Sequence[Output]) -> schema.Usage:
        """Return the numbers of tokens."""
        return schema.usage(self.num_prompt_tokens, sum(len(output.tokens) for output in outputs))

    def first_chunks(self) -> list[Any]:
        """Return what comes before all texts."""
        return []


class _Completion(_Answer):
    """The answer of a request for completions."""

    echoes: list[tuple[str, list[Token]]] | None = None  # text and tokens of each prompt

    def _run(self, job: Job, ids: list[list[int]], task: Task[list[list[Output]]]) -> Task[list[Output]]:
        prompts, request = ids[:: self.copies], self.request
        if request.echo and self.logprobs is not None:
            read = yield from self._read(prompts, self.logprobs)
            self.echoes = [("".join(token.text for token in tokens), tokens) for tokens in read]
        elif request.echo:
            pairs = zip(self.prompts, prompts, strict=True)
            decode = self.model.pipeline.target_tokenizer.decode
            self.echoes = [(text if isinstance(text, str) else decode(row), []) for text, row in pairs]
        if request.max_tokens == 0:
            empty = [Output("", [], 0.0, 0.0, False, logprobs=[]) for _ in range(request.n)]
            task = _ended([empty for _ in prompts])
        return (yield from super()._run(job, ids, task))

    def answer(self, outputs: list[Output]) -> schema.Completion:
        choices = [self._choice(i, each.text, each.logprobs or [], each) for i, each in enumerate(outputs)]
        return self.chunk_of(choices, self.usage(outputs))

    def chunk(self, number: int, text: str, tokens: Sequence[Token], output: Output | None = None) -> Any:
        return self.chunk_of([self._choice(number, text, tokens, output)])

    def chunk_of(self, choices: Any, usage: schema.Usage | None = None) -> schema.Completion:
        return schema.Completion(**self.head, object="text_completion", choices=choices, usage=usage)

    def _choice(self, number: int, text: str, tokens: Sequence[Token], output: Output | None) -> Any:
        if self.echoes is not None and number not in self.sent:
            echo, prompt = self.echoes[number // self.request.n]
            text, tokens = echo + text, [*prompt, *tokens]
        start = self.sent.get(number, 0)
        self.sent[number] = start + len(text)
        logprobs = None
        if self.logprobs is not None:
            values = [None if token.log_probability is None else finite(token.log_probability) for token in tokens]
            offsets = [*itertools.accumulate((len(token.text) for token in tokens), initial=start)][:-1]
            names, others = [*map(_name, tokens)], [*map(top_logprobs, tokens)]
            logprobs = schema.CompletionLogprobs(names, values, others, offsets)
        shown = {} if output is None else self.shown[number // self.request.n]
        return schema.CompletionChoice(number, text, logprobs, **self.ending(output), **shown)


def _ended(result: Any) -> Task[Any]:
    """Return a task without searches."""
    yield from ()
    return result


def _prompt_logprob(token: Token) -> dict[str, Any] | None:
    """Return the log-probabilities in the place of a token, as vLLM writes them; ranks are those of alternatives."""
    if token.log_probability is None:
        return None
    ranks = {each.id: rank for rank, each in enumerate(token.alternatives, start=1)}
    return {
        str(each.id): {"logprob": finite(each.log_probability), "rank": ranks.get(each.id), "decoded_token": each.text}
        for each in (token, *token.alternatives)
    }


def _name(token: Token) -> str:
    """Return the name of a token: its text, or its bytes if they are a part of a character, as OpenAI writes them."""
    try:
        return token.bytes.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.bytes)


def top_logprobs(token: Token) -> dict[str, float] | None:
    """Return the log-probabilities of a token and of its alternatives by different names."""
    if token.log_probability is None:
        return None
    found = {_name(token): finite(token.log_probability)}
    for each in token.alternatives:
        if each.id != token.id:
            # Special tokens have no text, unused ones no entry in the vocabulary, and some texts have several tokens.
            names = [name for name in (_name(each), each.piece) if name and name not in found]
            found[names[0] if names else f"token_id:{each.id}"] = finite(each.log_probability)
    return found


class _ChatAnswer(_Answer):
    """The answer of a request for chats."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.tools, self.must_call, self.is_single = _chosen_tools(self.request)
        self.texts: dict[int, str] = {}  # of each choice of a stream
        self.calls: dict[int, list[schema.ToolCall]] = {}

    def _prompt_ids(self) -> list[list[int]]:
        request, tokenizer = self.request, self.model.pipeline.target_tokenizer
        form = request.response_format
        if self.must_call:
            functions = {}
            for tool in self.tools:
                field = f"tools[{request.tools.index(tool)}].function.parameters"
                functions[tool.function.name] = _checked(field, tool.function.parameters, tool.function.strict)
            self._add_grammar(lark=chat.tool_call_grammar(tokenizer, functions, is_single=self.is_single))
        elif form is not None and form.type != "text":
            described: Any = {"schema": {"type": "object"}} if form.type == "json_object" else form.json_schema or {}
            field, is_strict = "response_format.json_schema.schema", described.get("strict")
            if (json_schema := _checked(field, described.get("schema"), is_strict)) is None:
                message = "response_format has no json_schema.schema; expected a JSON schema"
                raise JobError(message, param="response_format")
            self._add_grammar(json_schema=json_schema)
        return [chat_ids(tokenizer, self.prompts[0], msgspec.to_builtins(self.tools), request)]

    def answer(self, outputs: list[Output]) -> schema.Chat:
        choices = []
        for number, output in enumerate(outputs):
            text, calls, ending = self._parse(output.text, output)
            message = schema.Message("assistant", text or (None if calls else ""), [_call(each) for each in calls])
            logprobs = None if self.logprobs is None else _chat_logprobs(output.logprobs or [])
            choices.append(schema.ChatChoice(number, message, logprobs=logprobs, **ending))
        head = {**self.head, **self.shown[0]}
        return schema.Chat(**head, object="chat.completion", choices=choices, usage=self.usage(outputs))

    def chunk(self, number: int, text: str, tokens: Sequence[Token], output: Output | None = None) -> Any:
        start, whole = self.sent.get(number, 0), self.texts.get(number, "") + text
        self.texts[number] = whole
        rest, calls, ending = self._parse(whole, output)
        self.sent[number] = max(start, len(rest))
        delta = schema.Message(content=rest[start:] or msgspec.UNSET, tool_calls=self._new_parts(number, calls))
        logprobs = _chat_logprobs(tokens) if self.logprobs is not None and tokens else None
        if output is None and logprobs is None and delta == schema.Message():
            return None
        return self.chunk_of([schema.ChatChoice(number, delta=delta, logprobs=logprobs, **ending)])

    def _new_parts(self, number: int, calls: Sequence[chat.ToolCall]) -> list[schema.ToolCall]:
        """Return what the stream of a choice does not have of its calls."""
        sent, parts = self.calls.setdefault(number, []), []
        for index, call in enumerate(calls):
            if index == len(sent):
                sent.append(_call(call))
                parts.append(msgspec.structs.replace(sent[index], index=index))
            elif more := call.arguments[len(sent[index].function.arguments) :]:
                sent[index].function.arguments += more
                parts.append(schema.ToolCall(schema.FunctionCall(more), index=index))
        return parts

    def chunk_of(self, choices: Any, usage: schema.Usage | None = None) -> schema.Chat:
        return schema.Chat(**self.head, object="chat.completion.chunk", choices=choices, usage=usage)

    def first_chunks(self) -> list[Any]:
        delta = schema.Message("assistant", "")
        return [self.chunk_of([schema.ChatChoice(number, delta=delta)]) for number in range(self.request.n)]

    def _parse(self, text: str, output: Output | None) -> tuple[str, Sequence[chat.ToolCall], dict[str, Any]]:
        """Return the text without calls of functions, the calls, and the fields of the end; no output: a beginning."""
        if not self.tools:
            return text, [], self.ending(output)
        rest, calls = (text, []) if output is None else chat.parse_tool_calls(text)
        is_cut = output is None or (output.finish_reason == "length" and not calls)
        if not calls:  # those that the maximum length cuts, too
            names = [tool.function.name for tool in self.tools]
            calls = [*itertools.takewhile(lambda call: call.name in names, chat.started_calls(text))]
            rest = text[: _end_of_text(text)] if calls or output is None else text
        calls = calls[:1] if self.is_single else calls
        return rest, calls, self.ending(output, () if is_cut else calls)


def _call(call: chat.ToolCall) -> schema.ToolCall:
    return schema.ToolCall(schema.FunctionCall(call.arguments, call.name), f"call_{secrets.token_hex(12)}", "function")


def _checked(field: str, json_schema: Any, is_strict: bool | None = None) -> Any:
    """Return a JSON schema of the request, None for none, with limits in strict mode.

    Raises:
        JobError: With the field of the request, unless `Grammar` takes the schema.
    """
    try:
        if json_schema is not None:
            check_json_schema(field, json_schema)
    except ConfigError as error:
        raise JobError(str(error), param=field) from error
    return closed_schema(json_schema, strict=bool(is_strict))


def _chosen_tools(request: schema.ChatRequest) -> tuple[list[schema.Tool], bool, bool]:
    """Return the tools that an answer may call, whether it has to call one, and whether it may call only one."""
    choice, tools, is_single = request.tool_choice, request.tools, not request.parallel_tool_calls
    names = [tool.function.name for tool in tools]
    if isinstance(choice, schema.NamedTool):
        mode, names, is_single = "required", [choice.function.name], True
    elif isinstance(choice, schema.AllowedTools):
        mode, names = choice.allowed_tools.mode, [each.function.name for each in choice.allowed_tools.tools]
    else:
        mode = choice
    known = {tool.function.name: tool for tool in tools}
    if unknown := [name for name in names if name not in known]:
        raise JobError(f"tool_choice has {unknown[0]!r:.80}; expected the name of one of tools", param="tool_choice")
    if mode == "required" and not names:
        raise JobError("tool_choice is 'required' without tools; expected at least one", param="tool_choice")
    return [] if mode == "none" else [known[name] for name in names], mode == "required", is_single


def _end_of_text(text: str) -> int:
    """Return the length of the part of an answer that is no call of a function, whatever follows."""
    if not text.strip() or text.lstrip().startswith("{"):
        return 0
    start = text.find(chat.TOOL_CALL_START)
    end = len(text) - overlap(text, chat.TOOL_CALL_START) if start < 0 else start
    return len(text[:end].rstrip())


def _chat_logprobs(tokens: Sequence[Token]) -> schema.ChatLogprobs:
    pairs = [(_logprob(token), [schema.Logprob(*_logprob(each)) for each in token.alternatives]) for token in tokens]
    return schema.ChatLogprobs([schema.TokenLogprob(*own, others) for own, others in pairs])


def _logprob(token: Token) -> tuple[str, float, list[int]]:
    return token.text, finite(token.log_probability), list(token.bytes)
