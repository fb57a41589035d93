"""Models of a server, with the functions that run their jobs."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import itertools
import math
import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from xformer.backends import to_host
from xformer.errors import ConfigError, DataError
from xformer.families.run_directory import RunDirectory
from xformer.generation import (
    BeamCandidate,
    BeamHistory,
    GenerationConfig,
    Rows,
    TokenAlternatives,
    TokenRecord,
    alignments,
)
from xformer.generation.engine import shared_engine
from xformer.models import attention_maps
from xformer.pipelines import (
    Classifier,
    Embedder,
    Output,
    Summarizer,
    TextGenerator,
    TextToText,
    Translator,
    check_source_lengths,
)
from xformer.pipelines.seq2seq import NUM_BEAMS_FOR_LENGTHS
from xformer.serve.jobs import Job, Worker
from xformer.serve.requests import AttentionRequest, ExploreRequest, Settings, check_phrases, check_unsupported, resolve
from xformer.serve.tokens import Json, TextStream, TokenJson, candidate_text, finite, pieces, tokens_json

MAX_ATTENTION_BYTES = 16_000_000  # of a response
MAX_COMPUTED_BYTES = 512_000_000  # of all layers
MAX_SOURCE_LENGTH = 1024
_EXAMPLES = {
    Translator: "Ein Mann schläft .",
    Summarizer: "",
    TextGenerator: "Once upon a time",
    Embedder: "A man sleeps.",
    Classifier: "A great film.",
}
AnyPipeline = TextToText | TextGenerator | Embedder | Classifier


@dataclass(frozen=True)
class Generation:
    """The settings of a request that generates text.

    Attributes:
        sources: Token ids of each row.
        config: Settings.
        options: Further arguments of the pipeline: prefix, sequence_bias, target_length, length_unit.
        stop: Texts that end outputs.
        seed: Seed of sampling; None: a new one.
        num_alternatives: Alternatives to record; None: no probabilities are recorded.
        stream: Emit the text of rows as it is generated, as events "text".
        num_copies: Rows of each source.
    """

    sources: list[list[int]]
    config: GenerationConfig
    options: dict[str, Any] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    seed: int | None = None
    num_alternatives: int | None = None
    stream: bool = False
    num_copies: int = 1

    @property
    def is_single(self) -> bool:
        """True if each row has one history at a time: greedy search, or one sample."""
        return self.config.method != "beam" and self.config.num_return_sequences == 1


@dataclass
class Row:
    """One output that is generated for a job.

    Attributes:
        job: The job.
        generation: Settings of the request.
        number: Index of the output among those of the job.
        ids: Token ids of the source or prompt.
        text: The output as text.
        outputs: The results, best first.
        steps: Probabilities of the tokens, if requested.
    """

    job: Job
    generation: Generation
    number: int
    ids: list[int]
    text: TextStream
    outputs: list[Output] = field(default_factory=list)
    steps: list[TokenAlternatives] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        """True if the output must not continue."""
        return self.job.is_stopped or self.text.is_stopped


class ServedModel:
    """A model with its pipeline and the worker that runs it.

    Args:
        name: Id of the model.
        pipeline: Pipeline of the model.
        directory: Directory of a run, for its training log; None without one.
        backend: Name of the array library.
        max_tokens: Maximum of new tokens.
        max_batch: Maximum number of requests that generate text at the same time.
    """

    def __init__(
        self,
        name: str,
        pipeline: AnyPipeline,
        *,
        directory: str | os.PathLike[str] | None = None,
        backend: str = "numpy",
        max_tokens: int = 1024,
        max_batch: int = 32,
    ) -> None:
        self.name, self.pipeline, self.backend, self.max_tokens = name, pipeline, backend, max_tokens
        run = None if directory is None else RunDirectory(directory)
        self.log = run.log if run is not None and run.log.is_file() else None
        training = {} if run is None else run.read_config().get("recipe", {}).get("training", {})
        self.label_smoothing = training.get("label_smoothing", 0.0)
        self.created = int(time.time())
        self.worker = Worker(f"xformer {name}", max_batch=max_batch)

    @property
    def task(self) -> str:
        """Task of the model: "translation", "language_modeling", "embedding", ..."""
        return self.pipeline.task

    def describe(self) -> Json:
        """Return the entry of the list of models."""
        pipeline, model = self.pipeline, self.pipeline.model
        config: Any = model.config
        generates = isinstance(pipeline, TextToText | TextGenerator)
        is_seq2seq = isinstance(pipeline, TextToText)
        if is_seq2seq:
            layers = config.num_encoder_layers, config.num_decoder_layers
        else:
            layers = (0, config.num_layers) if generates else (config.num_layers, 0)
        context = pipeline.context_length if isinstance(pipeline, TextGenerator) else config.max_positions
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "user",
            "task": self.task,
            "class": type(model).__name__,
            "backend": self.backend,
            "num_parameters": model.parameter_count(),
            "vocab_size": model.vocab_size if generates else config.vocab_size,
            "encoder_layers": layers[0],
            "decoder_layers": layers[1],
            "heads": config.num_heads,
            "context_length": context,
            "attention": self.attention_kinds,
            "supports": {
                "beam": generates,
                "sampling": generates,
                "target_length": is_seq2seq,
                "topics": generates,
                "prefix": is_seq2seq,
                "chat": self.has_chat,
            },
            "defaults": self._defaults() if generates else None,
            "has_log": self.log is not None,
            "example": _EXAMPLES[type(pipeline)],
        }

    def _defaults(self) -> Json:
        """Return the settings of requests that have none."""
        config = resolve(self.pipeline, {}, self.max_tokens)  # type: ignore[arg-type]
        return config.to_dict() | {"do_sample": config.method == "sampling"}

    @property
    def attention_kinds(self) -> list[str]:
        """Kinds of attention that the model has."""
        if isinstance(self.pipeline, TextToText):
            return ["encoder", "decoder", "cross"]
        return ["decoder"] if isinstance(self.pipeline, TextGenerator) else ["encoder"]

    @property
    def has_chat(self) -> bool:
        """True if the model has a chat template."""
        return isinstance(self.pipeline, TextGenerator) and bool(self.pipeline.tokenizer.chat_templates)

    # --- Inputs -------------------------------------------------------------------------------------------------------

    @property
    def source_tokenizer(self) -> Any:
        """Tokenizer of sources, prompts and texts."""
        return self.pipeline.tokenizers.source if isinstance(self.pipeline, TextToText) else self.pipeline.tokenizer

    @property
    def target_tokenizer(self) -> Any:
        """Tokenizer of outputs."""
        return self.pipeline.tokenizers.target if isinstance(self.pipeline, TextToText) else self.pipeline.tokenizer

    def encode(self, texts: Sequence[Any]) -> list[list[int]]:
        """Return the token ids of sources, prompts, chats or texts, as a search expects them.

        Raises:
            DataError: For a text that is too long or has unknown characters.
        """
        if not isinstance(self.pipeline, TextToText):
            return [list(map(int, ids)) for ids in self.pipeline.encode(texts)]
        encoded, _ = self.pipeline.truncate(self.pipeline.encode(texts))
        check_source_lengths(encoded, MAX_SOURCE_LENGTH)
        return encoded

    def encode_request(self, request: ExploreRequest | AttentionRequest) -> list[int]:
        """Return the token ids of the text or the chat of a request.

        Raises:
            DataError: Unless there is one of them, and for an invalid one.
        """
        if (request.text is None) == (request.messages is None):
            raise DataError("expected one of text and messages")
        if request.messages is not None and not self.has_chat:
            raise DataError(f"model {self.name!r} has no chat template; expected text instead of messages")
        (ids,) = self.encode([request.text if request.messages is None else request.messages])
        if not ids:
            raise DataError("text is blank; expected some text")
        return ids

    def source_ids(self, ids: list[int]) -> list[int]:
        """Return the ids of a source as the encoder sees them, with eos."""
        return [*ids, *self.pipeline.suffix] if isinstance(self.pipeline, TextToText) else ids

    # --- Generation ---------------------------------------------------------------------------------------------------

    def generation(self, request: Any, settings: Settings, sources: list[list[int]], **fields: Any) -> Generation:
        """Return the settings of a request."""
        options: dict[str, Any] = {"sequence_bias": request.sequence_bias or []}
        check_phrases(options["sequence_bias"])
        names = ("prefix", "target_length", "length_unit")
        if isinstance(self.pipeline, TextToText) and hasattr(request, "prefix"):
            options |= {name: getattr(request, name) for name in names}
            if (options["target_length"] or 0) > self.max_tokens:
                raise ConfigError(f"target_length is {options['target_length']}; expected at most {self.max_tokens}")
        else:
            check_unsupported(request, names, "applies to encoder-decoders only")
        config = resolve(self.pipeline, settings, self.max_tokens)  # type: ignore[arg-type]
        if options.get("target_length") is not None and config.method == "greedy":  # as the pipeline does
            config = dataclasses.replace(config, num_beams=NUM_BEAMS_FOR_LENGTHS)
        return Generation(sources, config, options=options, seed=request.seed, **fields)

    def generation_job(self, generation: Generation, timeout: float) -> Job:
        """Return a job that generates outputs; its result is a list of rows."""
        return Job(self.generate, generation, is_search=True, timeout=timeout)

    def generate(self, jobs: Sequence[Job]) -> None:
        """Generate the outputs of a job."""
        (job,), tokenizer, is_seq2seq = jobs, self.target_tokenizer, isinstance(self.pipeline, TextToText)
        generation: Generation = job.request
        texts = [
            Row(job, generation, number, ids, TextStream(tokenizer.decode, () if is_seq2seq else ids, generation.stop))
            for number, ids in enumerate(generation.sources)
        ]
        record = None if generation.num_alternatives is None else TokenRecord(generation.num_alternatives)
        counts = [0] * len(texts)

        def observe(tokens: Any, lengths: Any, rows: Rows) -> list[bool]:
            for number, index in enumerate(rows.indices.tolist()):
                row, output = texts[index], rows.history(number)
                output = output if is_seq2seq else output[len(row.ids) :]
                new = row.text.push(output[counts[index] :])
                counts[index] = max(counts[index], len(output))
                if new and generation.stream:
                    job.emit("text", (row.number, new))
            return [texts[index].is_done for index in rows.indices.tolist()]

        def stop(tokens: Any, lengths: Any) -> list[bool]:
            return [job.is_stopped] * lengths.shape[0]

        # Beams and samples are several sequences for each row; stop strings are applied after the search.
        hooks: dict[str, Any] = {"stopping_criteria": [observe if generation.is_single else stop]}
        if record is not None:
            hooks["stopping_criteria"].insert(0, record.observe)
            hooks["logits_processors"] = [record]
        for row, outputs in zip(texts, self._search(generation, hooks), strict=True):
            row.outputs = [self._finish(row, output, number == 0) for number, output in enumerate(outputs)]
            if record is not None and outputs:
                row.steps = record.steps(row.number, () if is_seq2seq else row.ids, row.outputs[0].tokens)
        job.finish(texts)

    def _search(self, generation: Generation, hooks: dict[str, Any]) -> list[list[Output]]:
        """Return the outputs of each row."""
        pipeline, options, ids = self.pipeline, generation.options, generation.sources
        seed = secrets.randbits(32) if generation.seed is None else generation.seed
        bias = [options["sequence_bias"]] * len(ids) if options["sequence_bias"] else None
        # Sums may depend on the number of rows, so a search with a seed shares no steps.
        is_reproducible = generation.config.method == "sampling" and generation.seed is not None
        with shared_engine(None) if is_reproducible else contextlib.nullcontext():
            if isinstance(pipeline, TextGenerator):
                found = pipeline.continue_ids(ids, generation.config, sequence_bias=bias, seed=seed, **hooks)
                return [[Output("", *each) for each in hypotheses] for hypotheses in found]
            if not isinstance(pipeline, TextToText):
                raise ConfigError(f"model {self.name!r} generates no text")
            names = (name for name in ("prefix", "target_length", "length_unit") if options.get(name) is not None)
            batches = pipeline.batches_of_ids(
                ids,
                generation.config,
                sequence_bias=bias,
                seed=seed,
                batch_tokens=len(ids) * (MAX_SOURCE_LENGTH + len(pipeline.suffix)),
                **{name: options[name] for name in names},
                **hooks,
            )
            outputs: list[list[Output]] = [[] for _ in ids]
            for index, each in itertools.chain.from_iterable(batches):
                outputs[index] = each
            return outputs

    def _finish(self, row: Row, output: Output, is_best: bool) -> Output:
        """Return an output with its text, which ends before stop texts, and emit the rest of its text."""
        stream, generation = row.text, row.generation
        if not generation.is_single:
            prompt = () if isinstance(self.pipeline, TextToText) else row.ids
            stream = TextStream(self.target_tokenizer.decode, prompt, generation.stop)
        rest = stream.push(output.tokens[stream.num_tokens :]) + stream.finish()
        if rest and is_best and generation.stream:
            row.job.emit("text", (row.number, rest))
        finished = output.finished and not row.job.is_stopped
        return output._replace(text=stream.text, finished=stream.is_stopped or finished)

    # --- Exploration --------------------------------------------------------------------------------------------------

    def explore_job(self, request: ExploreRequest, settings: Settings, ids: list[int], timeout: float) -> Job:
        """Return a job that generates from the ids of one text and shows the search."""
        generation = self.generation(request, settings, [ids], num_alternatives=request.num_alternatives)
        generation = dataclasses.replace(generation, seed=generation.seed or 0)
        return Job(self.explore, (request, generation), is_search=True, timeout=timeout)

    def explore(self, jobs: Sequence[Job]) -> None:
        """Generate from the text of a job, and emit tokens or beam steps, and a result with all of them."""
        (job,), start = jobs, time.monotonic()
        request, generation = job.request
        ids, config, pipeline = generation.sources[0], generation.config, self.pipeline
        tokenizer, is_seq2seq = self.target_tokenizer, isinstance(pipeline, TextToText)
        prompt = [] if is_seq2seq else ids
        record, streamed = TokenRecord(request.num_alternatives), TokenJson(tokenizer, prompt)
        source = {
            "text": request.text if request.text is not None else "",
            "tokens": tokens_json(self.source_tokenizer, self.source_ids(ids)),
        }
        sent = 0

        def on_step(index: int, candidates: list[BeamCandidate], best: list[int]) -> None:
            if request.stream:
                text = tokenizer.decode([*prompt, *best[len(prompt) :]])[len(tokenizer.decode(prompt)) :]
                step = self._candidates_json(candidates)
                job.emit("step", {"index": index, "candidates": step, "best": text})

        def observe(tokens: Any, lengths: Any, rows: Rows) -> list[bool]:
            nonlocal sent
            record.observe(tokens, lengths, rows)
            if request.stream and config.method != "beam":
                for number, index in enumerate(rows.indices.tolist()):
                    output = rows.history(number)[len(prompt) :]
                    steps = record.steps(index, prompt, output) if index == 0 else []
                    # Several samples of one input have different histories; the first one is streamed.
                    if config.num_return_sequences == 1 and len(steps) > sent:
                        for step in steps[sent:]:
                            job.emit("token", {"index": index, **streamed.step(step)})
                        sent = len(steps)
            return [job.is_stopped] * lengths.shape[0]

        history = BeamHistory(on_step)
        hooks = {"logits_processors": [record], "stopping_criteria": [observe], "beam_history": history}
        if request.stream:
            job.emit("source", {"source": source})
        outputs = [output for each in self._search(generation, hooks) for output in each]
        results = [self._output_json(output, record, prompt) for output in outputs]
        length = len(outputs[0].tokens) if outputs else 0
        job.finish(
            {
                "model": self.name,
                "task": self.task,
                "method": "beam" if history.steps else config.method,
                "source": source,
                "outputs": results,
                "alignment": self._alignment(ids, outputs[0].tokens) if is_seq2seq and length else None,
                "beam": self._beam_json(history) if history.steps else None,
                "usage": usage(len(ids), length),
                "seconds": time.monotonic() - start,
            }
        )

    def _output_json(self, output: Output, record: TokenRecord, prompt: list[int]) -> Json:
        tokenizer = self.target_tokenizer
        steps = record.steps(0, prompt, output.tokens)
        # The first tokens of a forced prefix have no record.
        forced = output.tokens[: len(output.tokens) - len(steps)]
        view = TokenJson(tokenizer, prompt)
        tokens = [view.step(step) for step in [*(TokenAlternatives(token, 0.0, []) for token in forced), *steps]]
        if tokens:
            tokens[-1]["text"] += view.finish()
        return {
            "text": "".join(token["text"] for token in tokens),
            "score": finite(output.score),
            "log_probability": finite(output.log_probability),
            "finished": output.finished,
            "tokens": tokens,
        }

    def _alignment(self, ids: list[int], tokens: list[int]) -> list[list[float]]:
        model: Any = self.pipeline.model
        (weights,) = alignments(model, [self.source_ids(ids)], [tokens])
        return np.round(np.asarray(weights, np.float64), 5).tolist()

    def _candidates_json(self, candidates: Sequence[BeamCandidate]) -> list[Json]:
        tokenizer = self.target_tokenizer
        names = pieces(tokenizer, [each.token for each in candidates])
        texts = [candidate_text(tokenizer, each.token) for each in candidates]
        return [
            {
                "id": each.token,
                "token": name,
                "text": text,
                "group": each.group,
                "parent": each.parent,
                "log_probability": finite(each.log_probability),
                "score": finite(each.score),
                "status": each.status,
            }
            for each, name, text in zip(candidates, names, texts, strict=True)
        ]

    def _beam_json(self, history: BeamHistory) -> Json:
        steps = [self._candidates_json(step) for step in history.steps[0]]
        groups = 1 + max((each.group for step in history.steps[0] for each in step), default=0)
        return {"groups": groups, "steps": steps}

    # --- Attention ----------------------------------------------------------------------------------------------------

    def attention_job(self, request: AttentionRequest, ids: list[int], timeout: float) -> Job:
        """Return a job that computes the attention weights of the ids of a text and of its output."""
        ids, outputs = self.source_ids(ids), list(request.output_ids or [])
        kinds = self.attention_kinds if request.kinds is None else request.kinds
        for kind in kinds:
            if kind not in self.attention_kinds:
                raise ConfigError(f"kinds has {kind!r}; expected any of {', '.join(self.attention_kinds)}")
        if not isinstance(self.pipeline, TextToText | TextGenerator) and outputs:
            raise ConfigError("output_ids does not apply to an encoder; omit it")
        self._check_attention(request, kinds, ids, outputs)
        return Job(self.attention, (request, kinds, ids, outputs), timeout=timeout)

    def _check_attention(self, request: AttentionRequest, kinds: Sequence[str], ids: list[int], out: list[int]) -> None:
        """Raise an error for ids out of range and for arrays that would be too large."""
        config: Any = self.pipeline.model.config
        vocab_size = getattr(self.pipeline.model, "vocab_size", math.inf)
        for token in out:
            if not 0 <= token < vocab_size:
                raise DataError(f"output_ids has {token}; expected 0 to {vocab_size - 1}")
        if isinstance(self.pipeline, TextToText):
            layers = {"encoder": config.num_encoder_layers, "decoder": config.num_decoder_layers}
            shapes = {"encoder": (len(ids), len(ids)), "decoder": (len(out), len(out)), "cross": (len(out), len(ids))}
            layers["cross"] = layers["decoder"]
        else:
            layers, length = {self.attention_kinds[0]: config.num_layers}, len(ids) + len(out)
            shapes = {self.attention_kinds[0]: (length, length)}
            if isinstance(self.pipeline, TextGenerator) and length > self.pipeline.context_length:
                raise DataError(f"the text has {length} tokens; expected at most {self.pipeline.context_length}")
        if request.layer is not None and request.layer >= max(layers.values()):
            raise ConfigError(f"layer is {request.layer}; expected 0 to {max(layers.values()) - 1}")
        sizes = {kind: 4 * config.num_heads * math.prod(shapes[kind]) for kind in layers}
        if sum(layers[kind] * size for kind, size in sizes.items()) > MAX_COMPUTED_BYTES:
            raise DataError("the text is too long to show its attention; expected a shorter one")
        sent = sum(sizes[kind] * (layers[kind] if request.layer is None else 1) for kind in kinds)
        if sent > MAX_ATTENTION_BYTES:
            raise DataError(f"the attention takes {sent / 1e6:.0f} MB; ask for one layer or kind, or shorten the text")

    def attention(self, jobs: Sequence[Job]) -> None:
        """Compute the attention weights of a job."""
        (job,) = jobs
        request, kinds, ids, outputs = job.request
        pipeline, source, target = self.pipeline, self.source_tokenizer, self.target_tokenizer
        labels = pieces(source, ids)
        output_labels = pieces(target, outputs)
        axes = {"encoder": (labels, labels), "cross": (output_labels, labels)}
        prompt = [] if isinstance(pipeline, TextToText) else ids
        if isinstance(pipeline, TextToText):
            start = [pipeline.model.config.bos_id, *outputs[:-1]]
            axes["decoder"] = output_labels, pieces(target, start)
            maps = attention_maps(pipeline.model, [ids], [start]) if outputs else {}
            if not outputs:
                maps = {"encoder": attention_maps(pipeline.model, [ids])["encoder"]} if "encoder" in kinds else {}
        else:
            both = labels + output_labels
            axes["decoder"] = both, both
            maps = attention_maps(pipeline.model, [[*ids, *outputs]])
        layers = slice(None) if request.layer is None else slice(request.layer, request.layer + 1)
        result = {}
        for kind in kinds:
            selected = [to_host(array)[0] for array in maps.get(kind, [])[layers]]
            if selected:
                result[kind] = _array_json(np.stack(selected), *axes[kind])
        job.finish(
            {
                "model": self.name,
                "source": {"text": request.text or "", "tokens": tokens_json(source, ids)},
                "output": {"tokens": tokens_json(target, outputs, prompt)},
                "attention": result,
            }
        )

    # --- Encoders -----------------------------------------------------------------------------------------------------

    def embed_job(self, texts: list[str], timeout: float) -> Job:
        """Return a job that computes vectors or classes of texts."""
        return Job(self.embed, texts, key="embed", timeout=timeout)

    def embed(self, jobs: Sequence[Job]) -> None:
        """Compute the vectors or classes of the texts of several jobs in common batches."""
        pipeline: Any = self.pipeline
        results = pipeline([text for job in jobs for text in job.request])
        start = 0
        for job in jobs:
            job.finish(results[start : start + len(job.request)])
            start += len(job.request)


def usage(prompt_tokens: int, completion_tokens: int) -> Json:
    """Return the numbers of tokens as in the API of OpenAI."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def _array_json(array: Any, queries: list[str], keys: list[str]) -> Json:
    data = np.ascontiguousarray(array, dtype="<f4")
    return {
        "shape": list(data.shape),
        "dtype": "float32",
        "data": base64.b64encode(data.tobytes()).decode("ascii"),
        "queries": queries,
        "keys": keys,
    }
