"""From prompts to texts that go on from them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

from xformer.backends import Array, array_namespace, device, from_host
from xformer.config import check_keys
from xformer.errors import CheckpointError, ConfigError, DataError
from xformer.generation import DecodingOptions, Hypothesis, generate
from xformer.models import LanguageModel
from xformer.models.cache import DecodingCache
from xformer.models.config import LanguageModelConfig
from xformer.pipelines.requests import GenerationRequest
from xformer.random import Rng
from xformer.runs.run_directory import RunDirectory
from xformer.text import SPECIAL_TOKENS, UNK_ID, Tokenizer
from xformer.threads import blas_threads, num_threads, parallel_map
from xformer.training.data_parallel import shards_for

# What a request without any such setting means: nanoGPT's way to write.
DEFAULT_MAX_LENGTH = 500
DEFAULT_SAMPLING = {"temperature": 0.8, "top_k": 200}
_SAMPLING = ("temperature", "top_k", "top_p", "min_p")
# The fields of GenerationRequest and DecodingOptions that mean something without a source and without an end.
SETTINGS = (
    "num_beams", "num_return_sequences", "num_beam_groups", "diversity_penalty", "keep_greedy", "max_length", "topics", "topic_strength",
    "no_repeat_ngram_size", "repetition_penalty", *_SAMPLING, "seed", "batch_tokens",
)  # fmt: skip


class Continuation(NamedTuple):
    """What was written after a prompt. log_probability: of these tokens, in nats, as in generation.Hypothesis."""

    text: str
    tokens: list[int]
    log_probability: float


class TextGenerator:
    """A language model with its tokenizer: `TextGenerator.from_pretrained("run")(["ROMEO:"], seed=1)`.

    context_length: how many tokens the model sees at a time (default: its max_positions). A text that outgrows it goes
    on from its later half. Pieces of text have no end: an output is as long as it may be.

    Raises CheckpointError when model and tokenizer do not fit, ConfigError for a context in which nothing can be
    written.
    """

    task = "language_modeling"

    def __init__(self, model: LanguageModel, tokenizer: Tokenizer, *, context_length: int | None = None) -> None:
        if tokenizer.vocab_size != model.vocab_size:
            raise CheckpointError(
                f"the tokenizer has {tokenizer.vocab_size} tokens, the model {model.vocab_size}; they are not of one "
                "run"
            )
        self.model, self.tokenizer = model, tokenizer
        most = model.config.max_positions
        self.context_length = most if context_length is None else context_length
        # The search keeps a learned position free for the token after the last.
        self._sight = min(self.context_length, most - 1) if model.config.positions == "learned" else self.context_length
        if self._sight < 2:
            raise ConfigError(f"the model sees {self.context_length} tokens at a time; expected at least 3 to write in")
        self._writer: Any = _TextAlone(model)

    @classmethod
    def from_pretrained(cls, directory: str | os.PathLike[str], *, xp: Any = "numpy", dtype: Any = None) -> Self:
        """Load the best model of a run of `xformer train-lm`.

        Raises CheckpointError when something is missing, damaged, or does not belong to the run, ConfigError when the
        run is of another task.
        """
        run = RunDirectory(Path(directory))
        config = run.read_config_for(cls.task)
        training = config.get("recipe", {}).get("training", {})
        model = LanguageModel.load(run.model, xp=xp, dtype=dtype)
        return cls(model, run.load_tokenizer("joint"), context_length=training.get("context_length"))

    def __call__(self, prompts: Sequence[str], **settings: Any) -> list[Any]:
        """Continue each prompt; a prompt that is empty begins after a line end.

        settings: max_length (default 500 tokens), num_return_sequences, seed, temperature, top_k, top_p, min_p, num_beams, topics and
        others of GenerationRequest and DecodingOptions (SETTINGS). Without a beam and without any setting of sampling,
        texts are sampled with temperature 0.8 from the 200 best tokens; top_k=1 is greedy search.
        Returns what follows each prompt; with num_return_sequences above 1, a list of texts each, the most probable first.

        Raises DataError for a prompt with characters that the model has never seen, ConfigError for settings that are
        unknown or contradict each other.
        """
        found = [[output.text for output in each] for each in self.continuations(prompts, **settings)]
        return found if settings.get("num_return_sequences", 1) > 1 else [texts[0] for texts in found]

    def continuations(
        self, prompts: Sequence[str], *, first_number: int = 0, **settings: Any
    ) -> list[list[Continuation]]:
        """The n best continuations of each prompt, with their log-probabilities. Arguments as above.

        first_number: how many prompts came before these, when they are part of a longer list: what is drawn for a
        prompt depends on its number.
        """
        request = self.request(**settings)
        encoded = self.encode(prompts, first_number)
        topics = request.topics_of_each(len(encoded))
        phrases = (
            None
            if topics is None
            else [[self.tokenizer.phrase_ids(topic).anywhere for topic in each] for each in topics]
        )
        samples = request.decoding.num_return_sequences
        if request.decoding.method == "beam":
            self._check_sight(encoded, request.decoding, first_number)
            samples = 1  # text, of which the beam finds the n best continuations
        texts = [
            _Text(number, (first_number + number) * samples + sample, ids, None if phrases is None else phrases[number])
            for number, ids in enumerate(encoded)
            for sample in range(samples)
        ]
        found: list[list[Continuation]] = [[] for _ in encoded]
        for text, written in self._write(texts, request):
            prompt = encoded[text.number]
            found[text.number] += [self._continuation(prompt, *each) for each in written]
        return [sorted(each, key=lambda output: -output.log_probability) for each in found]

    def request(self, **settings: Any) -> GenerationRequest:
        """The settings as a request, defaults filled in; raises ConfigError for those that mean nothing here."""
        for name in settings:
            check_keys([name], set(SETTINGS), "the request")
        given = {name: value for name, value in settings.items() if value is not None}
        if given.get("num_beams", 1) == 1 and not given.keys() & _SAMPLING:
            given |= DEFAULT_SAMPLING
        return GenerationRequest.of(**{"max_length": DEFAULT_MAX_LENGTH, **given})

    def encode(self, prompts: Sequence[str], first_number: int = 0) -> list[list[int]]:
        """Turn prompts into token ids; raises DataError, with the number, for what the model has never seen."""
        if isinstance(prompts, str):
            raise DataError("got one text; expected a list of prompts: put it in brackets")
        encoded = []
        for number, prompt in enumerate(prompts, start=first_number + 1):
            ids = self.tokenizer.encode_text(prompt or "\n")
            if not prompt and UNK_ID in ids:
                raise DataError(f"prompt {number} is empty, and the model has never seen a line end; give it some text")
            if UNK_ID in ids:
                characters = dict.fromkeys(self.tokenizer.normalize(prompt))
                unknown = [each for each in characters if UNK_ID in self.tokenizer.encode_text(each)]
                raise DataError(
                    f"prompt {number} has characters that the model has never seen: "
                    f"{', '.join(map(repr, unknown))}; leave them out"
                )
            encoded.append(ids)
        return encoded

    # --- LayerFactory of the above -------------------------------------------------------------------------------------------

    def _write(
        self, texts: Sequence[_Text], request: GenerationRequest
    ) -> Iterable[tuple[_Text, list[tuple[list[int], float]]]]:
        """Write all texts to their end, piece by piece; of each, what was written with its log-probabilities.

        What is drawn depends on the seed, the prompt's number, the sample and the piece, never on the other texts.
        """
        wanted = request.decoding.max_length or DEFAULT_MAX_LENGTH
        for number in itertools.count():
            pieces = [self._piece(text, wanted) for text in texts if len(text.written) < wanted]
            if not pieces:
                break
            rng = Rng(request.seed).fold("piece", number)
            found = self._generate(pieces, request, rng)
            if request.decoding.method == "beam":  # in one piece
                return [
                    (piece.text, [(each.tokens, each.log_probability) for each in hypotheses])
                    for piece, hypotheses in found
                ]
            for piece, (best, *_) in found:
                piece.text.written += best.tokens
                piece.text.log_probability += best.log_probability
        return [(text, [(text.written, text.log_probability)]) for text in texts]

    def _piece(self, text: _Text, wanted: int) -> _Piece:
        """What the model is shown of a text, and how much it is to write before it is shown something else."""
        tokens = [*text.prompt, *text.written]
        shown = tokens if len(tokens) < self._sight else tokens[-(self._sight // 2) :]
        return _Piece(text, shown, min(wanted - len(text.written), self._sight - len(shown)))

    def _generate(
        self, pieces: Sequence[_Piece], request: GenerationRequest, rng: Rng
    ) -> list[tuple[_Piece, list[Hypothesis]]]:
        def write(batch: Sequence[_Piece]) -> list[tuple[_Piece, list[Hypothesis]]]:
            options = replace(request.decoding, max_length=batch[0].room)
            if options.method != "beam":
                options = replace(options, num_return_sequences=1)
            found = generate(
                self._writer,
                [piece.shown for piece in batch],
                options,
                rng=rng,
                prompt_numbers=[piece.text.stream for piece in batch],
                topics=[piece.text.topics or [] for piece in batch] if batch[0].text.topics is not None else None,
                special_tokens=False,
            )
            return list(zip(batch, found, strict=True))

        rows = max(1, request.batch_tokens // self._sight)
        batches = iter(_alike(pieces, rows))
        allowed = num_threads()
        threads = shards_for(self.model, allowed)
        done: list[tuple[_Piece, list[Hypothesis]]] = []
        while group := list(itertools.islice(batches, threads)):
            with blas_threads(allowed // threads):
                done += [each for results in parallel_map(write, group) for each in results]
        return done

    def _check_sight(self, encoded: Sequence[Sequence[int]], options: DecodingOptions, first_number: int) -> None:
        for number, ids in enumerate(encoded, start=first_number + 1):
            if len(ids) + (options.max_length or 0) > self._sight:
                raise ConfigError(
                    f"prompt {number} of {len(ids)} tokens and max_length {options.max_length} are more than the "
                    f"{self._sight} tokens that this model sees, and beam search has to see both at once; lower "
                    "max_length, or leave out num_beams to sample"
                )

    def _continuation(self, prompt: list[int], tokens: list[int], log_probability: float) -> Continuation:
        # The space before a word belongs to its token, and the first one of a text loses it.
        before, whole = self.tokenizer.decode_batch([prompt, [*prompt, *tokens]])
        return Continuation(whole[len(before) :], tokens, log_probability)


@dataclass
class _Text:
    """A text on its way. number: of its prompt; stream: of what is drawn for it."""

    number: int
    stream: int
    prompt: list[int]
    topics: list[list[list[int]]] | None

    def __post_init__(self) -> None:
        self.written: list[int] = []
        self.log_probability = 0.0


class _Piece(NamedTuple):
    """What the model is shown, and how many tokens there is room for after it."""

    text: _Text
    shown: list[int]
    room: int


def _alike(pieces: Sequence[_Piece], rows: int) -> list[list[_Piece]]:
    """Batches of at most so many pieces, all of one length, to be continued by as many tokens."""
    groups: dict[tuple[int, int], list[_Piece]] = {}
    for piece in pieces:
        groups.setdefault((len(piece.shown), piece.room), []).append(piece)
    return [group[first : first + rows] for group in groups.values() for first in range(0, len(group), rows)]


class _TextAlone:
    """A language model that writes no special token: its tokenizer has them, the text it learned from did not."""

    def __init__(self, model: LanguageModel) -> None:
        self.model, self.vocab_size = model, model.vocab_size
        self.config: LanguageModelConfig = model.config
        self.init_cache, self.named_parameters = model.init_cache, model.named_parameters
        weight = model.embedding.weight
        special = [token < len(SPECIAL_TOKENS) for token in range(model.vocab_size)]
        self._special = from_host(array_namespace(weight), special, device=device(weight))

    def decode_step(self, tokens: Array, cache: DecodingCache) -> Array:
        """Logits of the next token."""
        logits = self.model.decode_step(tokens, cache)
        return array_namespace(logits).where(self._special, -float("inf"), logits)
