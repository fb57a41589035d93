"""Cross-entropy: equal to torch's, and strict about its labels."""

from __future__ import annotations

import numpy as np
import pytest

from tests.conftest import assert_close
from tests.reference import for_each, normal, raises_line, weighted_sum, without_jax
from xformer import cross_entropy, value_and_grad, vjp
from xformer.backends import from_host, to_host
from xformer.errors import ConfigError, DataError, ShapeError

LOGITS = 3.0 * normal(0, 2, 4, 7)
LABELS = np.asarray([[3, 0, 6, 1], [0, 0, 5, 2]])


@for_each("pad_id", [0, 5, -100])
@for_each("label_smoothing", [0.0, 0.1])
def test_losses_and_gradients_equal_those_of_torch(pad_id, label_smoothing):
    torch = pytest.importorskip("torch", reason="torch is what it is compared with")
    labels, g = np.where(LABELS == 0, pad_id, LABELS), normal(1, 2, 4)
    logits = torch.tensor(LOGITS, requires_grad=True)
    expected = torch.nn.functional.cross_entropy(
        logits.movedim(-1, 1),
        torch.tensor(labels),
        ignore_index=pad_id,
        label_smoothing=label_smoothing,
        reduction="none",
    )
    (expected * torch.tensor(g)).sum().backward()
    settings = {"pad_id": pad_id, "label_smoothing": label_smoothing}
    assert_close(cross_entropy(LOGITS, labels, **settings), expected.detach().numpy())
    _, gradient = value_and_grad(lambda logits: weighted_sum(cross_entropy(logits, labels, **settings), g))(LOGITS)
    assert_close(gradient, logits.grad.numpy())


def test_a_pad_id_need_not_be_a_class():
    expected = cross_entropy(LOGITS, np.where(LABELS == 0, -100, LABELS), pad_id=-100)
    for pad_id in (7, 100):
        labels = np.where(LABELS == 0, pad_id, LABELS)
        np.testing.assert_array_equal(cross_entropy(LOGITS, labels, pad_id=pad_id), expected)
    long = np.broadcast_to(LOGITS[:, :1], (2, 9, 7)), np.full((2, 9), 8)  # with more positions than classes
    assert not cross_entropy(*long, pad_id=8).any()
    assert cross_entropy(LOGITS[0, 0], np.asarray(3), pad_id=0) == expected[0, 0]


@pytest.mark.parametrize("mode", ["auto", "portable"])
def test_without_a_pad_id_every_class_counts(monkeypatch, mode):
    torch = pytest.importorskip("torch", reason="torch is what it is compared with")
    monkeypatch.setenv("XFORMER_KERNELS", mode)
    logits, labels = torch.tensor(LOGITS.reshape(8, 7)), torch.tensor(LABELS.reshape(8))
    expected = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    assert_close(cross_entropy(LOGITS, LABELS), expected.numpy().reshape(2, 4))


@pytest.mark.parametrize("mode", ["auto", "portable"])
@pytest.mark.parametrize("pad_id", [0, -100])
def test_z_loss_adds_the_squared_log_partition(monkeypatch, mode, pad_id):
    torch = pytest.importorskip("torch", reason="torch is what it is compared with")
    monkeypatch.setenv("XFORMER_KERNELS", mode)
    labels, g = np.where(LABELS == 0, pad_id, LABELS), normal(1, 2, 4)
    logits = torch.tensor(LOGITS, requires_grad=True)
    smoothed = torch.nn.functional.cross_entropy(
        logits.movedim(-1, 1), torch.tensor(labels), ignore_index=pad_id, label_smoothing=0.1, reduction="none"
    )
    counted = torch.tensor(labels != pad_id).double()
    expected = smoothed + counted * 0.3 * torch.logsumexp(logits, dim=-1) ** 2
    (expected * torch.tensor(g)).sum().backward()
    settings = {"pad_id": pad_id, "label_smoothing": 0.1, "z_loss": 0.3}
    assert_close(cross_entropy(LOGITS, labels, **settings), expected.detach().numpy())
    _, gradient = value_and_grad(lambda logits: weighted_sum(cross_entropy(logits, labels, **settings), g))(LOGITS)
    assert_close(gradient, logits.grad.numpy())


