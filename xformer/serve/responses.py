"""The OpenAI-compatible route /v1/responses: a request becomes one of a chat, and the answer of the chat a response."""

from __future__ import annotations

import functools
import re
import secrets
from collections.abc import Sequence
from typing import Any

import msgspec

from xformer.pipelines import Output
from xformer.serve import schema
from xformer.serve.jobs import JobError
from xformer.serve.models import Server
from xformer.serve.openai import _ChatAnswer, answer_chat
from xformer.serve.routes import Chunks, event_bytes, route

_ECHOED = ("instructions", "max_output_tokens", "metadata", "parallel_tool_calls", "temperature", "text", "tool_choice")
_NAMES = {"messages": "input", "max_completion_tokens": "max_output_tokens"}
_NAMES |= {"response_format.json_schema": "text.format", "response_format": "text.format"}
_STATELESS = "this server keeps no responses; send the whole conversation as input"


@route("POST", "/v1/responses", 'Events "response.created", "response.output_text.delta", ..., "response.completed".')
async def responses(server: Server, request: schema.ResponseRequest) -> schema.Json | Chunks:
    """Answer a chat with a language model, as a response."""
    for name in ("previous_response_id", "conversation", "background"):
        if getattr(request, name):
            raise JobError(f"{name} is given, but {_STATELESS}", param=name)
    try:
        return await answer_chat(server, chat_request(request), functools.partial(_ResponseAnswer, request))
    except JobError as error:  # with the names of a chat
        for name, own in _NAMES.items():
            error.args = (str(error).replace(name, own),)
            error.param = error.param and error.param.replace(name, own)
        raise


def chat_request(request: schema.ResponseRequest) -> schema.ChatRequest:
    """Return the same request for a chat.

    Raises:
        JobError: For items and tools that no chat has.
    """
    body = {name: getattr(request, name) for name in schema.ChatRequest.__struct_fields__ if hasattr(request, name)}
    items = request.input if isinstance(request.input, list) else [{"role": "user", "content": request.input}]
    first = [] if request.instructions is None else [{"role": "system", "content": request.instructions}]
    form = (request.text or {}).get("format", {"type": "text"})
    body |= {
        "messages": [*first, *_messages(items)],
        "max_completion_tokens": request.max_output_tokens,
        "tools": [_function(f"tools[{index}]", tool) for index, tool in enumerate(request.tools)],
        "tool_choice": _tool_choice(request.tool_choice),
        "stream_options": {"include_usage": True},
        "logprobs": request.top_logprobs > 0 or "message.output_text.logprobs" in request.include,
        "response_format": {"type": form.get("type"), "json_schema": form} if isinstance(form, dict) else form,
    }
    return schema.read(body, schema.ChatRequest)


