import functools
import signal

import numpy as np
import pytest

from tests.conftest import library_or_skip
from tests.reference import for_each, raises_line, small_language_model
from xformer.backends import array_namespace, dtype_name, from_host, to_host
from xformer.errors import BackendError, ConfigError, DataError, ShapeError, describe_type
from xformer.layers import load_balancing_loss, record_routing
from xformer.models import Transformer, TransformerConfig
from xformer.ops import cross_entropy
from xformer.random import Rng
from xformer.tracing import grad, jit
from xformer.training import (
    Adam,
    Batch,
    Documents,
    PackedBatch,
    TextChunks,
    TokenPairs,
    dpo_loss,
    fit,
    language_model_loss,
    sequence_log_probs,
    translation_loss,
)
from xformer.training.interrupt import Stopped, stop_on_signals
from xformer.training.loss import mean_loss
from xformer.tree import with_fields

PAIRS = TokenPairs([[4, 5, 6], [7, 8]], [[5], [6, 7, 8]])


def make_model(dropout=0.0, **options):
    config = TransformerConfig(
        source_vocab_size=9,
        target_vocab_size=9,
        d_model=8,
        num_heads=2,
        d_ff=16,
        num_encoder_layers=1,
        num_decoder_layers=1,
        dropout=dropout,
        **options,
    )
    return Transformer(config, xp=np, seed=0, dtype="float64")


