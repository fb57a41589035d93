"""A training step computes, to the bit, the logits and log-probabilities that decoding computed for the same tokens."""

from __future__ import annotations

import numpy as np
import pytest

import xformer as xf
from tests.native.variants import LANGUAGE_MODELS, TRANSLATORS, language_model, texts, translator
from tests.ops.replace_kernels import kernels_by_operation, replace_kernels
from xformer.data.packing import IGNORE_INDEX, Documents, PackedBatch, pack_documents
from xformer.data.pairs import Batch, TokenPairs

pytestmark = [
    pytest.mark.usefixtures("reproducible"),
    pytest.mark.parametrize("search", ["greedy", "sampled"]),
]
SAMPLING = {"do_sample": True, "temperature": 1.3, "top_k": 20, "num_return_sequences": 2}
# Decoding excludes tokens that it suppresses from the softmax.
DECODED = {"dropout": 0.0, "suppress_special": False}


def decode(model, inputs, search):
    """Return the outputs with the index of their input, and the logits that followed each text."""
    logits_of = {}

    def record(tokens, lengths, logits, rows):
        for row, index in enumerate(rows.inputs):
            logits_of[int(index), *rows.history(row)] = np.array(logits[row])
        return logits

    options = {**SAMPLING, "rng": xf.Rng(5)} if search == "sampled" else {}
    outputs = xf.generate(model, inputs, max_new_tokens=12, logits_processors=[record], **options)
    return [(index, each) for index, group in enumerate(outputs) for each in group], logits_of


def assert_same(model, function, batch, decoded):
    """Compare the losses and logits that a function of a model and a batch returns with those of decoding.

    It is computed alone, while a gradient is computed, in a program of jit, and for shards of the batch.

    Args:
        model: The model.
        function: (model, batch) -> losses and logits.
        batch: The texts.
        decoded: For each output its row, its columns, its log-probability and the logits of decoding.
    """
    jitted, shards = xf.jit(function), [function(model, shard) for shard in batch.split(3)]
    results = [function(model, batch), xf.vjp(lambda model: function(model, batch), model)[0]]
    results += [jitted(model, batch) for _ in range(3)]
    results.append([[row for shard in shards for row in shard[part]] for part in range(2)])
    for losses, logits in results:
        for row, columns, log_probability, wanted in decoded:
            assert np.array_equal(logits[row][columns], wanted)
            assert sum(-losses[row][columns].astype(float)) == log_probability


def check_language_model(fields, search, length=None):
    model = language_model(**fields, **DECODED)
    prompts = [[1, *text] for text in texts(0, 6, 90)]
    answers, logits_of = decode(model, prompts, search)
    documents = [[*prompts[index], *each.tokens, *[2] * each.finished] for index, each in answers]
    rows = [[number] for number in range(len(documents))]
    if length is not None:
        rows = pack_documents([len(document) - 1 for document in documents], length)
    batch, decoded = PackedBatch.make(Documents(documents), rows, xp=np), []
    for row, numbers in enumerate(rows):
        for segment, number in enumerate(numbers, start=1):
            (index, answer), document = answers[number], documents[number]
            start = len(prompts[index])
            columns = np.flatnonzero(batch.segment_ids[row] == segment)[start - 1 :]
            wanted = [logits_of[index, *document[:end]] for end in range(start, len(document))]
            decoded.append((row, columns, answer.log_probability, wanted))

    def function(model, batch):
        logits = model(batch.tokens, segment_ids=batch.segment_ids)
        return xf.cross_entropy(logits, batch.labels, pad_id=IGNORE_INDEX), logits

    assert_same(model, function, batch, decoded)
    total, _ = xf.value_and_grad(xf.language_model_loss)(model, batch, None)
    assert total == np.sum(function(model, batch)[0])


@pytest.mark.parametrize("fields", LANGUAGE_MODELS.values(), ids=LANGUAGE_MODELS)
def test_language_model(fields, search):
    check_language_model(fields, search)
    check_language_model(fields, search, length=200)  # several documents in a row


def test_another_logarithm_is_noticed(search, monkeypatch):
    kernels = kernels_by_operation("numpy")
    del kernels["logsumexp"], kernels["choose"]  # NumPy's logarithm
    replace_kernels(monkeypatch, "numpy", kernels)
    with pytest.raises(AssertionError):
        check_language_model({}, search)


@pytest.mark.parametrize("fields", TRANSLATORS.values(), ids=TRANSLATORS)
def test_translation(fields, search):
    model, sources = translator(**fields, **DECODED), [[*text, 2] for text in texts(1, 6, 90)]
    answers, logits_of = decode(model, sources, search)
    answers = [(index, each) for index, each in answers if 0 not in each.tokens]  # which is padding
    assert len(answers) > 2
    pairs = TokenPairs([sources[index][:-1] for index, _ in answers], [each.tokens for _, each in answers])
    batch, decoded = Batch.make(pairs, range(len(answers)), xp=np), []
    for row, (index, answer) in enumerate(answers):
        count = len(answer.tokens) + answer.finished
        wanted = [logits_of[index, *answer.tokens[:end]] for end in range(count)]
        decoded.append((row, slice(count), answer.log_probability, wanted))

    def function(model, batch):
        logits = model(batch.source, batch.target)
        return xf.cross_entropy(logits, batch.labels, pad_id=0), logits

    assert_same(model, function, batch, decoded)
    total, _ = xf.value_and_grad(xf.translation_loss)(model, batch, None)
    assert total == np.sum(function(model, batch)[0])
