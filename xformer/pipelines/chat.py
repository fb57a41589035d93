"""Chats: messages as token ids, and the calls of functions in an answer."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from xformer.errors import DataError
from xformer.generation.grammar import JSON_OPTIONS
from xformer.generation.json_schema import closed_schema
from xformer.tokenizers import BaseTokenizer, PretrainedTokenizer
from xformer.tokenizers.base import Messages

_TAGGED_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
TOOL_CALL_START = "<tool_call>"
_CALL_HEAD = r'\{\s*"name"\s*:\s*"([^"\\\x00-\x1f]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
_TAGGED_HEAD, _BARE_HEAD = re.compile(rf"<tool_call>\s*{_CALL_HEAD}"), re.compile(rf"[\s;}}]*{_CALL_HEAD}")
# Last characters of a prompt that an answer ends with only if the template starts the next answer in any case.
_PROMPT_END = 4


class ToolCall(NamedTuple):
    """A call of a function: its name, and its arguments as JSON."""

    name: str
    arguments: str


def parse_tool_calls(text: str) -> tuple[str, list[ToolCall]]:
    """Return the text of an answer before its calls of functions, and the calls.

    Calls are `<tool_call>{"name": ..., "arguments": ...}</tool_call>`, as Qwen and Hermes write them, or a text of
    nothing but objects with "name" and "parameters", separated by semicolons, as Llama 3 writes them.

    Examples:
        >>> parse_tool_calls('Let me see.<tool_call>{"name": "weather", "arguments": {"city": "Bonn"}}</tool_call>')
        ('Let me see.', [ToolCall(name='weather', arguments='{"city": "Bonn"}')])
    """
    calls = [*map(_parse_call, _TAGGED_CALL.findall(text))]
    if calls and None not in calls:
        return text[: text.index(TOOL_CALL_START)].rstrip(), [call for call in calls if call is not None]
    calls, rest, decoder = [], text.strip(), json.JSONDecoder()
    while rest.startswith("{"):
        try:
            _, end = decoder.raw_decode(rest)
        except (ValueError, RecursionError):
            break
        calls.append(_parse_call(rest[:end]))
        rest = rest[end:].lstrip("; \n")
    return ("", [call for call in calls if call]) if calls and not rest and None not in calls else (text, [])


def started_calls(text: str) -> list[ToolCall]:
    """Return the calls of functions that an answer has begun, with their arguments as far as they are written.

    Examples:
        >>> started_calls('<tool_call>{"name": "weather", "arguments": {"city": "Bo')
        [ToolCall(name='weather', arguments='{"city": "Bo')]
    """
    find = _BARE_HEAD.match if text.lstrip().startswith("{") else _TAGGED_HEAD.search
    calls, position = list[ToolCall](), 0
    while match := find(text, position):
        try:
            _, position = json.JSONDecoder().raw_decode(text, match.end())
        except (ValueError, RecursionError):
            position = len(text)
        calls.append(ToolCall(match[1], text[match.end() : position]))
    return calls


def _parse_call(text: str) -> ToolCall | None:
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    if calls := started_calls(text.strip()):  # the arguments as they are written
        return calls[0]
    arguments = call.get("arguments", call.get("parameters", {}))
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(call["name"], text)


def tool_call_grammar(
    tokenizer: BaseTokenizer, functions: Mapping[str, Mapping[str, Any] | None], *, is_single: bool = False
) -> str:
    """Return a grammar in the syntax of Lark for answers that call functions and have no other text; see `Grammar`.

    Calls have the form that `parse_tool_calls` reads and that the chat template of the tokenizer writes: tagged, or
    bare objects.

    Args:
        tokenizer: A tokenizer with a chat template.
        functions: JSON schema of the arguments of each function by its name; None for a function without arguments.
        is_single: Whether an answer has one call only.
    """
    is_tagged = TOOL_CALL_START in tokenizer.chat_templates[_template_name(tokenizer, functions)]
    key, separator = ("arguments", "\n") if is_tagged else ("parameters", "; ")
    names = [f"call_{number}" for number in range(len(functions))]
    alternatives = f"({' | '.join(names)})"
    call = f'"{TOOL_CALL_START}\\n" {alternatives} "\\n</tool_call>"' if is_tagged else alternatives
    rules = [f"start: call{'' if is_single else f' ({json.dumps(separator)} call)*'}", f"call: {call}"]
    for rule, (name, parameters) in zip(names, functions.items(), strict=True):
        start = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{key}": '
        arguments = {"additionalProperties": False} if parameters is None else parameters
        form = {**closed_schema({"type": "object", **arguments}), "x-guidance": JSON_OPTIONS}
        rules += [
            f'{rule}: {json.dumps(start, ensure_ascii=False)} {rule}_arguments "}}"',
            f"{rule}_arguments: %json {json.dumps(form, ensure_ascii=False)}",
        ]
    return "\n".join(rules)


def has_tools(tokenizer: BaseTokenizer) -> bool:
    """Return whether the chat template of a tokenizer writes tools."""
    return re.search(r"\btools\b", tokenizer.chat_templates.get(_template_name(tokenizer, True), "")) is not None


def _template_name(tokenizer: BaseTokenizer, tools: Any) -> str:
    """Return the name of the template of a chat; some checkpoints have another one for chats with tools."""
    return "tool_use" if tools and "tool_use" in tokenizer.chat_templates else "default"


class _Template:
    """The chat template of a tokenizer, for a chat in which special tokens come from the template only.

    Args:
        tokenizer: The tokenizer.
        messages: Messages of the chat.
        tools: Functions that the chat may call.

    Attributes:
        messages: The messages; a special token that is spelled out in a text has `cut` after its first character.
        cut: A character that the chat does not have.
        start: A character that marks the start of an answer.
        end: A character that marks the end of an answer.
    """

    def __init__(self, tokenizer: BaseTokenizer, messages: Messages, tools: Any) -> None:
        special = [token for token in map(tokenizer.id_to_token, tokenizer.special_ids) if token]
        special.sort(key=len, reverse=True)
        pattern = re.compile("|".join(map(re.escape, special))) if special else None
        dumped = json.dumps([messages, tools], ensure_ascii=False, default=str)
        unused = (each for each in map(chr, range(0xE000, 0xF900)) if each not in dumped)
        self.cut, self.start, self.end = itertools.islice(unused, 3)

        def mark(text: str) -> str:
            return text if pattern is None else pattern.sub(lambda match: match[0][0] + self.cut + match[0][1:], text)

        self.messages = [  # templates compare roles with words
            {key: value if key == "role" else _map_texts(mark, value) for key, value in message.items()}
            if isinstance(message, Mapping)
            else message
            for message in messages
        ]
        self._options = {"template": _template_name(tokenizer, tools), "tools": _map_texts(mark, tools)}
        self._tokenizer = tokenizer

    def render(self, count: int | None = None, **options: Any) -> str:
        """Return the text of the first messages; default all."""
        return self._tokenizer.apply_chat_template(self.messages[:count], **self._options, **options)


def encode_chat(
    tokenizer: BaseTokenizer,
    messages: Messages,
    tools: Messages | None,
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> list[int]:
    """Return the token ids of a chat, in which special tokens come from the template only.

    Special tokens that are spelled out in messages or tools are cut in two after their first character, so that they
    are read as text.

    Args:
        tokenizer: A tokenizer with a chat template.
        messages: Messages of the chat.
        tools: Functions that the chat may call.
        add_generation_prompt: End with the start of an answer.
        continue_final_message: End with the text of the last message instead.
        variables: Further variables of the template.

    Raises:
        CheckpointError: If the checkpoint has no chat template, or it is invalid.
        DataError: If the template rejects the messages, or the last message cannot be continued.
    """
    template, variables = _Template(tokenizer, messages, tools), dict(variables or {})
    if reserved := variables.keys() & {"messages", "template", "tools", "add_generation_prompt", "count"}:
        raise DataError(f"chat_template_kwargs has {min(reserved)!r}, which the chat sets; expected other variables")
    text = template.render(add_generation_prompt=add_generation_prompt and not continue_final_message, **variables)
    if continue_final_message:
        last = str(template.messages[-1].get("content") or "").strip()
        if not last or last not in text:
            raise DataError("continue_final_message is true, but the chat template has no text of the last message")
        text = text[: text.rindex(last) + len(last)]
    parts = tokenizer.encode_batch(text.split(template.cut), special_tokens=False)
    return [index for part in parts for index in part]


def encode_conversation(
    tokenizer: PretrainedTokenizer, messages: Messages, tools: Messages | None = None
) -> tuple[list[int], list[int]]:
    """Return the token ids of a chat with its answers, for training, and 1 for each token of an answer, else 0.

    Answers are what the template writes inside of `{% generation %}` tags. Without such tags, an answer is what the
    messages up to it add to the prompt of the messages before it. Those with "weight": 0 are no answers. Special tokens
    that are spelled out in messages are read as text.

    Args:
        tokenizer: A tokenizer with a chat template.
        messages: Messages, each with "role" and "content".
        tools: Functions that the chat may call, in the format of OpenAI.

    Raises:
        CheckpointError: If the checkpoint has no chat template, or it is invalid.
        DataError: If the template rejects the messages, there is no answer, or answers cannot be found.
    """
    template = _Template(tokenizer, messages, tools)
    marks: dict[str, Any] = {"generation_start": template.start, "generation_end": template.end}
    pieces = re.split(f"[{template.start}{template.end}]", template.render(add_generation_prompt=False, **marks))
    text, ends = "".join(pieces), list(itertools.accumulate(map(len, pieces)))
    spans = list(zip(ends[::2], ends[1::2], strict=False)) or _added_answers(template, text)
    weights = [message.get("weight", 1) for message in messages if message["role"] == "assistant"]
    if not all(weight in (0, 1) for weight in weights):
        raise DataError(f"the answers have the weights {weights}; expected 0 or 1")
    if 0 in weights:
        if len(spans) != len(weights):
            raise DataError(f"the chat template marks {len(spans)} of {len(weights)} answers, so weight cannot be 0")
        spans = [span for span, weight in zip(spans, weights, strict=True) if weight]
    ids: list[int] = []
    offsets: list[tuple[int, int]] = []
    position = 0
    for part in text.split(template.cut):
        part_ids, part_offsets = tokenizer.encode_with_offsets(part)
        ids += part_ids
        offsets += [(start + position, end + position) for start, end in part_offsets]
        position += len(part) + 1
    mask = [0] * len(ids)
    for first, stop in spans:
        inside = [index for index, (start, end) in enumerate(offsets) if start < stop and end > first]
        if inside:
            mask[inside[0] : inside[-1] + 1] = [1] * (inside[-1] + 1 - inside[0])
    if not any(mask[1:]):
        raise DataError("the conversation has no answer to learn; expected a message of the role assistant")
    return ids, mask


def _added_answers(template: _Template, text: str) -> list[tuple[int, int]]:
    """Return where answers start and end in the text of a chat: where each prolongs the prompt of those before it."""
    spans = []
    for index, message in enumerate(template.messages):
        if message["role"] == "assistant":
            prompt, answered = template.render(index), template.render(index + 1, add_generation_prompt=False)
            ends_alike = prompt[-_PROMPT_END:] == answered[-_PROMPT_END:]
            if ends_alike and prompt == template.render(index, add_generation_prompt=False):
                raise DataError(
                    "the chat template starts an answer also without add_generation_prompt, so the end of answers is "
                    "unknown; use a template with {% generation %} tags, or one that looks at add_generation_prompt"
                )
            if not (answered.startswith(prompt) and text.startswith(answered)):
                raise DataError(
                    f"the chat template writes message {index + 1}, an answer, in one way after its prompt and in "
                    "another in the conversation; use a template with {% generation %} tags, or end the conversation "
                    "there"
                )
            spans.append((len(prompt), len(answered)))
    return spans


def _map_texts(function: Callable[[str], str], value: Any) -> Any:
    """Return JSON data with function(text) in place of each text."""
    if isinstance(value, str):
        return function(value)
    if isinstance(value, Mapping):
        return {key: _map_texts(function, each) for key, each in value.items()}
    return [_map_texts(function, each) for each in value] if isinstance(value, list | tuple) else value