def _messages(items: Sequence[schema.Json]) -> list[schema.Json]:
    messages: list[schema.Json] = []
    for index, item in enumerate(items):
        kind = item.get("type", "message")
        if kind == "message":
            messages.append({"role": item.get("role"), "content": item.get("content")})
        elif kind == "function_call":
            function = {key: item.get(key) for key in ("name", "arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
        elif kind != "reasoning":
            expected = "message, function_call, function_call_output or reasoning"
            raise JobError(f"input[{index}] has the type {kind!r:.80}; expected {expected}", param="input")
    return messages


def _function(name: str, tool: schema.Json) -> schema.Json:
    if tool.get("type") != "function":
        message = f"{name} has the type {tool.get('type')!r:.80}; expected 'function'"
        raise JobError(message, param=re.split(r"\W", name)[0])
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


def _tool_choice(choice: Any) -> Any:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "allowed_tools":
        tools = [_function("tool_choice.tools", tool) for tool in choice.get("tools", ())]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": tools}}
    return _function("tool_choice", choice)


class _ResponseAnswer(_ChatAnswer):
    """The answer of a request for a chat as a response, and its parts as the events of a stream."""

    end = b""

    def __init__(self, original: schema.ResponseRequest, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.items: list[schema.Json] = []
        self.response = {"id": _new_id("resp"), "object": "response", "created_at": self.head["created"]}
        self.response |= {"model": self.model.name, "status": "in_progress", "output": self.items, "usage": None}
        self.response |= {name: msgspec.to_builtins(getattr(original, name)) for name in (*_ECHOED, "tools", "top_p")}
        self.num_events = 0
        self.reason: str | None = None

    def answer(self, outputs: list[Output]) -> Any:
        chat = super().answer(outputs)
        chat.choices[0].delta = msgspec.structs.replace(chat.choices[0].message, role=None)  # type: ignore[type-var]
        self.events(chat)
        return self._finished(chat.usage)

    def _finished(self, usage: Any) -> schema.Json:
        self.response |= {"status": "completed", "error": None, "incomplete_details": None}
        if self.reason == "length":
            self.response |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        tokens = {"input_tokens": usage.prompt_tokens, "input_tokens_details": {"cached_tokens": 0}}
        tokens |= {"output_tokens": usage.completion_tokens, "output_tokens_details": {"reasoning_tokens": 0}}
        self.response["usage"] = {**tokens, "total_tokens": usage.total_tokens}
        return self.response

    def events(self, chunk: schema.Chat) -> list[bytes]:
        """Return the events of a part of the stream of the chat."""
        if not chunk.choices:
            done = self._finished(chunk.usage)
            return [self._event(done["status"], response=done)]
        choice, sent = chunk.choices[0], list[bytes]()
        delta: Any = choice.delta
        if delta.role is not None:  # the first part
            return [self._event(name, response=self.response) for name in ("created", "in_progress")]
        if text := delta.content or "":
            if not self.items:
                sent += self._add("msg", {"type": "message", "role": "assistant", "content": []})
                part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
                sent.append(self._event("content_part.added", content_index=0, part=part))
                self.items[0]["content"].append(part)
            part = self.items[0]["content"][0]
            logprobs = [] if choice.logprobs is None else msgspec.to_builtins(choice.logprobs.content)
            part["text"], part["logprobs"] = part["text"] + text, part["logprobs"] + logprobs
            sent.append(self._event("output_text.delta", content_index=0, delta=text, logprobs=logprobs))
        for call in delta.tool_calls:
            name, arguments = call.function.name, call.function.arguments
            if call.id is not None:
                item = {"type": "function_call", "call_id": call.id, "name": name, "arguments": ""}
                sent += [*self._close(), *self._add("fc", item)]
            self.items[-1]["arguments"] += arguments
            sent.append(self._event("function_call_arguments.delta", delta=arguments))
        if choice.finish_reason is not None:
            self.reason = choice.finish_reason
            sent += self._close()
        return sent

    def _add(self, kind: str, item: schema.Json) -> list[bytes]:
        self.items.append({"id": _new_id(kind), "status": "in_progress", **item})
        return [self._event("output_item.added", item=self.items[-1])]

    def _close(self) -> list[bytes]:
        """Return the events of the end of the last item, if there is one."""
        if not self.items:
            return []
        item = self.items[-1]
        item["status"] = "completed"
        if "content" in item:
            part = item["content"][0]
            values = {"content_index": 0, "text": part["text"], "logprobs": part["logprobs"]}
            sent = [self._event("output_text.done", **values)]
            sent.append(self._event("content_part.done", content_index=0, part=part))
        else:
            values = {key: item[key] for key in ("arguments", "name")}
            sent = [self._event("function_call_arguments.done", **values)]
        return [*sent, self._event("output_item.done", item=item)]

    def _event(self, name: str, /, **data: Any) -> bytes:
        if "response" not in data:
            data |= {"output_index": len(self.items) - 1, "item_id": self.items[-1]["id"]}
        self.num_events += 1
        kind = f"response.{name}"
        return event_bytes(kind, {"type": kind, "sequence_number": self.num_events - 1, **data})


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"
