"""Vectors and classes of texts, with an encoder such as BERT."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from xformer.backends import Array, array_namespace, device, to_host
from xformer.config import check_count
from xformer.data.token_rows import fill_batches
from xformer.errors import ConfigError, DataError, check_arguments, check_choice, nearest_hint
from xformer.models import BaseModel, Encoder, EncoderConfig, ImageEncoderConfig, LanguageModel
from xformer.models.encoder import last_token_mask, mean_of_tokens, normalized
from xformer.models.token_ids import check_one_each, check_tokens, pad
from xformer.pipelines.base import Pipeline, check_class
from xformer.pipelines.class_scores import ClassScores, class_scores, class_targets
from xformer.pipelines.sentence_transformers import MIN_LENGTH, POOLINGS, SCORES, Dense, read_embedder, read_reranker
from xformer.text.normalize import check_texts
from xformer.tokenizers import PretrainedTokenizer
from xformer.tokenizers.loading import load_with_settings

_Rows = Sequence[list[int]]  # token ids of texts, or their token types


class EncoderPipeline(Pipeline):
    """A model with its tokenizer: base class of `Embedder`, `Classifier` and `Reranker`.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        max_length: Maximum tokens of a text, special tokens included; the end of longer texts is not read, or the start
            if the files of the tokenizer say so. Default: that of the tokenizer, or the positions of the model.

    Raises:
        ConfigError: If max_length exceeds the positions of the model.
    """

    model_classes: ClassVar[tuple[type[BaseModel], ...]] = (Encoder,)

    def __init__(
        self, model: Encoder | LanguageModel, tokenizer: PretrainedTokenizer, *, max_length: int | None = None
    ) -> None:
        check_class("model", model, *self.model_classes)
        check_class("tokenizer", tokenizer, PretrainedTokenizer)
        limit = model.config.max_positions
        length = min(tokenizer.model_max_length or limit, limit) if max_length is None else max_length
        if not MIN_LENGTH <= length <= limit:
            raise ConfigError(f"max_length is {length}; expected {MIN_LENGTH} to {limit}, the positions of the model")
        self.max_length, self.tokenizer = length, tokenizer
        self.model: Any = model

    def token_ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of texts, special tokens included, truncated to max_length.

        Raises:
            DataError: For a single text, or an iterator, instead of a list.
        """
        return self.tokenizer.encode_truncated(texts, self.max_length)

    def encoded(self, rows: Sequence[str | list[int]], prompt: str = "") -> list[list[int]]:
        """Return the token ids of texts, each after a prompt; token ids stay as they are. All are truncated."""
        texts = iter(self.token_ids([prompt + row for row in rows if isinstance(row, str)]))
        size = self.model.config.vocab_size
        ids = [next(texts) if isinstance(row, str) else check_tokens("a text", row, size) for row in rows]
        return [each[: self.max_length] for each in ids]

    def _run(
        self, encoded: _Rows, function: Callable[..., Array], batch_tokens: int, types: _Rows | None = None
    ) -> Any:
        """Return function(states, mask=is_token) for all texts as a NumPy array with one row per text."""
        check_count("batch_tokens", batch_tokens)
        like = self.model._parameter
        xp, place = array_namespace(like), device(like)

        def run(rows: list[int]) -> Any:
            pad_id = self.model.config.pad_id or 0
            ids = pad([encoded[row] or [pad_id] for row in rows], pad_id)  # a blank text may have no tokens
            is_token: Any = np.asarray(pad([[True] * len(encoded[row]) or [False] for row in rows], False))
            if isinstance(self.model, LanguageModel):
                # Padding on the right changes no earlier state of a causal model.
                allowed = np.ones((1, 1), bool) if self.model.config.causal else is_token[:, None, None, :]
                states = self.model.states(ids, mask=xp.from_host(allowed, device=place))
            else:
                token_types = None if types is None else pad([types[row] or [0] for row in rows], 0)
                mask = xp.from_host(is_token[:, None, None, :], device=place)
                states = self.model(ids, token_types=token_types, mask=mask)
            return to_host(function(states, mask=xp.from_host(is_token, device=place)))

        order = sorted(range(len(encoded)), key=lambda row: len(encoded[row]))
        batches = fill_batches(order, [len(ids) for ids in encoded], batch_tokens)
        return np.concatenate(list(self._run_batches(run, batches)))[np.argsort(order)]


