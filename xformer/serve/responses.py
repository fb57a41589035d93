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

_ECHOED = ("instructions", "max_output_tokens", "parallel_tool_calls", "temperature", "top_p", "tools", "tool_choice")
_NAMES = {"messages": "input", "max_completion_tokens": "max_output_tokens"}
_NAMES |= {"response_format.json_schema": "text.format", "response_format": "text.format"}
_STATELESS = "this server keeps no responses; send the whole conversation as input"


@route("POST", "/v1/responses", 'Events "response.created", "response.output_text.delta", ..., "response.completed".')
async def responses(server: Server, request: schema.ResponseRequest) -> schema.Response | Chunks:
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
            call = {"id": item.get("call_id"), "type": "function", "function": {k: item.get(k) for k in _CALL}}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
        elif kind != "reasoning":
            expected = "message, function_call, function_call_output or reasoning"
            raise JobError(f"input[{index}] has the type {kind!r:.80}; expected {expected}", param="input")
    return messages


_CALL = ("name", "arguments")


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
        echoed = {name: msgspec.to_builtins(getattr(original, name)) for name in _ECHOED}
        text = original.text or {"format": {"type": "text"}}
        self.response = schema.Response(
            _new_id("resp"), self.head["created"], self.model.name, [], **echoed, text=text, metadata=original.metadata
        )
        self.number = 0  # of events
        self.reason: str | None = None

    def answer(self, outputs: list[Output]) -> schema.Response:  # type: ignore[override]
        chat = super().answer(outputs)
        message: Any = chat.choices[0].message
        if message.content:
            self.response.output.append(_text_item(message.content, chat.choices[0].logprobs))
        self.response.output += [_call_item(call) for call in message.tool_calls]
        return self._finished(chat.choices[0].finish_reason, chat.usage)

    def _finished(self, reason: str | None, usage: schema.Usage | None) -> schema.Response:
        is_cut = reason == "length"
        self.response.status = "incomplete" if is_cut else "completed"
        self.response.incomplete_details = {"reason": "max_output_tokens"} if is_cut else None
        if usage is not None:
            self.response.usage = {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.total_tokens,
            }
        return self.response

    def events(self, chunk: schema.Chat) -> list[bytes]:
        """Return the events of a part of the stream of the chat."""
        if not chunk.choices:
            done = self._finished(self.reason, chunk.usage)
            return [self._event(f"response.{done.status}", response=done)]
        choice, output = chunk.choices[0], self.response.output
        delta: Any = choice.delta
        if delta.role is not None:  # the first part
            return [self._event(f"response.{name}", response=self.response) for name in ("created", "in_progress")]
        sent: list[bytes] = []
        if text := delta.content or "":
            if not output:
                sent += self._add(_text_item("", None))
                sent.append(self._event("response.content_part.added", content_index=0, part=dict(_part(""))))
            part, logprobs = output[-1]["content"][0], _logprobs(choice.logprobs)
            part["text"] += text
            part["logprobs"] += logprobs
            sent.append(self._event("response.output_text.delta", content_index=0, delta=text, logprobs=logprobs))
        for call in delta.tool_calls:
            if call.id is not None:
                sent += [*self._close(), *self._add(_call_item(call, ""))]
            output[-1]["arguments"] += call.function.arguments
            sent.append(self._event("response.function_call_arguments.delta", delta=call.function.arguments))
        if choice.finish_reason is not None:
            self.reason = choice.finish_reason
            sent += self._close()
        return sent

    def _add(self, item: schema.Json) -> list[bytes]:
        self.response.output.append(item | {"status": "in_progress"})
        shown = item | ({"content": []} if "content" in item else {})
        return [self._event("response.output_item.added", item=shown)]

    def _close(self) -> list[bytes]:
        """Return the events of the end of the last item, if there is one."""
        if not self.response.output:
            return []
        item, sent = self.response.output[-1], list[bytes]()
        item["status"] = "completed"
        if "content" in item:
            part = item["content"][0]
            values = {"text": part["text"], "logprobs": part["logprobs"]}
            sent.append(self._event("response.output_text.done", content_index=0, **values))
            sent.append(self._event("response.content_part.done", content_index=0, part=part))
        else:
            values = {"arguments": item["arguments"], "name": item["name"]}
            sent.append(self._event("response.function_call_arguments.done", **values))
        return [*sent, self._event("response.output_item.done", item=item)]

    def _event(self, name: str, /, **data: Any) -> bytes:
        if "response" not in data:
            data["output_index"] = len(self.response.output) - 1
            data |= {} if "item" in data else {"item_id": self.response.output[-1]["id"]}
        self.number += 1
        return event_bytes(name, {"type": name, "sequence_number": self.number - 1, **data})


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"


def _text_item(text: str, logprobs: schema.ChatLogprobs | None) -> schema.Json:
    content = [_part(text, logprobs)]
    return {"type": "message", "id": _new_id("msg"), "status": "completed", "role": "assistant", "content": content}


def _part(text: str, logprobs: schema.ChatLogprobs | None = None) -> schema.Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": _logprobs(logprobs)}


def _logprobs(logprobs: schema.ChatLogprobs | None) -> list[Any]:
    return [] if logprobs is None else msgspec.to_builtins(logprobs.content)


def _call_item(call: schema.ToolCall, arguments: str | None = None) -> schema.Json:
    values = {"arguments": call.function.arguments if arguments is None else arguments, "name": call.function.name}
    return {"type": "function_call", "id": _new_id("fc"), "status": "completed", "call_id": call.id, **values}
