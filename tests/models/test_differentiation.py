"""One model, differentiated by value_and_grad in every library, by torch autograd and by jax.grad: all agree."""

from __future__ import annotations

import numpy as np
import pytest

from tests.conftest import assert_close, library_or_skip
from tests.reference import KINDS, SOURCE, TARGET, model_of_kind, small_model, translation_loss, without_jax
from xformer import value_and_grad
from xformer.backends import from_host
from xformer.tree import flatten, map_arrays


@pytest.fixture(scope="module")
def model():
    """Pre-norm and gelu, with every kind of parameter."""
    return small_model(
        num_encoder_layers=1, num_decoder_layers=1, activation="gelu", tie_output=False, output_bias=True
    )


@pytest.fixture(scope="module")
def expected(model):
    """The loss and the gradients on NumPy."""
    return value_and_grad(translation_loss)(model)


def assert_all_close(actual, expected, xp):
    loss, gradients = actual
    assert_close(xp.asarray(loss), expected[0], xp=xp)
    expected_gradients = dict(expected[1].named_parameters())
    assert dict(gradients.named_parameters()).keys() == expected_gradients.keys()
    for name, gradient in gradients.named_parameters():
        assert np.any(expected_gradients[name]) or name.endswith("key.bias")  # softmax does not see a constant
        assert_close(gradient, expected_gradients[name], xp=xp)


@without_jax
def test_value_and_grad(xp, model, expected):
    moved = model.to(xp)
    assert_close(moved(SOURCE, TARGET), model(SOURCE, TARGET), xp=xp)
    assert_all_close(value_and_grad(translation_loss)(moved), expected, xp)


def test_torch_autograd(model, expected):
    xp = library_or_skip("torch")
    native = map_arrays(lambda array: array.requires_grad_(), model.to(xp))
    loss = translation_loss(native)
    loss.backward()
    assert_all_close((loss.detach(), map_arrays(lambda array: array.grad, native)), expected, xp)


@pytest.mark.parametrize("kind", KINDS)
def test_torch_autograd_of_every_model(kind):
    model = model_of_kind(kind)
    loss, gradients = value_and_grad(translation_loss)(model)
    native = map_arrays(lambda array: array.requires_grad_(), model.to(library_or_skip("torch")))
    expected = translation_loss(native)
    expected.backward()
    np.testing.assert_allclose(loss, expected.item(), rtol=1e-12)
    theirs = dict(native.named_parameters())
    assert dict(gradients.named_parameters()).keys() == theirs.keys()
    for name, gradient in gradients.named_parameters():
        reference = theirs[name].grad.numpy()
        assert np.abs(reference).max() > 1e-6 or name.endswith("key.bias")  # softmax does not see a constant
        np.testing.assert_allclose(gradient, reference, rtol=1e-10, atol=1e-14, err_msg=name)


@pytest.mark.slow
def test_jax_grad(model, expected):
    xp = library_or_skip("jax")
    jax = pytest.importorskip("jax")
    leaves, rebuild = flatten(model.to(xp))

    def loss_of(leaves, source, target):
        return translation_loss(rebuild(leaves), source, target)

    loss, gradients = jax.jit(jax.value_and_grad(loss_of))(leaves, from_host(xp, SOURCE), from_host(xp, TARGET))
    assert_all_close((loss, rebuild(gradients)), expected, xp)


def test_fully_padded_rows_give_no_nan_under_any_differentiation(model):
    """A source of nothing but padding: its attention has no row to look at."""
    source = np.asarray(SOURCE)
    source = np.where(np.asarray([[True], [False]]), source, 0)
    _, expected = value_and_grad(translation_loss)(model, source)
    assert all(np.isfinite(array).all() for array in flatten(expected)[0])
    native = map_arrays(lambda array: array.requires_grad_(), model.to(library_or_skip("torch")))
    translation_loss(native, source).backward()
    for gradient, (_, parameter) in zip(flatten(expected)[0], native.named_parameters(), strict=True):
        assert_close(parameter.grad.numpy(), gradient)