class Embedder(EncoderPipeline):
    """Compute a vector for each text: `Embedder.from_pretrained("all-MiniLM-L6-v2")(["A man sleeps."])`.

    Texts of similar meaning have similar vectors, for models that were trained for it (Reimers and Gurevych, 2019).

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        pooling: "mean" of the states of all tokens, "cls" for the state of the first one, or "lasttoken".
        dense: Dense layers for the pooled vectors, applied in turn.
        normalize: Divide vectors by their length, so that dot products are cosine similarities.
        truncate_dim: Number of features to keep, before `normalize`, of models that were trained for it (Kusupati et
            al., 2022). Default: all.
        max_length: As for `EncoderPipeline`.
        lower_case: Lowercase texts before tokenizing.
        prompts: Texts to put before each text, by name, e.g. {"query": "query: "}.
        default_prompt_name: Name of the prompt of calls that choose none.
        include_prompt: Pool the states of the prompt too.

    Attributes:
        num_features: Number of features of a vector, before it is truncated.

    Raises:
        ConfigError: For an unknown pooling or default prompt, dense layers whose features do not match, a
            max_length above the positions of the model, and a truncate_dim above the features of vectors.
    """

    task = "embedding"
    model_classes = (Encoder, LanguageModel)

    def __init__(
        self,
        model: Encoder | LanguageModel,
        tokenizer: PretrainedTokenizer,
        *,
        pooling: str = "mean",
        dense: Sequence[Dense] = (),
        normalize: bool = True,
        truncate_dim: int | None = None,
        max_length: int | None = None,
        lower_case: bool = False,
        prompts: Mapping[str, str] | None = None,
        default_prompt_name: str | None = None,
        include_prompt: bool = True,
    ) -> None:
        super().__init__(model, tokenizer.lower_cased() if lower_case else tokenizer, max_length=max_length)
        if pooling not in POOLINGS.values():
            raise ConfigError(f"pooling is {pooling!r}; expected 'mean', 'cls' or 'lasttoken'")
        self.pooling, self.normalize, self.include_prompt = pooling, normalize, include_prompt
        self.dense = list(dense)
        self.num_features: int = model.config.d_model
        for index, each in enumerate(self.dense):
            check_class(f"dense[{index}]", each, Dense)
            shape, expected = tuple(each.linear.weight.shape), self.num_features
            if shape[0] != expected:
                raise ConfigError(f"dense[{index}] has a weight of shape {shape}; expected {expected} in_features")
            self.num_features = shape[1]
        self.truncate_dim = self._check_dim(truncate_dim)
        self.prompts, self.default_prompt_name = dict(prompts or {}), default_prompt_name
        if isinstance(model, LanguageModel):
            self.attention_kinds = ("decoder",)
        self._prompt(None, default_prompt_name)

    @classmethod
    def _from_checkpoint(cls, model: Any, directory: Path) -> Self:
        settings = read_embedder(directory, model)
        return cls(model, load_with_settings(directory, settings.pop("tokenizer")), **settings)

    @check_arguments(
        batch_size="use batch_tokens",
        normalize_embeddings="use normalize, an argument of Embedder",
        output_value="use token_ids for token ids",
        show_progress_bar="nothing is printed: omit it",
        **dict.fromkeys(("convert_to_numpy", "convert_to_tensor"), "the result is a NumPy array"),
    )
    def __call__(
        self,
        texts: str | Sequence[str | list[int]],
        *,
        prompt: str | None = None,
        prompt_name: str | None = None,
        truncate_dim: int | None = None,
        batch_tokens: int = 4096,
    ) -> Any:
        """Return the vectors of texts, a NumPy array (texts, features); also called `encode`, as elsewhere.

        Args:
            texts: Texts, or lists of token ids; for a single text, the result is its vector, (features,).
            prompt: Text to put before each text. Default: that of prompt_name, or of the default prompt.
            prompt_name: Name of one of the prompts.
            truncate_dim: Number of features to keep. Default: that of the embedder.
            batch_tokens: Maximum tokens of a batch, padding included. On NumPy each core runs one batch.

        Raises:
            DataError: For an iterator instead of a list.
            ConfigError: For an unknown name of a prompt, a prompt that leaves no space for a text, or a truncate_dim
                above the features of vectors.
        """
        rows: Any = [texts] if isinstance(texts, str) else texts
        check_texts([row for row in rows if not isinstance(row, list)] if isinstance(rows, list) else rows)
        truncate_dim = self.truncate_dim if truncate_dim is None else self._check_dim(truncate_dim)
        prompt, skipped = self._prompt(prompt, prompt_name), 0
        if prompt and not self.include_prompt:
            (ids,) = self.tokenizer.encode_batch([prompt])
            skipped = len(ids) - (ids[-1] in self.tokenizer.special_ids)
            if skipped >= self.max_length:
                raise ConfigError(f"the prompt has {skipped} tokens; expected fewer than max_length {self.max_length}")
        if not len(rows):
            return np.zeros((0, truncate_dim or self.num_features), np.float32)
        encoded = self.encoded(rows, prompt)
        vectors = self._run(encoded, functools.partial(self._pool, skipped), batch_tokens)
        vectors = vectors if truncate_dim is None else self.truncate(vectors, truncate_dim)
        return vectors[0] if isinstance(texts, str) else vectors

    encode = __call__

    def truncate(self, vectors: Any, truncate_dim: int) -> Any:
        """Return the first features of vectors (texts, features), a NumPy array; normalized if the embedder does so.

        Args:
            vectors: Result of a call.
            truncate_dim: Number of features to keep.

        Raises:
            ConfigError: If it is above the features of vectors.
        """
        vectors = vectors[:, : self._check_dim(truncate_dim)]
        if not self.normalize:
            return vectors
        return vectors / np.maximum(np.sqrt(np.sum(vectors * vectors, axis=1, keepdims=True)), 1e-12)

    def _check_dim(self, truncate_dim: int | None) -> int | None:
        if truncate_dim is not None:
            check_count("truncate_dim", truncate_dim)
            if truncate_dim > (size := self.num_features):
                raise ConfigError(f"truncate_dim is {truncate_dim}; expected at most {size}, the features of a vector")
        return truncate_dim

    def _prompt(self, prompt: str | None, name: str | None) -> str:
        """Return the prompt of a call."""
        if prompt is not None:
            return prompt
        name = self.default_prompt_name if name is None else name
        if name is not None and name not in self.prompts:
            no_prompts = "the model has no prompts: omit it, or pass prompt"
            hint = nearest_hint(name, self.prompts) if self.prompts else no_prompts
            raise ConfigError(f"prompt_name is {name!r}; {hint}")
        return "" if name is None else self.prompts[name]

    def _pool(self, num_skipped: int, states: Array, *, mask: Array) -> Array:
        states, is_token = states[:, num_skipped:, ...], mask[:, num_skipped:]
        if self.pooling == "cls":
            vectors = states[:, 0, :]
        else:
            vectors = mean_of_tokens(states, last_token_mask(is_token) if self.pooling == "lasttoken" else is_token)
        for dense in self.dense:
            vectors = dense(vectors)
        return normalized(vectors) if self.normalize else vectors


