"""Text generation: continue prompts with a language model."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

from xformer.config import check_count
from xformer.data.bucketing import fill_batches
from xformer.errors import ConfigError, DataError
from xformer.families.gguf_file import find_gguf
from xformer.families.gguf_tokenizer import read_tokenizer
from xformer.families.run_directory import RunDirectory
from xformer.generation import (
    BeamHistory,
    GenerationConfig,
    Hypothesis,
    LogitsProcessor,
    PrefixCache,
    StoppingCriteria,
    generate,
)
from xformer.generation.generate import stream_batch, stream_samples
from xformer.generation.pretrained import PretrainedGeneration, read_generation
from xformer.generation.results import best_first, length_penalty
from xformer.generation.sampling import start_samples
from xformer.models import LanguageModel
from xformer.models.token_ids import check_tokens
from xformer.pipelines.base import Output, Pipeline, check_class, check_vocabulary
from xformer.pipelines.batching import encode_phrases, run_batches
from xformer.random import Rng
from xformer.text import SPECIAL_TOKENS, UNK_ID, DecodeStream, PretrainedTokenizer, Tokenizer, load_tokenizer
from xformer.text.streaming import text_after

# Defaults of nanoGPT's sampling script.
DEFAULT_MAX_NEW_TOKENS = 500
DEFAULT_SAMPLING = GenerationConfig(temperature=0.8, top_k=200)

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""A text, its token ids, or the messages of a chat: `[{"role": "user", "content": "Hello"}]`."""


