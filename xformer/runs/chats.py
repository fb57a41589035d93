"""Training on the answers of chats, in files of one conversation per line."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from xformer.data.packing import Documents, PackedBatch, pack_documents
from xformer.data.token_rows import TokenWriter
from xformer.errors import CheckpointError, ConfigError, DataError, describe_type
from xformer.families.run_directory import RunDirectory
from xformer.generation import GenerationConfig
from xformer.models import LanguageModel
from xformer.pipelines import Attention, TextGenerator, encode_conversation, show_attention
from xformer.random import Rng
from xformer.runs.config import ChatTrainingConfig
from xformer.runs.console import plural
from xformer.runs.inputs import Files, paths_of
from xformer.runs.recipe import PASS_TOKENS, Recipe
from xformer.runs.tasks import MAX_SHOWN, TextTask, held_out, initial_tokenizer, language_model
from xformer.text.corpus import iter_lines, open_text
from xformer.tokenizers import PretrainedTokenizer
from xformer.training.loggers import Rows

_EXPECTED = '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'
_MAX_CHARACTERS = 10_000_000  # of a line
_MOST_TOKENS = 1024  # of a row, unless context_length is set


class Conversation(NamedTuple):
    """A line of a file.

    Attributes:
        place: File and line, for errors.
        messages: The messages.
        tools: Functions that the conversation may call, or None.
    """

    place: str
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None


def read_conversations(paths: Iterable[Path]) -> Iterator[Conversation]:
    """Yield the conversations of files of JSON lines, as OpenAI and TRL read them. Other keys are ignored.

    Raises:
        DataError: For a missing file, and (with the line number) for invalid UTF-8, JSON or messages.
    """
    for path in paths:
        with open_text(path) as file:
            for number, line in enumerate(iter_lines(file, path, max_characters=_MAX_CHARACTERS), start=1):
                if line.strip():
                    yield _parse(f"{path} line {number}", line)


def _parse(place: str, line: str) -> Conversation:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place} is not JSON ({error}); expected {_EXPECTED}") from error
    if not isinstance(row, dict):
        raise DataError(f"{place} has {describe_type(row)}; expected {_EXPECTED}")
    messages, tools = row.get("messages"), row.get("tools")
    if "messages" not in row:
        raise DataError(f"{place} has the keys {', '.join(row) or 'none'}; expected {_EXPECTED}")
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{place} has messages {messages!r:.80}; expected a list of at least one message")
    if tools is not None and not isinstance(tools, list):
        raise DataError(f"{place} has tools {tools!r:.80}; expected a list of functions")
    for number, message in enumerate(messages, start=1):
        is_answer = isinstance(message, dict) and message.get("role") == "assistant" and message.get("weight", 1) != 0
        if is_answer and not (message.get("content") or message.get("tool_calls")):
            raise DataError(f"{place} has no content in the answer, message {number}; expected a text or tool_calls")
    return Conversation(place, messages, tools)


def as_json_lines(chats: Any) -> Any:
    """Return conversations in memory, lists of messages or dicts with "messages", as JSON lines; keep paths.

    Raises:
        DataError: For a value that JSON cannot hold.
    """
    if not isinstance(chats, Iterable) or isinstance(chats, str | bytes | Mapping):
        return chats

    def line(chat: Any) -> Any:
        if not isinstance(chat, list | tuple | Mapping):
            return chat
        try:
            return json.dumps(chat if isinstance(chat, Mapping) else {"messages": chat})
        except (TypeError, ValueError) as error:
            raise DataError(f"a conversation has a value that is not JSON ({error}); expected {_EXPECTED}") from error

    return [line(chat) for chat in chats]


@dataclass(eq=False)
class ChatTask(TextTask):
    """Training on the answers of chats: conversations, which are `Documents`, in packed rows.

    An epoch has each of them once.

    Raises:
        DataError: If a conversation is longer than a row, or a set is empty.
    """

    names = ("chat",)
    unit = "tokens of answers"

    def __post_init__(self) -> None:
        sizes = []
        for documents, name in ((self.train, "training"), (self.valid, "validation")):
            lengths = documents.lengths
            sizes += [sum(lengths[row]) for row in self._rows(lengths)]
            if not sum(lengths):
                raise DataError(f"the {name} set has no documents of at least two tokens; expected at least one")
        self._options = {"length": int(max(sizes)), **self._array_options}

    def _rows(self, lengths: Any) -> list[list[int]]:
        return pack_documents(lengths, self.recipe.training.context_length)

    @classmethod
    def prepare(cls, recipe: Recipe, xp: Any, files: Files, directory: Path, run: RunDirectory | None = None) -> Self:
        """Read the files and make the task; see `Task.prepare`."""
        settings: ChatTrainingConfig = recipe.training
        if recipe.init.path is None:
            raise ConfigError("chats are given without init; expected a model to start from, with a chat template")
        tokenizer = initial_tokenizer(recipe, run)
        if not isinstance(tokenizer, PretrainedTokenizer) or not tokenizer.chat_templates:
            raise ConfigError(f"{recipe.init.path} has no chat template; expected a model that answers chats")
        train_paths, valid_paths = (paths_of(files, name) for name in ("chats", "valid_chats"))
        count = sum(1 for _ in read_conversations(train_paths))  # all errors of the file, before it is encoded
        conversations, others = (read_conversations(paths) for paths in (train_paths, valid_paths or train_paths))
        if not valid_paths:
            mask = held_out(settings, count, "conversation")
            conversations, others = itertools.compress(conversations, ~mask), itertools.compress(others, mask)
        limit = settings.context_length or _MOST_TOKENS
        train, dropped = _encode(conversations, tokenizer, settings.truncation, limit, directory)
        valid, valid_dropped = _encode(others, tokenizer, settings.truncation, limit, directory)
        if settings.context_length is None:
            longest = max((int(max(each.lengths, default=0)) for each in (train, valid)), default=0)
            recipe = recipe.with_training(context_length=min(limit, max(PASS_TOKENS, longest)))
        rows = len(pack_documents(train.lengths, recipe.training.context_length))
        recipe = recipe.for_data(math.ceil(rows / settings.batch_size))
        model = language_model(recipe, tokenizer, xp)
        counts, sets = dict[str, int](), dict[str, Any](train=train, valid=valid)
        for name, documents in sets.items():
            counts |= {f"{name}_conversations": len(documents), f"{name}_tokens": len(documents.tokens.ids)}
            counts[f"{name}_answer_tokens"] = int(documents.loss_masks.ids.sum())
        counts["conversations_dropped_long"] = dropped + valid_dropped
        return cls(recipe, model, train, valid, tokenizer, counts, not valid_paths)

    def batches(self, rng: Rng, *, skip: int) -> Iterator[tuple[int, Any]]:
        """Yield (epoch, batch) without end."""
        size = self.recipe.training.batch_size
        for epoch in itertools.count():
            source = rng.fold_in("epoch", epoch)
            order = source.fold_in("documents").permutation(len(self.train))
            rows = self._rows(self.train.lengths[order])
            rows = [[order[index] for index in rows[row]] for row in source.fold_in("rows").permutation(len(rows))]
            for start in range(skip * size, len(rows), size):
                yield epoch, PackedBatch.make(self.train, rows[start : start + size], **self._options)
            skip = max(0, skip - -(-len(rows) // size))

    def validation_batches(self) -> list[Any]:
        """Return the validation set."""
        rows, size = self._rows(self.valid.lengths), self.recipe.training.batch_size
        batches = [rows[start : start + size] for start in range(0, len(rows), size)]
        return [PackedBatch.make(self.valid, batch, **self._options) for batch in batches]

    def samples(self, model: LanguageModel) -> Rows:
        """Return the answer of the model to the beginning of the first validation conversation."""
        ids, mask = self.valid.tokens[0], self.valid.loss_masks[0]
        start = mask.index(1)
        return [self._sample(model, ids[:start], ids[start : [*mask, 0].index(0, start)])]

    def example(self) -> str:
        """Return no text: the beginning of a conversation is seldom short."""
        return ""

    def attention(self, model: LanguageModel) -> Attention:
        """Return the attention of the model for the beginning of the first validation conversation."""
        return show_attention(self._generator(model), self.valid.tokens[0][:MAX_SHOWN])

    def _generator(self, model: LanguageModel) -> TextGenerator:
        length = max(2, self.recipe.training.context_length)
        return TextGenerator(model, self.tokenizer, context_length=length, defaults=GenerationConfig())

    def describe_data(self) -> Iterator[str]:
        """Yield lines that describe the data."""
        counts = self.counts
        for name, key in (("training", "train"), ("validation", "valid")):
            sizes = plural(counts[f"{key}_conversations"], "conversation"), plural(counts[f"{key}_tokens"], "token")
            yield f"{name}: {', '.join(sizes)}, {counts[f'{key}_answer_tokens']:,} of them in answers"
        settings, length = self.recipe.training, self._options["length"]
        step = settings.batch_size * settings.grad_accumulation
        yield f"rows: {length:,} tokens each, {step} in a step, {plural(settings.batch_size, 'row')} at a time"
        if dropped := counts["conversations_dropped_long"]:
            yield f"dropped: {plural(dropped, 'conversation')} longer than context_length"


def _encode(
    conversations: Iterable[Conversation], tokenizer: PretrainedTokenizer, truncation: str, length: int, directory: Path
) -> tuple[Documents, int]:
    """Return conversations as token ids, mapped into memory, and how many were dropped.

    Raises:
        DataError: For one that the chat template does not take, without an answer, or too long; with file and line.
    """
    dropped, limit = 0, length + 1  # the last token is a label only
    with TokenWriter(tokenizer.vocab_size, directory) as tokens, TokenWriter(2, directory) as masks:
        for place, messages, tools in conversations:
            try:
                ids, mask = encode_conversation(tokenizer, messages, tools)
            except (DataError, CheckpointError) as error:
                raise DataError(f"{place}: {error}") from error
            if len(ids) > limit and truncation == "error":
                received = f"{place} has {len(ids):,} tokens; expected at most {limit:,}, one more than context_length"
                raise DataError(f"{received}; raise context_length, or set truncation to 'drop' or 'cut'")
            if truncation == "cut":
                ids, mask = ids[:limit], mask[:limit]
            if len(ids) > limit or not any(mask[1:]):
                dropped += 1
            else:
                tokens.write([ids])
                masks.write([mask])
        return Documents(tokens.finish(), masks.finish()), dropped