@pytest.mark.parametrize("mode", ["auto", "no-native", "portable"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("offset", [1e6, -1e6])
def test_an_offset_of_all_logits_changes_nothing(xp, monkeypatch, mode, label_smoothing, offset):
    monkeypatch.setenv("XFORMER_KERNELS", mode)
    logits = np.round(8.0 * normal(0, 3, 300)) / 8.0  # exact in float32 with the offset, too
    labels, settings = np.asarray([7, 0, 299]), {"label_smoothing": label_smoothing}

    losses, pull = vjp(lambda x: cross_entropy(x, labels, **settings), logits)
    shifted, pull_shifted = vjp(
        lambda x: cross_entropy(x, labels, **settings), from_host(xp, (logits + offset).astype(np.float32))
    )
    np.testing.assert_allclose(to_host(shifted), losses, rtol=2e-6)
    g = np.asarray([1.0, -2.0, 0.5], np.float32)
    assert_close(pull_shifted(from_host(xp, g))[0], pull(g.astype(np.float64))[0], xp=xp, dtype="float32")


@without_jax
@for_each("dtype", ["int8", "uint8", "int16", "int32", "int64"])
def test_uint8_labels_of_a_large_vocabulary(xp, dtype):
    logits, labels = normal(0, 3, 500), np.asarray([0, 100, 7])
    expected = value_and_grad(lambda logits: weighted_sum(cross_entropy(logits, labels), 1.0))(logits)
    narrow = from_host(xp, labels, dtype=dtype)
    loss, gradient = value_and_grad(lambda logits: weighted_sum(cross_entropy(logits, narrow), 1.0))(
        from_host(xp, logits)
    )
    assert_close(xp.asarray(loss), expected[0], xp=xp)
    assert_close(gradient, expected[1], xp=xp)


def test_half_precision_is_summed_in_float32():
    torch = pytest.importorskip("torch", reason="NumPy has no bfloat16")
    logits = torch.tensor(LOGITS).to(torch.bfloat16)
    losses = cross_entropy(logits, torch.tensor(LABELS))
    assert losses.dtype == torch.float32
    assert_close(losses, cross_entropy(logits.float(), torch.tensor(LABELS)))


@for_each("bad", [-1, 7])
def test_labels_out_of_range_are_refused(xp, bad):
    labels = np.where(LABELS == 3, bad, LABELS)
    if xp.name == "cupy":  # reading them would wait for the GPU
        losses = to_host(cross_entropy(from_host(xp, LOGITS), from_host(xp, labels)))
        np.testing.assert_array_equal(np.isnan(losses), labels == bad)
        return
    with raises_line(
        DataError,
        rf"^cross_entropy got labels from .*{bad}.*; expected 0 to 6, as classes is 7, or pad_id, which is None$",
    ):
        cross_entropy(from_host(xp, LOGITS), from_host(xp, labels))


def test_invalid_labels_and_settings_are_refused():
    with raises_line(
        ShapeError, r"logits of shape \(2, 4, 7\) and labels of shape \(4,\); expected logits \(\.\.\., classes\)"
    ):
        cross_entropy(LOGITS, LABELS[0])
    with raises_line(ShapeError, "labels of dtype float64; expected integers"):
        cross_entropy(LOGITS, LABELS.astype("float64"))
    with raises_line(ShapeError, r"labels have the shape of the logits, \(2, 4, 7\); expected class indices"):
        cross_entropy(LOGITS, np.eye(7)[LABELS])
    with raises_line(ConfigError, r"label_smoothing is 1\.0; expected a number in \[0, 1\)"):
        cross_entropy(LOGITS, LABELS, label_smoothing=1.0)
    for z_loss in (-1.0, float("nan"), float("inf")):
        with raises_line(ConfigError, rf"z_loss is {z_loss}; expected a number of at least 0"):
            cross_entropy(LOGITS, LABELS, z_loss=z_loss)
    with raises_line(DataError, "rows differ in length"):
        cross_entropy(LOGITS, [[1, 2], [3]])


def test_labels_are_moved_to_the_logits(xp):
    logits, expected = from_host(xp, LOGITS), cross_entropy(LOGITS, LABELS)
    for labels in (LABELS, LABELS.astype("int16"), LABELS.tolist()):
        np.testing.assert_allclose(to_host(cross_entropy(logits, labels)), expected, rtol=1e-5)
        total = vjp(lambda logits, labels=labels: cross_entropy(logits, labels), logits)[0]
        np.testing.assert_allclose(to_host(total), expected, rtol=1e-5)
