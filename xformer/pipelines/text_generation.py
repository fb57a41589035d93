"""Text generation: continue prompts with a language model."""

from __future__ import annotations

import dataclasses
import itertools
import operator
import os
from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, Self

from xformer.config import check_count, take_options, with_options
from xformer.errors import ConfigError, DataError
from xformer.families.run_directory import RunDirectory
from xformer.generation import GenerationConfig, PrefixCache
from xformer.generation.batch import GenerationBatch, check_draft_model
from xformer.generation.engine import Search, Task, run_steps, run_task
from xformer.generation.generate import searches_of
from xformer.generation.pretrained import read_generation
from xformer.generation.processors import token_alternatives
from xformer.generation.results import best_first
from xformer.io import StrPath
from xformer.models import LanguageModel
from xformer.models.token_ids import check_tokens
from xformer.pipelines.base import GenerationPipeline, check_class, check_vocabulary
from xformer.pipelines.chat import encode_chat, has_tools
from xformer.pipelines.options import PromptArguments
from xformer.pipelines.output_text import GeneratedText, Outputs, Token, hooks, stop_strings, tokens_of
from xformer.random import Rng
from xformer.tokenizers import SPECIAL_TOKENS, BaseTokenizer, load_tokenizer
from xformer.tokenizers.base import Messages

DEFAULT_BATCH_TOKENS = 4096
# Defaults of nanoGPT's sampling script.
DEFAULT_MAX_NEW_TOKENS = 500
DEFAULT_SAMPLING = GenerationConfig(temperature=0.8, top_k=200)
_OF_SOURCES = (
    "coverage_penalty", "length_penalty", "length_tolerance", "max_length_ratio", "min_length_ratio", "min_new_tokens"
)  # fmt: skip

Prompt = str | Sequence[int] | Messages
"""A text, its token ids, or the messages of a chat: `[{"role": "user", "content": "Hello"}]`."""