class Prediction(NamedTuple):
    """Class of a text or an image.

    Attributes:
        label: Name of the most probable class.
        probability: Its probability; if the problem type of the model is "regression", the output itself.
        probabilities: Probability, or output, of each class by name.
    """

    label: str
    probability: float
    probabilities: dict[str, float]


def label_names(pipeline: str, config: EncoderConfig | ImageEncoderConfig, labels: Sequence[str] | None) -> list[str]:
    """Return the names of a model's classes: those given, those of its configuration, or "LABEL_0", ...

    Raises:
        ConfigError: If the model has no classifier, and for a wrong number of names or equal ones.
    """
    count = config.num_labels
    if not count:
        raise ConfigError(f"the model has no classifier (num_labels is 0); {pipeline} expects a fine-tuned model")
    labels = config.labels if labels is None else labels
    if labels is not None:
        check_texts(labels, "labels")
    names = [f"LABEL_{i}" for i in range(count)] if labels is None else list(labels)
    if len(names) != count:
        raise ConfigError(f"labels has {len(names)} names for {count} classes; expected one each")
    if len(set(names)) < count:
        raise ConfigError(f"labels is {names}; expected different names")
    return names


def class_predictions(logits: Any, labels: Sequence[str], problem_type: str) -> list[Prediction]:
    """Return the prediction of each row of logits (rows, classes), with the function that transformers applies."""
    is_independent = problem_type == "multi_label_classification" or len(labels) == 1
    function = "identity" if problem_type == "regression" else "sigmoid" if is_independent else "softmax"
    return predictions(logits, labels, function)