@for_each("label_smoothing", [0.0, 0.1])
def test_the_loss_is_a_sum_over_what_is_not_padding(label_smoothing):
    model, batch = make_model(), Batch.make(PAIRS, [0, 1], xp=np)
    logits = model(batch.source, batch.target)
    shifted = logits - logits.max(axis=-1, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    expected = 0.0
    for row, label_row in zip(logs, batch.labels, strict=True):
        for log, label in zip(row, label_row, strict=True):
            if label != 0:
                expected -= (1 - label_smoothing) * log[label] + label_smoothing * log.mean()
    loss = translation_loss(model, batch, label_smoothing=label_smoothing)
    assert float(loss) == pytest.approx(expected, rel=1e-12)


def test_the_load_balancing_loss_counts_once_for_each_label():
    experts = {"num_experts": 3, "num_experts_per_token": 2}
    text = TextChunks.make(3 + np.arange(40) % 10, [0, 12, 24], 8, xp=np)
    cases = [
        (language_model_loss, small_language_model(**experts), text, (text.tokens,)),
        (translation_loss, make_model(**experts), pairs := Batch.make(PAIRS, [0, 1], xp=np), pairs[:2]),
    ]
    for loss, model, batch, inputs in cases:
        with record_routing() as routing:
            model(*inputs)
        assert len(routing) == 2
        expected = float(loss(model, batch)) + 0.5 * batch.num_tokens * float(load_balancing_loss(routing))
        assert float(loss(model, batch, load_balancing=0.5)) == pytest.approx(expected, rel=1e-12)
    assert language_model_loss(small_language_model(), text, load_balancing=0.5) == language_model_loss(
        small_language_model(), text
    )


@for_each("name", ["numpy", "torch"])
def test_padding_of_packed_documents_does_not_count_for_load_balancing(name):
    xp = library_or_skip(name)
    model = small_language_model(num_experts=3, dropout=0.0)
    documents = Documents([[3, 5, 1, 7, 2, 4], [2, 8]], [[0, 0, 1, 1, 1, 1], [0, 1]])
    batch = PackedBatch.make(documents, xp=np)
    with record_routing() as routing:
        model(batch.tokens, segment_ids=batch.segment_ids)
    balance = load_balancing_loss(routing, [[True] * 5, [True, *[False] * 4]])
    expected = float(language_model_loss(model, batch)) + 0.5 * 5 * float(balance)
    moved, loss = model.to(name), functools.partial(language_model_loss, load_balancing=0.5)
    for function, own in ((loss, PackedBatch.make(documents, xp=xp)), (loss, batch), (jit(loss), batch)):
        if function is loss or name == "numpy":
            assert float(function(moved, own)) == pytest.approx(expected, rel=1e-12)


@for_each("jit", [False, True])
def test_a_model_with_experts_learns_to_use_all_of_them(jit):
    config = {"num_experts": 4, "num_experts_per_token": 1, "num_layers": 1, "dropout": 0.0}
    model = small_language_model(**config)
    model = with_fields(model, layers=(_to_one_expert(model.layers[0]),))
    batch = TextChunks.make(np.arange(200) % 13, range(0, 160, 8), 8, xp=np)
    shares = []
    for weight in (0.0, 0.1):
        loss = functools.partial(language_model_loss, load_balancing=weight)
        trained, history = fit(model, loss, [batch], optimizer=Adam(), learning_rate=0.03, steps=40, jit=jit)
        with record_routing() as routing:
            trained(batch.tokens)
        shares.append(np.bincount(routing[0].experts[:, 0], minlength=4).max() / routing[0].experts.size)
        assert history[-1].loss < history[0].loss
    assert shares[0] > 0.6
    assert shares[1] < 0.4


def _to_one_expert(layer):
    """Return a layer whose router sends all tokens to one expert."""
    return with_fields(layer, feed_forward=with_fields(layer.feed_forward, router_bias=np.asarray([2.0, 0, 0, 0])))


@for_each("pad_id", [None, 2])
def test_padded_rows_have_the_loss_of_single_rows_without_a_padding_id(pad_id):
    """As in docs/examples/checkpoints.py: labels of padding are -100."""
    model = small_language_model(dtype="float64", dropout=0.0, pad_id=pad_id, bos_id=2, eos_id=2)

    def loss(labels):
        labels = np.asarray(labels)
        tokens = np.where(labels == -100, 0, labels)[:, :-1]
        logits = model(tokens, mask=np.ones((1, 1, 1, 1), dtype=bool))
        return cross_entropy(logits, labels[:, 1:], pad_id=-100).sum()

    single = loss([[3, 2, 5, 2]]) + loss([[4, 2]])
    assert float(loss([[3, 2, 5, 2], [4, 2, -100, -100]])) == pytest.approx(float(single), rel=1e-12)


def test_dropout_acts_when_there_is_an_rng():
    model, batch = make_model(dropout=0.5), Batch.make(PAIRS, [0, 1], xp=np)
    losses = [float(translation_loss(model, batch, rng)) for rng in (None, None, Rng(0), Rng(0), Rng(1))]
    assert losses[0] == losses[1]
    assert losses[2] == losses[3]
    assert len(set(losses)) == 3


def test_r_drop_is_the_divergence_of_torch_between_two_passes(xp):
    torch = library_or_skip("torch")
    model, options = make_model(dropout=0.5).to(xp), {"label_smoothing": 0.1}
    batch = Batch.make(PAIRS, [0, 1], xp=xp)
    double = Batch.make(TokenPairs(PAIRS.source * 2, PAIRS.target * 2), [0, 1, 2, 3], xp=xp)
    logits = torch.tensor(np.asarray(to_host(model(double.source, double.target, rng=Rng(3)))))
    logs = logits[torch.tensor(np.asarray(to_host(double.labels))) != 0].log_softmax(-1).chunk(2)
    kl = torch.nn.functional.kl_div
    divergence = sum(float(kl(a, b, reduction="sum", log_target=True)) for a, b in (logs, logs[::-1])) / 2
    expected = 0.5 * (float(translation_loss(model, double, Rng(3), **options)) + 3.0 * divergence)
    assert float(translation_loss(model, batch, Rng(3), r_drop=3.0, **options)) == pytest.approx(expected, rel=1e-5)
    assert divergence > 0.1
    assert float(translation_loss(model, batch, r_drop=3.0)) == float(translation_loss(model, batch))
    lists = batch._replace(**{name: np.asarray(to_host(getattr(batch, name))) for name in batch._fields[:3]})
    assert float(translation_loss(model, lists, Rng(3), r_drop=3.0, **options)) == pytest.approx(expected, rel=1e-5)


def test_gradients_of_r_drop_equal_difference_quotients():
    model, batch = make_model(dropout=0.5), Batch.make(PAIRS, [0, 1], xp=np)

    def loss(weight):
        changed = with_fields(model, output=None, source_embedding=with_fields(model.source_embedding, weight=weight))
        return translation_loss(changed, batch, Rng(3), r_drop=3.0)

    weight = np.asarray(model.source_embedding.weight)
    step = np.random.default_rng(0).normal(size=weight.shape)
    quotient = (loss(weight + 1e-6 * step) - loss(weight - 1e-6 * step)) / 2e-6
    assert float(np.sum(grad(loss)(weight) * step)) == pytest.approx(float(quotient), rel=1e-6)


@for_each("options", [{"jit": True}, {"data_parallel": 2, "jit": True}, {"precision": "bfloat16"}])
def test_r_drop_trains(options):
    model, batch = make_model(dropout=0.5), Batch.make(PAIRS, [0, 1], xp=np)
    settings = {"optimizer": Adam(), "learning_rate": 0.01, "steps": 4}

    def train(weight, **options):
        loss = functools.partial(translation_loss, r_drop=weight)
        return [step.loss for step in fit(model.to(dtype="float32"), loss, [batch], **settings, **options)[1]]

    same = {**options, "jit": False} if "jit" in options else {}
    assert train(2.0, **options) == pytest.approx(train(2.0, **same), rel=0.05 if "precision" in options else 0.0)
    assert train(2.0, **options)[0] > train(0.0, **options)[0]


def test_the_z_loss_is_added_for_what_is_not_padding():
    model, batch = make_model(), Batch.make(PAIRS, [0, 1], xp=np)
    logits = model(batch.source, batch.target)
    squares = np.log(np.exp(logits).sum(axis=-1)) ** 2
    expected = float(translation_loss(model, batch)) + 0.1 * float(squares[batch.labels != 0].sum())
    assert float(translation_loss(model, batch, z_loss=0.1)) == pytest.approx(expected, rel=1e-12)


@for_each("label_smoothing, z_loss", [(0.0, 0.0), (0.1, 0.2)])
def test_the_loss_of_a_language_model_counts_every_position(label_smoothing, z_loss):
    """Padding is a token like all others: text has none."""
    text = np.asarray([3, 0, 0, 5, 12, 0, 7, 1, 2])
    model, chunks = small_language_model(), TextChunks.make(text, [0, 4], 4, xp=np)
    logits = model(chunks.tokens, mask=np.ones((1, 1, 4, 4), dtype=bool))
    log_partition = np.log(np.exp(logits).sum(axis=-1))
    logs = logits - log_partition[..., None]
    picked = np.take_along_axis(logs, chunks.labels[..., None], axis=-1)[..., 0]
    losses = -(1.0 - label_smoothing) * picked - label_smoothing * logs.mean(axis=-1) + z_loss * log_partition**2
    actual = language_model_loss(model, chunks, label_smoothing=label_smoothing, z_loss=z_loss)
    assert float(actual) == pytest.approx(float(losses.sum()), rel=1e-12)


def test_a_mean_over_batches_ends_after_the_current_one():
    asked = []

    def loss(model, batch, rng):
        asked.append(batch)
        if len(asked) == 2:
            signal.raise_signal(signal.SIGTERM)
        return 1.0

    batches = [Batch.make(PAIRS, [0], xp=np)] * 4
    with stop_on_signals(), pytest.raises(Stopped):
        mean_loss(loss, None, batches, 1)
    assert len(asked) == 2
    assert mean_loss(lambda model, batch, rng: 3.0, None, batches, 1) == 3.0 / batches[0].num_tokens


@for_each("batch", [None, [1, 2, 3], (np.ones((1, 3), int), np.ones((1, 3), int))])
@for_each("loss", [translation_loss, language_model_loss])
def test_batches_of_other_classes_are_refused(batch, loss):
    with raises_line(DataError, f"^the loss got {describe_type(batch)} as batch; expected a batch with .* and labels"):
        loss(small_language_model(), batch)


@for_each("beta", [0.1, 2.0])
def test_dpo_is_the_formula_in_torch(beta):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    arrays = 30.0 * rng.standard_normal((4, 7))
    arrays[:, 0] = [2e3, -2e3, 0.0, 0.0]  # far from the reference: nothing overflows
    policy = [torch.tensor(x, requires_grad=True) for x in arrays[:2]]
    reference = torch.tensor(arrays[2:])
    margins = beta * ((policy[0] - policy[1]) - (reference[0] - reference[1]))
    expected = -torch.nn.functional.logsigmoid(margins)
    expected.sum().backward()
    np.testing.assert_allclose(dpo_loss(*arrays, beta=beta), expected.detach().numpy(), rtol=1e-12, atol=1e-12)

    def total(chosen, rejected):
        losses = dpo_loss(chosen, rejected, *arrays[2:], beta=beta)
        return array_namespace(losses).sum(losses)

    gradients = [grad(total)(*arrays[:2]), grad(lambda y, x: total(x, y))(arrays[1], arrays[0])]
    for gradient, leaf in zip(gradients, policy, strict=True):
        np.testing.assert_allclose(gradient, leaf.grad.numpy(), rtol=0, atol=1e-12)
    moved = dpo_loss(*(x.detach() for x in policy), arrays[2], arrays[3].tolist(), beta=beta)
    np.testing.assert_allclose(moved.numpy(), expected.detach().numpy(), rtol=1e-12, atol=1e-12)


@for_each("name", ["numpy", "torch", "jax"])
def test_dpo_in_a_program(name):
    xp = library_or_skip(name)
    arrays = np.random.default_rng(0).standard_normal((4, 7)).astype("float32")
    on_library = [from_host(xp, x) for x in arrays]
    np.testing.assert_allclose(to_host(jit(dpo_loss)(*on_library)), dpo_loss(*arrays), rtol=1e-6)
    lists = jit(lambda x, y: dpo_loss(x, y, arrays[2], arrays[3].tolist()))(*on_library[:2])
    assert dtype_name(lists.dtype) == "float32"
    np.testing.assert_allclose(to_host(lists), dpo_loss(*arrays), rtol=1e-6)


def test_log_probabilities_of_answers():
    model = small_language_model()
    tokens, masks = [[3, 5, 1, 7], [2, 8, 6]], [[0, 0, 1, 1], [0, 0, 1]]
    batch = PackedBatch.make(Documents(tokens, masks), xp=np)
    expected = []
    for ids, mask in zip(tokens, masks, strict=True):
        logits = model([ids])[0]
        logs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        expected.append(sum(logs[i - 1, ids[i]] for i in range(1, len(ids)) if mask[i]))
    np.testing.assert_allclose(sequence_log_probs(model, batch), expected, rtol=1e-12)


def test_invalid_preferences():
    x = np.zeros(3)
    with raises_line(ConfigError, "beta is 0; expected a number above 0"):
        dpo_loss(x, x, x, x, beta=0)
    for beta in ("0.1", True, None, np.nan, np.inf, np.ones(3)):
        with raises_line(ConfigError, "beta is .*; expected a number above 0"):
            dpo_loss(x, x, x, x, beta=beta)
    with raises_line(BackendError, "got a builtins.list; expected an array of"):
        dpo_loss([1.0], [1.0], x, x)
    with raises_line(ShapeError, r"log-probabilities have shapes \(3,\), \(3,\), \(2,\), \(3,\); expected \(pairs,\)"):
        dpo_loss(x, x, x[:2], x)
    with raises_line(ShapeError, r"log-probabilities have shapes \(3, 1\), "):
        dpo_loss(x[:, None], x[:, None], x[:, None], x[:, None])