class TextGenerator(GenerationPipeline):
    """A language model with its tokenizer: `TextGenerator.from_pretrained("run")(["ROMEO:"], seed=1)`.

    Language models that were trained with xformer never generate special tokens, so an output has the maximum length
    unless a stopping criterion or a token of stop_token_ids ends it. Models of public checkpoints end their outputs.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        draft_model: A smaller model with the same vocabulary, which proposes num_draft_tokens tokens at a time, see
            `generation.generate`. Beam search and calls with prompt_lookup_num_tokens do not use it.
        context_length: Number of tokens that the model sees at a time. Default: max_positions of the model.
        defaults: Default settings of generation, which a call may replace. Default: sampling.

    Attributes:
        default_max_length: Maximum of new tokens of a call without max_new_tokens, if the context has space for them.
        prefix_cache: Keys and values of earlier prompts, at most 256 MiB; None computes every prompt from its start.
        unsupported_fields: Fields of `GenerationConfig` that require a source text, or a model that emits eos.

    Raises:
        CheckpointError: If the vocabulary sizes of model and tokenizer differ.
        ConfigError: For a model that is not causal or computes no logits, a context that is too short, and a
            draft_model with another vocabulary.
    """

    task = "language_modeling"
    model_classes = (LanguageModel,)
    attention_kinds = ("decoder",)
    unsupported_fields = frozenset(_OF_SOURCES)

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: BaseTokenizer,
        *,
        draft_model: LanguageModel | None = None,
        context_length: int | None = None,
        defaults: GenerationConfig | None = None,
    ) -> None:
        check_class("model", model, LanguageModel)
        check_class("tokenizer", tokenizer, BaseTokenizer)
        model.check_generates()
        check_vocabulary("tokenizer", tokenizer, model.vocab_size)
        self.model, self.tokenizer, self.defaults = model, tokenizer, defaults
        self.prefix_cache = PrefixCache()
        self.default_max_length = (defaults and defaults.max_new_tokens) or DEFAULT_MAX_NEW_TOKENS
        max_positions = model.config.max_positions
        length = max_positions if context_length is None else context_length
        check_count("context_length", length, 2)
        self.context_length = min(length, max_positions) if model.config.positions == "learned" else length
        check_count("the context of the model", self.context_length, 2)
        self.draft_model = draft_model

    @classmethod
    def from_pretrained(
        cls,
        directory: StrPath,
        xp: Any = "numpy",
        *,
        draft_model: StrPath | LanguageModel | None = None,
        **options: Any,
    ) -> Self:
        """Load a public checkpoint, or the best model of a training run; nothing is downloaded.

        `draft_model` is the path of another one, which is loaded with the same options, or a model; their vocabularies
        must be equal. Other arguments and errors are those of `Pipeline.from_pretrained`.
        """
        draft: Any = draft_model
        if isinstance(draft, str | os.PathLike):
            draft = super().from_pretrained(draft, xp, **{**options, "progress": None})
        generator = super().from_pretrained(directory, xp, **options)
        generator.draft_model = draft.model if isinstance(draft, cls) else draft
        if isinstance(draft, cls):
            ids = range(generator.tokenizer.vocab_size)
            if draft.tokenizer.tokens(ids) != generator.tokenizer.tokens(ids):
                raise ConfigError(f"{draft_model} and {directory} have different tokens; expected the same vocabulary")
        return generator

    @property
    def draft_model(self) -> LanguageModel | None:
        """The model that proposes tokens, or None."""
        return self._draft_model

    @draft_model.setter
    def draft_model(self, draft_model: LanguageModel | None) -> None:
        if draft_model is not None:
            check_draft_model(draft_model, self.model)
        self._draft_model = draft_model

    @classmethod
    def _from_run(cls, model: LanguageModel, run: RunDirectory, config: dict[str, Any]) -> Self:
        training = config.get("recipe", {}).get("training", {})
        return cls(model, run.load_tokenizer("joint"), context_length=training.get("context_length"))

    @classmethod
    def _from_checkpoint(cls, model: LanguageModel, directory: Path) -> Self:
        tokenizer, generation = load_tokenizer(directory), read_generation(directory, encoder_decoder=False)
        generation = dataclasses.replace(generation, eos_ids=tokenizer.eos_ids or generation.eos_ids)
        return cls(model, tokenizer, defaults=generation.config(model.config))

    @property
    def has_chat(self) -> bool:
        """True if prompts may be chats: the tokenizer has a chat template."""
        return bool(self.tokenizer.chat_templates)

    @property
    def has_tools(self) -> bool:
        """True if the chat template writes tools."""
        return has_tools(self.tokenizer)

    @with_options(PromptArguments)
    def outputs(  # type: ignore[override]
        self, prompts: Sequence[Prompt], config: GenerationConfig | None = None, **options: Any
    ) -> Outputs:
        """Continue each prompt; return continuations in the order of their scores, as `generation.generate` does.

        Args:
            prompts: Texts to continue, their token ids, or chats to answer (lists of messages with "role" and
                "content"). An empty text is treated as a line break.
            config: Settings. Default: at most `default_max_length` tokens. Models trained with xformer sample with
                temperature 0.8 from the 200 most probable tokens; public checkpoints follow their
                generation_config.json. A field that replaces one of these defaults leaves the others; num_beams above 1
                and do_sample=False turn sampling off.
            **options: The seed, fields of `PromptArguments`, and fields of `GenerationConfig` that replace those of the
                config.

        Raises:
            DataError: For a prompt with unknown characters.
            ConfigError: For invalid or contradictory settings, and for a text that does not fit into the context.
        """
        tasks = self.tasks(prompts, config, **{"batch_tokens": DEFAULT_BATCH_TOKENS, **options})
        return [each for batch in self._run_batches(run_task, tasks) for each in batch]

    @with_options(PromptArguments)
    def search_task(
        self, prompts: Sequence[Prompt], config: GenerationConfig | None = None, **options: Any
    ) -> Task[Outputs]:
        """Return the task of one batch, which an engine may run with others; its result is that of `outputs`.

        Arguments are those of `tasks`.
        """
        (task,) = self.tasks(prompts, config, **{**options, "batch_tokens": None})
        return task

    @with_options(PromptArguments)
    def tasks(
        self, prompts: Sequence[Prompt], config: GenerationConfig | None = None, *, seed: int = 0, **options: Any
    ) -> list[Task[Outputs]]:
        """Return the tasks of batches of prompts, whose results together are that of `outputs`.

        Args:
            prompts: As for `outputs`.
            config: As for `outputs`.
            seed: Seed of sampling. The same seed gives the same texts, however prompts are batched.
            **options: Fields of `PromptArguments`, and fields of `GenerationConfig` that replace those of the config.

        Raises:
            DataError: For a prompt with unknown characters.
            ConfigError: For invalid or contradictory settings, and for a text that does not fit into the context.
        """
        given = PromptArguments(**take_options(PromptArguments, options))
        config = self.resolve_config(config, **options)
        is_beam, first_index = config.method == "beam", given.first_index
        strings, on_text = stop_strings(given.stop), given.on_text
        if on_text is not None and (is_beam or config.num_return_sequences > 1):
            raise ConfigError("num_beams and num_return_sequences above 1 cannot be streamed; expected 1 of each")
        encoded = self.token_ids(prompts, first_index, tools=given.tools)
        limits = [config.max_new_tokens or self.default_max_length] * len(encoded)
        if given.context == "error" or is_beam:
            limits = [self._limit(ids, config, number) for number, ids in enumerate(encoded, start=first_index + 1)]
        phrases: Any = self._phrases(given.sequence_bias, len(encoded)) or [None] * len(encoded)
        samples = 1 if is_beam else config.num_return_sequences  # beam search finds the best continuations of one text
        texts = [
            GeneratedText(self.tokenizer, number - first_index, number * samples + sample, strings, on_text, *columns)
            for number, columns in enumerate(zip(encoded, limits, phrases, strict=True), start=first_index)
            for sample in range(samples)
        ]
        special = range(len(SPECIAL_TOKENS)) if self.defaults is None else ()
        changes: dict[str, Any] = {"suppress_tokens": (*special, *config.suppress_tokens)}
        config = dataclasses.replace(config, **changes | ({} if is_beam else {"num_return_sequences": 1}))
        size = len(encoded) if given.batch_tokens is None else given.batch_tokens // self.context_length
        length = samples * max(1, size)
        batches = [texts[start : start + length] for start in range(0, max(1, len(texts)), length)]
        return [self._run(each, config, Rng(seed), given) for each in batches]

    def _run(
        self, texts: list[GeneratedText], config: GenerationConfig, rng: Rng, given: PromptArguments
    ) -> Task[Outputs]:
        has_draft = config.method != "beam" and config.prompt_lookup_num_tokens is None
        for number in itertools.count():
            groups: dict[int, list[GeneratedText]] = {}  # by the number of new tokens
            for text in texts:
                if not text.outputs:
                    groups.setdefault(text.begin_chunk(self.context_length), []).append(text)
            if not groups:
                break
            searches: list[list[Search]] = []
            for limit, group in groups.items():
                limits: Any = {"max_new_tokens": limit, "min_new_tokens": min(config.min_new_tokens, limit)}
                batch = GenerationBatch(
                    self.model,
                    [text.context for text in group],
                    dataclasses.replace(config, **limits),
                    rng=rng.fold_in("chunk", number),
                    sequence_bias=None if group[0].phrases is None else [text.phrases or [] for text in group],
                    special_tokens=self.defaults is not None,
                    prefix_cache=self.prefix_cache,
                    draft_model=self.draft_model if has_draft else None,
                    **hooks(group, config, given),
                )
                searches.append(searches_of(batch))
            yield list(itertools.chain(*searches))
            for group, found in zip(groups.values(), searches, strict=True):
                results = itertools.chain(*(search.result() for search in found))
                for text, hypotheses in zip(group, results, strict=True):
                    text.extend(hypotheses, config)
        by_prompt = itertools.groupby(texts, operator.attrgetter("index"))
        return [best_first([output for text in group for output in text.outputs]) for _, group in by_prompt]

    def stream(self, prompt: Prompt, config: GenerationConfig | None = None, **options: Any) -> Iterator[str]:
        """Continue a prompt, yielding text as it is generated.

        The yielded texts concatenate to the text that `__call__([prompt])` returns for the same arguments. Characters
        that take several tokens are yielded once they are complete. Arguments are those of `tasks`; beam search
        and several outputs cannot be streamed.

        Raises:
            DataError: For a prompt with unknown characters.
            ConfigError: For invalid or contradictory settings.
        """
        if isinstance(prompt, list | tuple) and prompt and isinstance(prompt[0], str | list | tuple):
            raise DataError("stream got a list of prompts; expected a single text or chat, such as the first of them")
        new: list[str] = []
        task = self.search_task([prompt], config, on_text=lambda index, text, tokens: new.append(text), **options)

        def texts() -> Iterator[str]:
            for _ in itertools.chain(run_steps(task), [None]):
                yield from new
                new.clear()

        return texts()

    def prompt_logprobs(self, prompts: Sequence[Prompt], logprobs: int = 0) -> Task[list[list[Token]]]:
        """Return a task whose result has the tokens of prompts with log-probabilities; the first of each has none.

        Args:
            prompts: As for `outputs`.
            logprobs: Number of alternatives to each token.

        Raises:
            DataError: For a prompt with unknown characters.
            ConfigError: For a prompt that is longer than the context.
        """
        encoded = self.token_ids(prompts)
        for number, ids in enumerate(encoded, start=1):
            if not 0 < len(ids) <= self.context_length:
                raise ConfigError(f"prompt {number} has {len(ids)} tokens; expected 1 to {self.context_length}")

        def run() -> Task[list[list[Token]]]:
            found = []
            for ids in encoded:
                steps = token_alternatives(self.model([ids])[0, : len(ids) - 1, :], ids[1:], logprobs)
                found.append(tokens_of(self.tokenizer, ids, steps=steps))
                yield []  # others continue between the prompts
            return found

        return run()

    def resolve_config(self, config: GenerationConfig | None = None, **overrides: Any) -> GenerationConfig:
        """Return the settings of a call of `outputs`, with the defaults of text generation.

        Without max_new_tokens in the call, that of the result is None: `default_max_length` applies.

        Raises:
            ConfigError: For invalid or contradictory settings, and for `unsupported_fields`.
        """
        if config is None:
            config = dataclasses.replace(self.defaults or DEFAULT_SAMPLING, max_new_tokens=None)
        config = GenerationConfig.resolve(config, overrides)
        for name in sorted(self.unsupported_fields) if self.defaults is None else ():
            if getattr(config, name) != getattr(GenerationConfig(), name):
                raise ConfigError(f"{name} does not apply to text generation; omit it")
        return config

    def token_ids(
        self, prompts: Sequence[Prompt], first_index: int = 0, *, tools: Messages | None = None
    ) -> list[list[int]]:
        """Return the token ids of prompts.

        Args:
            prompts: Texts to continue, their token ids, or chats. A special token that is spelled out in a text becomes
                that token; in the messages of a chat it stays text.
            first_index: Index of the first prompt; errors count from 1.
            tools: As for `outputs`.

        Raises:
            DataError: For a prompt with unknown characters, and for a single prompt instead of a list.
            CheckpointError: For a chat, if the checkpoint has no chat template.
        """
        if isinstance(prompts, str | Mapping) or not hasattr(prompts, "__len__"):
            raise DataError(f"prompts is {prompts!r}; expected a list of texts, e.g. ['Hello']")
        if any(isinstance(prompt, Mapping | Integral) for prompt in prompts):
            raise DataError(
                "prompts is a single chat or a single list of token ids; expected a list of them: "
                '[[{"role": "user", "content": "..."}]]'
            )
        return [self._encode(prompt, number, tools) for number, prompt in enumerate(prompts, start=first_index + 1)]

    def _encode(self, prompt: Prompt, number: int, tools: Messages | None) -> list[int]:
        tokenizer = self.tokenizer
        if not isinstance(prompt, str):
            if not isinstance(prompt, Sequence) or not prompt or not isinstance(prompt[0], Mapping):
                return check_tokens(f"prompt {number}", prompt, self.model.vocab_size)
            return encode_chat(tokenizer, prompt, tools)  # type: ignore[arg-type]
        start = (self.model.config.bos_id, self.model.config.eos_id)
        return tokenizer.encode_prompt(prompt, f"prompt {number}") or [each for each in start if each is not None][:1]

    def _limit(self, ids: Sequence[int], config: GenerationConfig, number: int) -> int:
        """Return the maximum of new tokens for a prompt; raise ConfigError if they do not fit into the context."""
        limit, left = config.max_new_tokens or self.default_max_length, self.context_length - len(ids)
        if left < 1 or (limit > left and config.max_new_tokens is not None):
            advice = "" if config.method == "beam" else ", or use context='slide'"
            fit = f"the context of the model has {self.context_length}, so {limit - left} do not fit"
            received = f"prompt {number} has {len(ids)} tokens and max_new_tokens is {limit}; {fit}"
            raise ConfigError(f"{received}: shorten the prompt or lower max_new_tokens{advice}")
        return min(limit, left)