def predictions(logits: Any, labels: Sequence[str], function: str = "softmax") -> list[Prediction]:
    """Return the prediction of each row of logits (rows, classes), a NumPy array, with one of `_FUNCTIONS`."""
    results = []
    for row in _FUNCTIONS[function](logits.astype(np.result_type(logits, np.float32))).tolist():
        probabilities = dict(zip(labels, row, strict=True))
        best = max(probabilities, key=probabilities.__getitem__)
        results.append(Prediction(best, probabilities[best], probabilities))
    return results


def _softmax(logits: Any) -> Any:
    weights = np.exp(logits - logits.max(axis=1, keepdims=True)).astype(np.float64)
    return weights / weights.sum(axis=1, keepdims=True)


# Functions of logits that give probabilities or scores; exponentials in float32 have equal bits on all processors.
_FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "identity": lambda logits: logits,
    "sigmoid": lambda logits: np.exp(np.minimum(logits, 0.0)) / (np.float64(1.0) + np.exp(-np.abs(logits))),
    "softmax": _softmax,
    "tanh": np.tanh,
}


class Classifier(EncoderPipeline):
    """Classify texts: `Classifier.from_pretrained("distilbert-sst2")(["A great film."])`.

    Probabilities are the softmax over the classes. If the problem type of the model is "multi_label_classification", or
    if it has a single class, each probability is a sigmoid; for "regression" the outputs are returned as they are.

    `from_pretrained(directory, labels=["bad", "good"])` adds a new classifier to a checkpoint without one, see
    `load_pretrained`.

    Args:
        model: A model with a classifier.
        tokenizer: Its tokenizer.
        labels: Names of the classes. Default: those of the model's configuration, else "LABEL_0", ...
        max_length: As for `EncoderPipeline`.

    Raises:
        ConfigError: If the model has no classifier, or the number of labels is wrong.
    """

    task = "classification"
    head_options = ("num_labels", "labels", "problem_type")

    def __init__(
        self,
        model: Encoder,
        tokenizer: PretrainedTokenizer,
        *,
        labels: Sequence[str] | None = None,
        max_length: int | None = None,
    ) -> None:
        super().__init__(model, tokenizer, max_length=max_length)
        self.labels = label_names(type(self).__name__, model.config, labels)

    def __call__(self, texts: Sequence[str], *, batch_tokens: int = 4096) -> list[Prediction]:
        """Return the class of each text.

        Args:
            texts: Texts.
            batch_tokens: As for `Embedder`.

        Raises:
            DataError: For a single text, or an iterator, instead of a list.
        """
        check_texts(texts)
        if not len(texts):
            return []
        logits = self.class_logits(texts, batch_tokens=batch_tokens)
        return class_predictions(logits, self.labels, self.model.config.problem_type)

    def class_logits(self, texts: Sequence[str | list[int]], *, batch_tokens: int = 4096) -> Any:
        """Return the logits of texts, a NumPy array (texts, num_labels).

        Args:
            texts: Texts, or lists of token ids.
            batch_tokens: As for `Embedder`.
        """
        return self._run(self.encoded(texts), self.model.class_logits, batch_tokens)

    def evaluate(self, texts: Sequence[str], labels: Sequence[Any], *, batch_tokens: int = 4096) -> ClassScores:
        """Return scores of the predictions for texts whose labels are known: accuracy, macro F1, ...

        Args:
            texts: Texts.
            labels: The label of each text, by name; a list of names if there may be several, or values.
            batch_tokens: As for `Embedder`.

        Raises:
            DataError: For an unknown label, or another number of labels.
        """
        check_texts(texts)
        problem_type = self.model.config.problem_type
        check_one_each("labels", labels, len(texts))
        targets = class_targets(labels, self.labels, problem_type, "labels[{}]".format)
        return class_scores(self.class_logits(texts, batch_tokens=batch_tokens), targets, self.labels, problem_type)