class TextGenerator(Pipeline):
    """A language model with its tokenizer: `TextGenerator.from_pretrained("run")(["ROMEO:"], seed=1)`.

    Language models that were trained with xformer never generate special tokens, so an output has the maximum length
    unless a stopping criterion or a token of stop_token_ids ends it; those of public checkpoints end outputs.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        context_length: Number of tokens that the model sees at a time. Default: max_positions of the model.
        defaults: Default settings of generation, which a call may replace. Default: sampling.

    Attributes:
        prefix_cache: Keys and values of earlier prompts, at most 256 MiB; None computes every prompt from its start.

    Raises:
        CheckpointError: If the vocabulary sizes of model and tokenizer differ.
        ConfigError: For a context that is too short.
    """

    task = "language_modeling"
    model_class = LanguageModel
    unsupported_fields: ClassVar[frozenset[str]] = frozenset(
        {
            "length_penalty",
            "coverage_penalty",
            "min_new_tokens",
            "min_length_ratio",
            "max_length_ratio",
            "length_tolerance",
        }
    )
    """Fields of `GenerationConfig` that require a source text, or a model that emits eos."""

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer | PretrainedTokenizer,
        *,
        context_length: int | None = None,
        defaults: GenerationConfig | None = None,
    ) -> None:
        check_class("model", model, LanguageModel)
        if not hasattr(tokenizer, "vocab_size"):  # one of the caller's own is accepted
            check_class("tokenizer", tokenizer, Tokenizer, PretrainedTokenizer)
        if context_length is not None and not isinstance(context_length, Integral):
            raise ConfigError(f"context_length is {context_length!r}; expected an integer of at least 2")
        check_vocabulary("tokenizer", tokenizer, model.vocab_size)
        self.model, self.tokenizer, self.defaults = model, tokenizer, defaults
        self.prefix_cache = PrefixCache()
        max_positions = model.config.max_positions
        self.context_length = max_positions if context_length is None else context_length
        if model.config.positions == "learned":
            self.context_length = min(self.context_length, max_positions)
        if self.context_length < 2:
            raise ConfigError(f"the context has {self.context_length} tokens; expected at least 2")

    @classmethod
    def _from_run(cls, model: LanguageModel, run: RunDirectory, config: dict[str, Any]) -> Self:
        training = config.get("recipe", {}).get("training", {})
        return cls(model, run.load_tokenizer("joint"), context_length=training.get("context_length"))

    @classmethod
    def _from_checkpoint(cls, model: LanguageModel, directory: Path) -> Self:
        if gguf := find_gguf(directory):
            tokenizer = read_tokenizer(gguf)
            defaults = PretrainedGeneration(eos_ids=tokenizer.eos_ids).config(model.config)
            return cls(model, tokenizer, defaults=defaults)
        defaults = read_generation(directory, encoder_decoder=False).config(model.config)
        return cls(model, load_tokenizer(directory), defaults=defaults)

    def outputs(  # type: ignore[override]
        self,
        prompts: Sequence[Prompt],
        config: GenerationConfig | None = None,
        *,
        sequence_bias: Sequence[str] | Sequence[Sequence[str]] | None = None,
        seed: int = 0,
        batch_tokens: int = 4096,
        logits_processors: Sequence[LogitsProcessor] = (),
        stopping_criteria: Sequence[StoppingCriteria] = (),
        beam_history: BeamHistory | None = None,
        first_index: int = 0,
        context: str = "error",
        **overrides: Any,
    ) -> list[list[Output]]:
        """Continue each prompt; return continuations in the order of their scores, as `generation.generate` does.

        Args:
            prompts: Texts to continue, their token ids, or chats to answer (lists of messages with "role" and
                "content"). An empty text is treated as a line break.
            config: Settings. Default: at most 500 tokens. Models trained with xformer sample with temperature 0.8 from
                the 200 most probable tokens; public checkpoints follow their generation_config.json. A field that
                replaces one of these defaults leaves the others; num_beams above 1 and do_sample=False turn sampling
                off.
            sequence_bias: Words and phrases to favor: a list for all prompts, or a list for each.
            seed: Seed of sampling. The same seed gives the same texts, however prompts are batched.
            batch_tokens: Maximum tokens of a batch. On NumPy each core runs one batch.
            logits_processors: Additional processors, see `generation.generate`.
            stopping_criteria: Additional stopping criteria, see `generation.generate`.
            beam_history: Receives the candidates of each step of a beam search, see `generation.BeamHistory`.
            first_index: Index of the first prompt if the prompts are part of a longer list; samples depend on it.
            context: Treatment of texts that are longer than the context of the model. "error": a prompt that does not
                fit together with max_new_tokens is refused; the default of max_new_tokens is lowered to what fits.
                "slide": when the context is full, its first half is dropped; not for beam search.
            **overrides: Fields of `GenerationConfig` that replace those of the config.

        Raises:
            DataError: For a prompt with unknown characters.
            ConfigError: For invalid or contradictory settings, and for a text that does not fit into the context.
        """
        config = self.resolve_config(config, **overrides)
        check_count("batch_tokens", batch_tokens)
        texts = self._texts(prompts, config, sequence_bias, first_index, context)

        def run(batch: Sequence[_Chunk]) -> list[tuple[_Text, list[Hypothesis]]]:
            hypotheses = generate(
                self.model,
                [chunk.context for chunk in batch],
                logits_processors=logits_processors,
                stopping_criteria=stopping_criteria,
                beam_history=beam_history,
                **self._chunk_options(batch, config, rng),
            )
            return [(chunk.text, each) for chunk, each in zip(batch, hypotheses, strict=True)]

        for number in itertools.count():
            chunks = [self._chunk(text) for text in texts if not text.is_done]
            if not chunks:
                break
            rng = Rng(seed).fold_in("chunk", number)
            for batch in run_batches(run, self._batches(chunks, batch_tokens), self.model):
                for text, hypotheses in batch:
                    text.extend(hypotheses, config)
        found: list[list[Hypothesis]] = [[] for _ in prompts]
        for text in texts:
            found[text.index] += text.hypotheses
        encoded = {text.index: text.prompt for text in texts}
        return [[self._output(encoded[row], each) for each in best_first(found[row])] for row in range(len(prompts))]

    def continue_ids(
        self,
        prompts: Sequence[Sequence[int]],
        config: GenerationConfig,
        *,
        sequence_bias: Sequence[Sequence[str]] | None = None,
        seed: int = 0,
        logits_processors: Sequence[LogitsProcessor] = (),
        stopping_criteria: Sequence[StoppingCriteria] = (),
        beam_history: BeamHistory | None = None,
        indices: Sequence[int] | None = None,
    ) -> list[list[Hypothesis]]:
        """Continue prompts of any lengths in one batch, within the context of the model.

        Prompts are ids that `encode` returned, and the config is one that `resolve_config` returned. `sequence_bias`
        has a list for each prompt. The other arguments are those of `outputs` and, for `indices`, of `generate`.

        Raises:
            DataError: For a prompt that fills the context.
            ConfigError: For invalid or contradictory settings.
        """
        window = self.context_length
        for number, prompt in enumerate(prompts, start=1):
            if len(prompt) >= window:
                raise DataError(f"prompt {number} has {len(prompt)} tokens; expected at most {window - 1}")
        limit = min(config.max_new_tokens or DEFAULT_MAX_NEW_TOKENS, window - min(map(len, prompts)))

        def ends(tokens: Any, lengths: Any) -> Any:
            return lengths >= window

        hypotheses = generate(
            self.model,
            prompts,
            self._within(config, limit),
            logits_processors=logits_processors,
            stopping_criteria=[*stopping_criteria, ends],
            rng=Rng(seed),
            indices=indices,
            sequence_bias=encode_phrases(sequence_bias, self.tokenizer, len(prompts)),
            special_tokens=self.defaults is not None,
            beam_history=beam_history,
            prefix_cache=self.prefix_cache,
        )
        return [
            [each._replace(finished=each.finished and len(prompt) + len(each.tokens) < window) for each in row]
            for prompt, row in zip(prompts, hypotheses, strict=True)
        ]

    def stream(
        self,
        prompt: Prompt,
        config: GenerationConfig | None = None,
        *,
        sequence_bias: Sequence[str] | None = None,
        seed: int = 0,
        logits_processors: Sequence[LogitsProcessor] = (),
        stopping_criteria: Sequence[StoppingCriteria] = (),
        context: str = "error",
        **overrides: Any,
    ) -> Iterator[str]:
        """Continue a prompt, yielding text as it is generated.

        The yielded texts concatenate to the text that `__call__([prompt])` returns for the same arguments. Characters
        that take several tokens are yielded once they are complete. Arguments are those of `outputs`; beam search
        and several outputs cannot be streamed.

        Raises:
            DataError: For a prompt with unknown characters.
            ConfigError: For invalid or contradictory settings.
        """
        config = self.resolve_config(config, **overrides)
        if config.method == "beam" or config.num_return_sequences > 1:
            raise ConfigError("num_beams and num_return_sequences above 1 cannot be streamed; expected 1 of each")
        (text,) = self._texts([prompt], config, sequence_bias, 0, context)
        return self._stream(text, config, seed, logits_processors, stopping_criteria)

    def resolve_config(self, config: GenerationConfig | None = None, **overrides: Any) -> GenerationConfig:
        """Return the settings of a call of `outputs`, with the defaults of text generation.

        Raises:
            ConfigError: For invalid or contradictory settings, and for `unsupported_fields`.
        """
        if config is None:
            config = DEFAULT_SAMPLING if self.defaults is None else self.defaults
        config = GenerationConfig.resolve(config, overrides)
        default = GenerationConfig()
        for name in sorted(self.unsupported_fields if self.defaults is None else ()):
            if getattr(config, name) != getattr(default, name):
                raise ConfigError(f"{name} does not apply to text generation; omit it")
        if config.max_new_tokens is None:
            config = dataclasses.replace(config, max_new_tokens=DEFAULT_MAX_NEW_TOKENS)
        return config

    def encode(self, prompts: Sequence[Prompt], first_index: int = 0) -> list[list[int]]:
        """Return the token ids of prompts.

        Args:
            prompts: Texts to continue, their token ids, or chats.
            first_index: Index of the first prompt; errors count from 1.

        Raises:
            DataError: For a prompt with unknown characters, and for a single prompt instead of a list.
            CheckpointError: For a chat, if the checkpoint has no chat template.
        """
        if isinstance(prompts, str | Mapping) or not hasattr(prompts, "__len__"):
            raise DataError(f"prompts is {prompts!r}; expected a list of texts")
        if any(isinstance(prompt, Mapping | Integral) for prompt in prompts):
            raise DataError(
                "prompts is a single chat or a single list of token ids; expected a list of them: "
                '[[{"role": "user", "content": "..."}]]'
            )
        return [self._encode(prompt, number) for number, prompt in enumerate(prompts, start=first_index + 1)]

    def _encode(self, prompt: Prompt, number: int) -> list[int]:
        tokenizer = self.tokenizer
        if not isinstance(prompt, str):
            if not isinstance(prompt, Sequence) or not prompt or not isinstance(prompt[0], Mapping):
                return check_tokens(f"prompt {number}", prompt, self.model.vocab_size)
            if isinstance(tokenizer, Tokenizer):
                raise ConfigError(f"prompt {number} is a chat; expected a text: this model has no chat template")
            return tokenizer.encode(tokenizer.apply_chat_template(prompt), special_tokens=False)  # type: ignore[arg-type]
        if isinstance(tokenizer, PretrainedTokenizer):
            start = (self.model.config.bos_id, self.model.config.eos_id)
            return tokenizer.encode(prompt) or [index for index in start if index is not None][:1]
        ids = tokenizer.encode_text(prompt or "\n")
        if not prompt and UNK_ID in ids:
            raise DataError(f"prompt {number} is empty and the tokenizer has no line end; expected some text")
        if UNK_ID in ids:
            characters = dict.fromkeys(tokenizer.normalize(prompt))
            unknown = [each for each in characters if UNK_ID in tokenizer.encode_text(each)]
            raise DataError(
                f"prompt {number} has characters that the tokenizer does not know: {', '.join(map(repr, unknown))}"
            )
        return ids

    def _texts(
        self, prompts: Sequence[Prompt], config: GenerationConfig, sequence_bias: Any, first_index: int, context: str
    ) -> list[_Text]:
        """Return one text per sample."""
        if context not in ("error", "slide"):
            raise ConfigError(f"context is {context!r}; expected 'error' or 'slide'")
        encoded = self.encode(prompts, first_index)
        limits = [config.max_new_tokens or 0] * len(encoded)
        if context == "error" or config.method == "beam":
            limits = [self._limit(ids, config, number) for number, ids in enumerate(encoded, start=first_index + 1)]
        phrases = encode_phrases(sequence_bias, self.tokenizer, len(encoded))
        samples = config.num_return_sequences
        if config.method == "beam":
            samples = 1  # beam search finds the best continuations of one text
        return [
            _Text(
                index, (first_index + index) * samples + sample, ids, limit, None if phrases is None else phrases[index]
            )
            for index, (ids, limit) in enumerate(zip(encoded, limits, strict=True))
            for sample in range(samples)
        ]

    def _stream(
        self,
        text: _Text,
        config: GenerationConfig,
        seed: int,
        logits_processors: Sequence[LogitsProcessor],
        stopping_criteria: Sequence[StoppingCriteria],
    ) -> Iterator[str]:
        decoder = DecodeStream(self.tokenizer.decode, text.prompt)
        for number in itertools.count():
            if text.is_done:
                break
            chunk = self._chunk(text)
            options = self._chunk_options([chunk], config, Rng(seed).fold_in("chunk", number))
            options |= {"logits_processors": logits_processors, "stopping_criteria": stopping_criteria}
            batch = stream_batch(self.model, [chunk.context], **options)
            ((sample,),) = samples = start_samples(batch)
            length = len(chunk.context)
            for _ in stream_samples(batch, samples):
                new = sample.tokens[length:]
                length += len(new)
                text.tokens += new
                if decoded := decoder.step(*new):
                    yield decoded
            text.stopped = sample.status in ("eos", "stopped")
        if rest := decoder.finish():
            yield rest

    def _chunk(self, text: _Text) -> _Chunk:
        """Return the next chunk of a text: the context that the model sees, and the tokens to generate after it."""
        tokens, window = [*text.prompt, *text.tokens], self.context_length
        context = tokens if len(tokens) < window else tokens[-(window // 2) :]
        return _Chunk(text, context, min(text.limit - len(text.tokens), window - len(context)))

    def _chunk_options(self, batch: Sequence[_Chunk], config: GenerationConfig, rng: Rng) -> dict[str, Any]:
        """Return the arguments of `generate` for chunks with as many new tokens."""
        config = self._within(config, batch[0].max_new_tokens)
        if config.method != "beam":
            config = dataclasses.replace(config, num_return_sequences=1)
        phrases = [chunk.text.phrases for chunk in batch]
        return {
            "config": config,
            "rng": rng,
            "indices": [chunk.text.stream for chunk in batch],
            "sequence_bias": None if phrases[0] is None else phrases,
            "special_tokens": self.defaults is not None,
            "prefix_cache": self.prefix_cache,
        }

    def _within(self, config: GenerationConfig, limit: int) -> GenerationConfig:
        """Return the settings of `generate` for at most `limit` new tokens."""
        special = range(len(SPECIAL_TOKENS)) if self.defaults is None else ()
        return dataclasses.replace(
            config,
            max_new_tokens=limit,
            min_new_tokens=min(config.min_new_tokens, limit),
            suppress_tokens=(*special, *config.suppress_tokens),
        )

    def _batches(self, chunks: Sequence[_Chunk], batch_tokens: int) -> Iterator[list[_Chunk]]:
        """Group chunks that are generated together: as many new tokens, and the longest first."""
        groups: dict[int, list[int]] = {}
        for row in sorted(range(len(chunks)), key=lambda row: -len(chunks[row].context)):
            groups.setdefault(chunks[row].max_new_tokens, []).append(row)
        lengths = [self.context_length] * len(chunks)
        for group in groups.values():
            for rows in fill_batches(group, lengths, batch_tokens):
                yield [chunks[row] for row in rows]

    def _limit(self, ids: Sequence[int], config: GenerationConfig, number: int) -> int:
        """Return the maximum of new tokens for a prompt; raise ConfigError if they do not fit into the context."""
        defaults = GenerationConfig() if self.defaults is None else self.defaults
        limit, left = config.max_new_tokens or 0, self.context_length - len(ids)
        is_default = limit == (defaults.max_new_tokens or DEFAULT_MAX_NEW_TOKENS)
        if left < 1 or (limit > left and not is_default):
            advice = "" if config.method == "beam" else ", or use context='slide'"
            raise ConfigError(
                f"prompt {number} has {len(ids)} tokens and max_new_tokens is {limit}; the context of the model has "
                f"{self.context_length}, so {len(ids) + limit - self.context_length} do not fit: shorten the prompt or "
                f"lower max_new_tokens{advice}"
            )
        return min(limit, left)

    def _output(self, prompt: list[int], hypothesis: Hypothesis) -> Output:
        # The space before a word belongs to its token, and the first one of a text is dropped: decode both.
        before, text = self.tokenizer.decode_batch([prompt, [*prompt, *hypothesis.tokens]])
        return Output(text_after(before, text), *hypothesis)


@dataclass
class _Text:
    """A text during generation.

    Attributes:
        index: Index of its prompt.
        stream: Index of its random stream.
        prompt: Token ids of the prompt.
        limit: Maximum of new tokens.
        phrases: Favored phrases.
        tokens: New tokens so far.
        stopped: True if it ended before the maximum length.
        hypotheses: The text as a hypothesis; several for beam search.
    """

    index: int
    stream: int
    prompt: list[int]
    limit: int
    phrases: list[list[list[int]]] | None
    tokens: list[int] = field(default_factory=list)
    stopped: bool = False
    hypotheses: list[Hypothesis] = field(default_factory=list)

    def extend(self, hypotheses: Sequence[Hypothesis], config: GenerationConfig) -> None:
        """Append the tokens of a chunk; beam search gives several hypotheses for its only chunk."""
        if self.hypotheses:
            (last,) = hypotheses
            tokens, total = [*self.tokens, *last.tokens], self.hypotheses[0].log_probability + last.log_probability
            length = len(tokens) + last.finished
            score = total / length_penalty(length, config.length_penalty, config.length_penalty_base)
            hypotheses = [Hypothesis(tokens, total, score, last.finished)]
        self.hypotheses = list(hypotheses)
        self.tokens, self.stopped = self.hypotheses[0].tokens, hypotheses[0].finished

    @property
    def is_done(self) -> bool:
        """True if nothing is left to generate."""
        return self.stopped or len(self.tokens) >= self.limit


class _Chunk(NamedTuple):
    """The context that the model sees, and the number of tokens to generate after it."""

    text: _Text
    context: list[int]
    max_new_tokens: int
