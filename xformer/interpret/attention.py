"""Analyses of attention weights."""

from __future__ import annotations

from numbers import Real
from typing import Any

import numpy as np

from xformer.backends import Array, array_namespace, device, to_host
from xformer.config import check_count
from xformer.errors import ConfigError, ShapeError
from xformer.interpret.checks import check_model
from xformer.models import Encoder, LanguageModel
from xformer.models.token_ids import as_token_ids, ids_of
from xformer.tracing.activations import record


def attention_rollout(model: LanguageModel | Encoder, tokens: Any, *, residual: float = 0.5) -> Array:
    """Compute how much each position receives from each input token, through the attention of all layers.

    A layer mixes positions by its attention weights, averaged over heads, and the residual connection keeps a share of
    each position. The rollout is the product of these matrices over all layers (Abnar and Zuidema, 2020, "Quantifying
    Attention Flow in Transformers", section 3).

    Args:
        model: Language model or encoder.
        tokens: Ids (batch, length).
        residual: Share of the residual stream, 0 to 1.

    Returns:
        Array (batch, length, length) whose rows sum to one.

    Raises:
        ConfigError: If `residual` is out of range, or the model has another class.
    """
    if not isinstance(residual, Real) or not 0.0 <= residual <= 1.0:
        raise ConfigError(f"residual is {residual!r}; expected a number from 0 to 1")
    weights = _weights(model, tokens)
    xp, length = array_namespace(weights), weights.shape[-1]
    identity = xp.eye(length, dtype=weights.dtype, device=device(weights))
    rollout = xp.broadcast_to(identity, (weights.shape[1], length, length))
    for layer in range(weights.shape[0]):
        rollout = xp.matmul(residual * identity + (1.0 - residual) * xp.mean(weights[layer, ...], axis=1), rollout)
    return rollout


def attention_entropy(model: LanguageModel | Encoder, tokens: Any) -> Array:
    """Compute the entropy of the attention weights of each head and query, in nats.

    It is 0 if a query attends to one key, and log(n) if it attends to n keys equally (Ghader and Monz, 2017, "What does
    Attention in Neural Machine Translation Pay Attention to?", section 5).

    Args:
        model: Language model or encoder.
        tokens: Ids (batch, length).

    Returns:
        Array (layers, batch, heads, length).

    Raises:
        ConfigError: If the model has another class.
    """
    weights = _weights(model, tokens)
    xp = array_namespace(weights)
    positive = xp.where(weights > 0, weights, xp.ones_like(weights))  # 0 log 0 is 0
    return -xp.sum(weights * xp.log(positive), axis=-1)


def previous_token_scores(model: LanguageModel | Encoder, tokens: Any) -> Array:
    """Compute the mean attention of each head to the token before the query (Elhage et al., 2021).

    Args:
        model: Language model or encoder.
        tokens: Ids (batch, length), length at least 2.

    Returns:
        Array (layers, heads) of numbers from 0 to 1.

    Raises:
        ShapeError: If no query has a token before it.
        ConfigError: If the model has another class.
    """
    ids = _host_ids(model, tokens)
    length = ids.shape[1]
    return _mean_attention(model, ids, np.broadcast_to(np.eye(length, k=-1, dtype=bool), (len(ids), length, length)))


def duplicate_token_scores(model: LanguageModel | Encoder, tokens: Any) -> Array:
    """Compute the mean attention of each head to earlier occurrences of the query's token (Wang et al., 2022).

    The mean is over queries whose token has occurred before. See "Interpretability in the Wild", section 3.

    Args:
        model: Language model or encoder.
        tokens: Ids (batch, length).

    Returns:
        Array (layers, heads) of numbers from 0 to 1.

    Raises:
        ShapeError: If no token occurs twice.
        ConfigError: If the model has another class.
    """
    ids = _host_ids(model, tokens)
    return _mean_attention(model, ids, _earlier_occurrences(ids))


def induction_scores(
    model: LanguageModel, tokens: Any = None, *, length: int = 50, batch_size: int = 4, seed: int = 0
) -> Array:
    """Compute the mean attention of each head to the token after an earlier occurrence of the query's token.

    An induction head continues `A B ... A` with `B`. On repeated random tokens nothing else explains such attention
    (Olsson et al., 2022, "In-context Learning and Induction Heads"). The mean is over queries whose token has occurred
    before.

    Args:
        model: Language model.
        tokens: Ids (batch, length). Default: random ids, repeated once, after bos_id if the model has one.
        length: Number of random ids.
        batch_size: Number of rows of random ids.
        seed: Seed of the random ids.

    Returns:
        Array (layers, heads) of numbers from 0 to 1.

    Raises:
        ShapeError: If no token occurs twice.
        ConfigError: If the model has another class.
    """
    if tokens is None:
        tokens = _repeated_tokens(model, length, batch_size, seed)
    ids = _host_ids(model, tokens)
    after = np.zeros((*ids.shape, ids.shape[1]), dtype=bool)
    after[:, :, 1:] = _earlier_occurrences(ids)[:, :, :-1]
    return _mean_attention(model, ids, after)


def _weights(model: LanguageModel | Encoder, tokens: Any) -> Array:
    """Return the attention weights of a call, (layers, batch, heads, queries, keys)."""
    check_model(model, LanguageModel, Encoder)
    with record(model, "layers.*.self_attention.weights") as activations:
        model(tokens)
    arrays = list(activations.values())
    return array_namespace(*arrays).stack(arrays)


def _mean_attention(model: LanguageModel | Encoder, ids: Any, keys: Any) -> Array:
    """Return the mean attention to some keys, (layers, heads), of the queries that have one.

    `keys` is a boolean NumPy array (batch, queries, keys).
    """
    count = int(keys.any(axis=-1).sum())
    if not count:
        raise ShapeError(f"tokens of shape {ids.shape} have no such pair of positions; expected at least one")
    weights = _weights(model, ids)
    xp = array_namespace(weights)
    selected = xp.astype(xp.from_host(keys, device=device(weights)), weights.dtype)
    return xp.sum(weights * selected[None, :, None, :, :], axis=(1, 3, 4)) / count


def _earlier_occurrences(ids: Any) -> Any:
    """Return where a key is an earlier occurrence of the token of the query, (batch, queries, keys)."""
    return (ids[:, :, None] == ids[:, None, :]) & np.tri(ids.shape[1], k=-1, dtype=bool)


def _host_ids(model: Any, tokens: Any) -> Any:
    """Return token ids as a NumPy array (batch, length)."""
    check_model(model, LanguageModel, Encoder)
    _, parameter = next(model.named_arrays())
    return to_host(ids_of(as_token_ids(tokens, "token", model.vocab_size, parameter)))


def _repeated_tokens(model: LanguageModel, length: int, batch_size: int, seed: int) -> Any:
    check_model(model, LanguageModel)
    check_count("length", length)
    check_count("batch_size", batch_size)
    check_count("seed", seed, 0)
    config = model.config
    special = (config.pad_id, config.bos_id, config.eos_id)
    usual = [token for token in range(config.vocab_size) if token not in special]
    random = np.random.default_rng(seed).choice(usual, (batch_size, length))
    first = [] if config.bos_id is None else [np.full((batch_size, 1), config.bos_id)]
    return np.concatenate([*first, random, random], axis=1)