class Ranked(NamedTuple):
    """A document and how well it answers a query.

    Attributes:
        position: Its index among the documents.
        score: Logit of the model, or what the activation of the `Reranker` makes of it; higher is better.
    """

    position: int
    score: float


class Reranker(EncoderPipeline):
    """Order documents by a query: `Reranker.from_pretrained("ms-marco-MiniLM-L6-v2")(query, documents)`.

    The model is a cross-encoder, which reads the query and a document together (Nogueira and Cho, 2019).

    Args:
        model: A model with a classifier of one label.
        tokenizer: Its tokenizer.
        max_length: Maximum tokens of a pair, special tokens included; the longer of both texts is cut.
            Default: that of the tokenizer, or the positions of the model.
        activation: Function of the logits: "identity", "sigmoid" or "tanh". `from_pretrained` reads what
            sentence-transformers wrote; without that, scores are logits.

    Raises:
        ConfigError: If the model has another number of labels, max_length exceeds its positions, or for an unknown
            activation.
    """

    task = "reranking"

    def __init__(
        self,
        model: Encoder,
        tokenizer: PretrainedTokenizer,
        *,
        max_length: int | None = None,
        activation: str = "identity",
    ) -> None:
        super().__init__(model, tokenizer, max_length=max_length)
        check_choice("activation", activation, SCORES)
        self.activation = activation
        if model.config.num_labels != 1:
            raise ConfigError(f"the model has {model.config.num_labels} labels; Reranker expects a model with one")
        self.tokenizer = tokenizer.truncated(self.max_length)

    @classmethod
    def _from_checkpoint(cls, model: Any, directory: Path) -> Self:
        settings = read_reranker(directory)
        tokenizer = load_with_settings(directory, settings["tokenizer"])
        tokenizer = tokenizer.lower_cased() if settings.get("lower_case") else tokenizer
        return cls(model, tokenizer, activation=settings["activation"])

    def __call__(
        self, query: str, documents: Sequence[str], *, top_k: int | None = None, batch_tokens: int = 4096
    ) -> list[Ranked]:
        """Return the documents with their scores, best first.

        Args:
            query: The query.
            documents: The documents.
            top_k: Return only that many documents. Default: all.
            batch_tokens: As for `Embedder`.

        Raises:
            DataError: If the query is not a text, or documents is not a list of texts.
        """
        if not isinstance(query, str):
            raise DataError(f"query has type {type(query).__name__}; expected a text")
        check_texts(documents, "documents")
        check_count("top_k", len(documents) or 1 if top_k is None else top_k)
        scores = self.scores([(query, document) for document in documents], batch_tokens=batch_tokens)
        order = sorted(range(len(scores)), key=lambda index: -scores[index])
        return [Ranked(index, scores[index]) for index in order[:top_k]]

    def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[list[int], list[int]]]:
        """Return the token ids and token types of pairs of a query and a document, truncated to max_length."""
        queries, documents = [[pair[side] for pair in pairs] for side in (0, 1)]
        return self.tokenizer.encode_pairs(queries, documents)

    def scores(self, pairs: Sequence[tuple[str, str]], *, batch_tokens: int = 4096) -> list[float]:
        """Return the score of each pair of a query and a document."""
        encoded = self.encode_pairs(pairs)
        types = [types for _, types in encoded] if self.model.config.num_token_types > 1 else None
        ids = [ids for ids, _ in encoded]
        if not ids:
            return []
        logits = self._run(ids, self.model.class_logits, batch_tokens, types)[:, 0]
        return list(_FUNCTIONS[self.activation](logits).tolist())
