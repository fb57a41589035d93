"""Decoding written as directly as possible: one sentence, no cache, no batch, no early stop."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from tests.reference import normal, small_model
from xformer.tree import replace

PAD, BOS, EOS = 0, 1, 2
SOURCES = [[4, 5, 6, 7, 2], [8, 2], [9, 10, 3, 2], [5, 5, 2], [3, 10, 9, 8, 7, 6, 2]]


SEEDS = (3, 1, 10, 2)  # of models whose outputs have many lengths


def varied_model(seed: int = SEEDS[0], **settings: Any) -> Any:
    """A model that is far from uniform: outputs differ between sentences, and end after different numbers of tokens."""
    settings = {"positions": "learned", "max_positions": 40, "tie_output": False, "output_bias": True, **settings}
    model = small_model(seed=seed, **settings)
    size = model.config.target_vocab_size
    spread = {"decoder_input.positions.weight": 15.0, "encoder_input.positions.weight": 15.0}
    arrays = {
        name: array * spread.get(name, 2.5) + 0.1 * normal(array.size, *array.shape)
        for name, array in model.named_parameters()
        if array.ndim == 2
    }
    return replace(model, {**dict(model.named_parameters()), **arrays, "output_bias": 0.7 * (np.arange(size) == EOS)})


class Models(list):
    """A list that is short to print, so that hypothesis can say what failed."""

    def __repr__(self):
        return f"{len(self)} models"


def padded(rows, *, left=False, extra=0):
    width = max(map(len, rows)) + extra
    fill = [[PAD] * (width - len(row)) for row in rows]
    return np.asarray([[*f, *row] if left else [*row, *f] for row, f in zip(rows, fill, strict=True)])


def log_softmax(logits):
    top = logits.max(axis=-1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(axis=-1, keepdims=True))


def next_log_probabilities(model, source, tokens, *, minimum=0, ngram=0, penalty=1.0):
    """Return the processed log-probability of each next token; all tokens so far go through the model again."""
    logits = np.array(model([source], [[BOS, *tokens]])[0, -1])
    logits[[PAD, BOS]] = -math.inf
    logits = log_softmax(logits)
    for token in set(tokens):
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    if len(tokens) < minimum:
        logits[EOS] = -math.inf
    if ngram and len(tokens) >= ngram - 1:
        ngrams = {tuple(tokens[i : i + ngram]) for i in range(len(tokens) - ngram + 1)}
        for token in range(len(logits)):
            if (*tokens[len(tokens) - ngram + 1 :], token) in ngrams:
                logits[token] = -math.inf
    return logits


def rescored(model, source, tokens, *, finished=True):
    """The log-probability of an output, by one teacher-forced pass."""
    labels = [*tokens, EOS] if finished else tokens
    if not labels:
        return 0.0
    logits = np.array(model([source], [[BOS, *tokens][: len(labels)]])[0])
    logits[:, [PAD, BOS]] = -math.inf
    return float(log_softmax(logits)[range(len(labels)), labels].sum())


def lp(length, alpha):
    return ((5 + length) / 6) ** alpha


def greedy(model, source, limit, **rules):
    """The tokens, their log-probability, and whether they ended."""
    tokens, total = [], 0.0
    while True:
        found = next_log_probabilities(model, source, tokens, **rules)
        best = int(found.argmax())
        if best == EOS:
            return tokens, total + found[best], True
        if len(tokens) == limit:
            return tokens, total, False
        tokens, total = [*tokens, best], total + found[best]


def beam(model, source, size, *, limit, num_return_sequences=1, alpha=0.0, keep_greedy=True, **rules):
    """Beam search for one sentence, until every hypothesis is at the limit: [(score, tokens)], best first."""
    return diverse_beam(
        model,
        source,
        size,
        1,
        0.0,
        limit=limit,
        num_return_sequences=num_return_sequences,
        alpha=alpha,
        keep_greedy=keep_greedy,
        **rules,
    )


def diverse_beam(
    model, source, size, groups, strength, *, limit, num_return_sequences=1, alpha=0.0, keep_greedy=True, **rules
):
    """Beam search in groups, each of which avoids what earlier ones chose at the same step."""
    share = size // groups
    live = [[(0.0, [], keep_greedy and number == 0)] for number in range(groups)]
    finished, cut = [[] for _ in range(groups)], []
    for length in range(limit + 1):
        chosen_tokens = []
        for number, group in enumerate(live):
            ended, continuing = step(
                model, source, group, share, {t: strength * chosen_tokens.count(t) for t in chosen_tokens}, rules
            )
            finished[number] += [(total / lp(len(tokens), alpha), tokens[:-1]) for total, tokens, _ in ended]
            if length == limit:
                cut += group
            live[number] = [] if share == 1 and ended else continuing
            if length < limit:  # what is chosen_tokens at the limit goes nowhere
                chosen_tokens += [tokens[-1] for _, tokens, _ in live[number]]
    if not any(finished):
        distinct = {tuple(tokens): (total / lp(len(tokens), alpha), tokens) for total, tokens, _ in cut}
        return best(distinct.values())[:num_return_sequences]
    chosen = []
    for group in finished:
        chosen += [
            found for found in best(group)[:num_return_sequences] if found[1] not in [tokens for _, tokens in chosen]
        ][:share]
    return best(chosen)[:num_return_sequences]


def step(model, source, live, size, penalties, rules):
    """Return hypotheses that end and that continue: the best `size` of each after the penalty, and the greedy one."""
    candidates = []
    for total, tokens, greedy_so_far in live:
        found = next_log_probabilities(model, source, tokens, **rules)
        candidates += [
            (total + found[token], [*tokens, token], greedy_so_far and token == int(found.argmax()))
            for token in range(len(found))
            if found[token] > -math.inf
        ]
    candidates.sort(key=lambda candidate: penalties.get(candidate[1][-1], 0.0) - candidate[0])
    ended = [c for c in candidates[:size] if c[1][-1] == EOS]
    continuing = [c for c in candidates if c[1][-1] != EOS][:size]
    for candidate in candidates:
        if candidate[2] and candidate[1][-1] == EOS and candidate not in ended:
            ended.append(candidate)
        elif candidate[2] and candidate[1][-1] != EOS and candidate not in continuing:
            continuing[-1] = candidate
    return ended, continuing


def best(found):
    return sorted(found, key=lambda scored: -scored[0])


def every_output(model, source, limit, vocabulary):
    """Each possible output of at most `limit` tokens, with its log-probability."""
    for length in range(limit + 1):
        for tokens in itertools.product(range(3, vocabulary), repeat=length):
            yield list(tokens), rescored(model, source, list(tokens))
