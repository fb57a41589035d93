"""Wrong calls that users make, each of which must raise one line that says what was expected."""

from __future__ import annotations

import re

import numpy as np
import pytest

import xformer as xf
from xformer.errors import XformerError
from xformer.ops import attention, gelu, layer_norm, rms_norm
from xformer.ops.operation import explain, register

MODEL = xf.LanguageModel(xf.LanguageModelConfig(vocab_size=9, num_layers=1, d_model=8, num_heads=2, d_ff=8))
ENCODER = xf.Encoder(xf.EncoderConfig(vocab_size=9, num_layers=1, d_model=8, num_heads=2, d_ff=8, num_labels=2))
BATCHES = [np.ones((2, 4), int)] * 3
X = np.ones((2, 3), "float32")
ONES = np.ones(3, "float32")
HEADS = np.ones((1, 1, 2, 3), "float32")


def mean_loss(model, batch, rng=None):
    return xf.cross_entropy(model(batch[:, :-1]), batch[:, 1:]) / 6


def fit(loss=mean_loss, **options):
    return xf.fit(MODEL, loss, BATCHES, steps=1, optimizer=xf.Adam(), learning_rate=0.1, **options)


def update(optimizer, state=None, learning_rate=0.1):
    state = optimizer.init(MODEL) if state is None else state
    return optimizer.update(MODEL, MODEL, state, learning_rate)


CASES = {
    "loss_fn returned None": lambda: fit(lambda model, batch, rng: None),
    "loss_fn takes other arguments than (model, batch, rng): too many": lambda: fit(lambda model: 1.0),
    "the batches of step 1 have [None] tokens; expected at least 1": lambda: fit(num_tokens=lambda batch: None),
    "run_dir is 'a\\x00b'; expected the path": lambda: fit(run_dir="a\0b"),
    "state is 3; expected that of init(model)": lambda: update(xf.Adam(), state=3),
    "state is (); expected that of init(model)": lambda: update(xf.Muon(), state=()),
    "learning_rate is '0.1'; expected a finite number": lambda: update(xf.SGD(), learning_rate="0.1"),
    "learning_rate is nan; expected a finite number": lambda: update(xf.Adafactor(), learning_rate=np.nan),
    "did you mean 'warmup_steps'?": lambda: xf.schedules.cosine(0.1, num_warmup_steps=3, total_steps=5),
    "a mask cannot be made on device 'cuda:7'": lambda: xf.masks.causal(3, device="cuda:7"),
    "a mask of 10000000 queries and 10000000 keys ran out of memory": lambda: xf.masks.causal(10**7),
    "start is 'a'; expected an integer": lambda: xf.masks.sliding_window(3, size=2, start="a"),
    "layer_norm got epsilon 'a'; expected a number of at least 0": lambda: layer_norm(X, ONES, ONES, epsilon="a"),
    "rms_norm got epsilon -1.0; expected a number of at least 0": lambda: xf.RMSNorm(3, epsilon=-1.0)(X),
    "layer_norm got an unknown argument 'eps'; did you mean 'epsilon'?": lambda: layer_norm(X, ONES, ONES, eps=1e-5),
    "rms_norm got epsilon nan": lambda: rms_norm(X, ONES, epsilon=np.nan),
    "gelu got an unknown argument 'approximate'; for the": lambda: gelu(X, approximate="tanh"),
    "attention got scale 'x'; expected a number": lambda: attention(HEADS, HEADS, HEADS, scale="x"),
    "keep_probability is 0.0; expected a number above 0": lambda: attention(
        HEADS, HEADS, HEADS, dropout_mask=np.ones((1, 1, 2, 2), bool), keep_probability=0.0
    ),
    "unknown operation array([1., 1., 1.]": lambda: explain(ONES),
    "register got None; expected a Kernel": lambda: register(None),
    "np.sin(x) of a traced array": lambda: xf.grad(lambda x: np.sin(x)[0])(ONES),
    "np.exp reads values of a traced array": lambda: xf.jit(lambda x: np.exp(x))(ONES),
    "value_and_grad got None; expected a function": lambda: xf.grad(None),
    "jit got 3; expected a function": lambda: xf.jit(3),
    "remat got None; expected a function": lambda: xf.remat(None),
    "vjp got None; expected a function": lambda: xf.vjp(None, ONES),
    "Initializer got an unknown argument 'scheme'; layers choose it": lambda: xf.Initializer(scheme="x"),
    "EncoderLayer got 8 as self_attention; expected an instance of MultiHeadAttention": lambda: xf.EncoderLayer(
        8, 2, 16, 0.1
    ),
    "norm is 8; expected a layer": lambda: xf.PostNorm(8),
    "tokenizer is a Tokenizer; expected a PretrainedTokenizer": lambda: xf.Classifier(
        ENCODER, xf.text.Tokenizer.train(["a b"], 30)
    ),
    "model is a NoneType; expected a Transformer or LanguageModel": lambda: xf.generate(None, [[1]]),
}


@pytest.mark.parametrize("message", CASES)
def test_wrong_calls(message):
    with pytest.raises(XformerError, match=re.escape(message)) as info:
        CASES[message]()
    assert "\n" not in str(info.value)


def test_operators_of_numpy_arrays_and_traced_arrays():
    def loss(x):
        y = np.asarray([1.0, 2.0, 4.0])
        product = (y - x) @ (y + x) + np.float64(2.0) / x[0]
        return product - y[1] ** x[1] + (y < x)[2] * x[2]

    np.testing.assert_allclose(xf.grad(loss)(np.asarray([1.0, 2.0, 5.0])), [-4.0, -4 - 4 * np.log(2), -9.0])
    assert xf.jit(loss)(np.asarray([1.0, 2.0, 5.0])) == loss(np.asarray([1.0, 2.0, 5.0]))
