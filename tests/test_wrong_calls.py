"""Wrong calls that users make, each of which must raise one line that says what was expected."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import numpy as np
import pytest

import xformer as xf
from tests.reference import for_each
from xformer.backends import from_host, resolve, to_host
from xformer.errors import XformerError
from xformer.hints import ARRAYS
from xformer.layers import quantize, sinusoidal
from xformer.ops import attention, dropout, embedding, gelu, layer_norm, project_heads, rms_norm
from xformer.ops.operation import explain, register
from xformer.tree import with_fields

MODEL = xf.LanguageModel(xf.LanguageModelConfig(vocab_size=9, num_layers=1, d_model=8, num_heads=2, d_ff=8))
ENCODER = xf.Encoder(xf.EncoderConfig(vocab_size=9, num_layers=1, d_model=8, num_heads=2, d_ff=8, num_labels=2))
BATCHES = [np.ones((2, 4), int)] * 3
X = np.ones((2, 3), "float32")
ONES = np.ones(3, "float32")
HEADS = np.ones((1, 1, 2, 3), "float32")
ATTENTION = xf.MultiHeadAttention(8, 2, init=0)
NARROW, WIDE = xf.Linear(1, 4, init=0), xf.Linear(8, 4, init=0)
DATA = Path(__file__).parent / "families" / "data"
LLAMA = DATA / "llama"


class TorchLayer:
    """A layer of another library, which has parameters."""

    named_parameters = state_dict = dict


class Holder(xf.Module):
    layer: object


class Twice(xf.Module):
    first: object
    second: object


def mean_loss(model, batch, rng=None):
    losses = xf.cross_entropy(model(batch[:, :-1]), batch[:, 1:])
    return xf.array_namespace(losses).mean(losses)


def fit(loss=mean_loss, model=MODEL, batches=BATCHES, **options):
    return xf.fit(model, loss, batches, **{"steps": 1, "optimizer": xf.Adam(), "learning_rate": 0.1, **options})


def update(optimizer, state=None, learning_rate=0.1):
    state = optimizer.init(MODEL) if state is None else state
    return optimizer.update(MODEL, MODEL, state, learning_rate)


CASES = {
    "loss_fn returned None": lambda: fit(lambda model, batch, rng: None),
    "loss_fn cannot be called as loss_fn(model, batch, rng): too many": lambda: fit(lambda model: 1.0),
    "num_tokens returned [None] for the batches of step 1; expected numbers": lambda: fit(
        num_tokens=lambda batch: None
    ),
    "run_dir is 'a\\x00b'; expected the path": lambda: fit(run_dir="a\0b"),
    "state is of int; expected AdamState, from init(model)": lambda: update(xf.Adam(), state=3),
    "state is of SGDState; expected AdamState": lambda: update(xf.Muon(), state=xf.SGD().init(MODEL)),
    "learning_rate is '0.1'; expected a finite number": lambda: update(xf.SGD(), learning_rate="0.1"),
    "learning_rate is nan; expected a finite number": lambda: update(xf.Adafactor(), learning_rate=np.nan),
    "did you mean 'warmup_steps'?": lambda: xf.schedules.cosine(0.1, num_warmup_steps=3, total_steps=5),
    "a mask cannot be made on device 'cuda:7'": lambda: xf.masks.causal(3, device="cuda:7"),
    "a mask of 10000000 queries and 10000000 keys ran out of memory": lambda: xf.masks.causal(10**7),
    "start is 'a'; expected an integer": lambda: xf.masks.sliding_window(3, size=2, start="a"),
    "layer_norm got epsilon 'a'; expected a number from 0 to": lambda: layer_norm(X, ONES, ONES, epsilon="a"),
    "rms_norm got epsilon -1.0; expected a number from 0 to": lambda: xf.RMSNorm(3, epsilon=-1.0)(X),
    "layer_norm got an unknown argument 'eps'; did you mean 'epsilon'?": lambda: layer_norm(X, ONES, ONES, eps=1e-5),
    "rms_norm got epsilon nan": lambda: rms_norm(X, ONES, epsilon=np.nan),
    "gelu got an unknown argument 'approximate'; for the": lambda: gelu(X, approximate="tanh"),
    "attention got scale 'x'; expected a finite number": lambda: attention(HEADS, HEADS, HEADS, scale="x"),
    "keep_probability is 0.0; expected a number in (0, 1]": lambda: attention(
        HEADS, HEADS, HEADS, dropout_mask=np.ones((1, 1, 2, 2), bool), keep_probability=0.0
    ),
    "weight has shape (3, 6); expected a multiple of 4 heads": lambda: project_heads(
        HEADS[0], (np.ones((3, 6), "float32"), None, 4)
    ),
    "unknown operation array([1., 1., 1.]": lambda: explain(ONES),
    "embedding got scale 'a'; expected a finite number": lambda: embedding(X, np.asarray([0]), scale="a"),
    "length is -3; expected at least 0": lambda: sinusoidal(-3, 4, xp=np, dtype="float32"),
    "num_tokens is None and a batch has no num_tokens": lambda: xf.train_step(
        MODEL, xf.SGD().init(MODEL), BATCHES, None, loss_fn=mean_loss, optimizer=xf.SGD(), learning_rate=0.1
    ),
    "register got None; expected a Kernel": lambda: register(None),
    "np.histogram of a traced array": lambda: xf.grad(lambda x: np.histogram(x)[0][0])(ONES),
    "np.histogram reads values of a traced array": lambda: xf.jit(lambda x: np.histogram(x)[0])(ONES),
    "grad got None; expected a function": lambda: xf.grad(None),
    "jit got 3; expected a function": lambda: xf.jit(3),
    "remat got None; expected a function": lambda: xf.remat(None),
    "vjp got None; expected a function": lambda: xf.vjp(None, ONES),
    "Initializer got an unknown argument 'scheme'; layers choose the scheme": lambda: xf.Initializer(scheme="x"),
    "EncoderLayer got self_attention=8; expected an instance of MultiHeadAttention": lambda: xf.EncoderLayer(
        8, 2, 16, 0.1
    ),
    "bias is 'no'; expected True or False": lambda: xf.FeedForward(8, 16, bias="no", init=0),
    "bias is array([1., 1., 1.], dtype=float32); expected True or False": lambda: xf.LayerNorm(3, bias=ONES),
    "scale is 2.0; expected True or False": lambda: xf.Embedding(8, 4, scale=2.0, init=0),
    "path is None; expected a string or a Path": lambda: xf.load(None),
    "path is 3; expected a string or a Path": lambda: MODEL.save(3),
    "norm is 8; expected a layer": lambda: xf.PostNorm(8),
    "Forward defines forward; expected __call__": lambda: type("Forward", (xf.Module,), {"forward": len}),
    "Holder.layer is a tests.test_wrong_calls.TorchLayer; expected a layer of xformer": lambda: Holder(TorchLayer()),
    "a device or a dtype is passed as device=... or dtype=...": lambda: MODEL.to(np.float16),
    "a tokenizer cannot be called; use tokenizer.encode(text)": lambda: xf.tokenizers.Tokenizer.train(["a b"], 30)(
        "a", return_tensors="np"
    ),
    "tokenizer is a Tokenizer; expected an instance of PretrainedTokenizer": lambda: xf.Classifier(
        ENCODER, xf.tokenizers.Tokenizer.train(["a b"], 30)
    ),
    "model is None; expected a Transformer or LanguageModel": lambda: xf.generate(None, [[1]]),
    "; expected a Transformer or LanguageModel": lambda: xf.generate(ENCODER, [[1]]),
    "attention got scale inf; expected a finite number": lambda: attention(HEADS, HEADS, HEADS, scale=np.inf),
    "attention got scale 'y'; expected a finite number": lambda: attention(HEADS, HEADS, HEADS, scale="y", softcap=2.0),
    "keep_probability is 'a'; expected a number in (0, 1]": lambda: attention(
        HEADS, HEADS, HEADS, keep_probability="a"
    ),
    "keep_probability is nan; expected a number in (0, 1]": lambda: dropout(X, X > 0, np.nan),
    "causal is 'no'; expected True or False": lambda: ATTENTION(np.ones((1, 2, 8)), causal="no"),
    "a gradient has shape (8, 4); expected that of its parameter, (1, 4)": lambda: xf.SGD().update(
        NARROW, WIDE, xf.SGD().init(NARROW), 0.1
    ),
    "a velocity has shape (1, 4); expected that of its parameter, (8, 4)": lambda: xf.SGD().update(
        WIDE, WIDE, xf.SGD().init(NARROW), 0.1
    ),
    "a mean of gradients has shape (1, 4); expected that": lambda: xf.Muon().update(
        WIDE, WIDE, xf.Muon().init(NARROW), 0.1
    ),
    "the weight has NaN or infinite elements": lambda: quantize(
        with_fields(WIDE, weight=np.full((8, 4), np.nan, "float32"))
    ),
    "prompts is {'role': 'user'}; expected a list of texts": lambda: xf.TextGenerator.token_ids(None, {"role": "user"}),
    "with has_aux, expected (value, auxiliary output)": lambda: xf.grad(lambda x: x[0], has_aux=True)(ONES),
    "quantize is 'x'; expected 'int8', 'bfloat16' or 'int8_inputs'": lambda: xf.load_pretrained(LLAMA, quantize="x"),
    "unknown argument 'torch_dtype'; did you mean 'dtype'?": lambda: xf.load_pretrained(LLAMA, torch_dtype="float32"),
    "pack is 'no'; expected True or False": lambda: xf.load_pretrained(LLAMA, pack="no"),
    "start is array([0, 1]); expected an integer": lambda: xf.masks.sliding_window(3, size=2, start=np.arange(2)),
    "batches is a tuple of arrays of different shapes; pass [(x, y)]": lambda: fit(batches=(X, ONES)),
    "data is a tuple of arrays of different shapes; pass [(x, y)]": lambda: xf.validate((X, ONES), every=1),
    "'validation_data'; pass callbacks=[xformer.validate(batches, every=100)]": lambda: fit(validation_data=BATCHES),
    "'restore_best_weights'; pass keep_best=True to fit": lambda: xf.early_stopping(3, restore_best_weights=True),
    "ids has shape (2, 3) and dtype float32; expected integers, or floating rows of 9 elements": lambda: (
        MODEL.embedding(X)
    ),
    "optimizer is a Holder of tests; expected an optimizer of xformer": lambda: fit(optimizer=Holder(ONES)),
    "the parameters first.weight and second.weight are the same array": lambda: fit(model=Twice(NARROW, NARROW)),
    "all arrays of the model are frozen: use xformer.unfreeze": lambda: fit(model=xf.freeze(MODEL)),
    "all arrays of the model have dtypes of integers or booleans": lambda: fit(model=Holder(np.arange(3))),
    "weight is a list; expected an array, or None": lambda: with_fields(WIDE, weight=[[1.0]]),
    "missing ['bias', 'weight']; expected the 2 names of named_arrays(), as in {**dict(": lambda: xf.tree.replace(
        WIDE, {}
    ),
    "model is a str; expected a Module": lambda: xf.save_parameters("model.safetensors", WIDE),
    "model is the class Linear; expected a Module": lambda: xf.load_parameters(xf.Linear, "model.safetensors"),
    "unknown argument 'attention_mask'; pass lists of ids without padding, or (attention_mask != 0)": lambda: MODEL(
        [[1, 2]], attention_mask=[[1, 1]]
    ),
    "'output_hidden_states'; use: with xf.record(model, names)": lambda: MODEL([[1]], output_hidden_states=True),
    "unknown argument 'seed'; use rng=xformer.Rng(seed)": lambda: xf.generate(MODEL, [[1]], do_sample=True, seed=1),
    "std of torch got a traced array and would lose its gradient": lambda: torch_gradient(
        lambda torch, x: torch.std(x)
    ),
    "silu of torch got a traced array and would lose its gradient; use xformer.ops.silu": lambda: torch_gradient(
        lambda torch, x: torch.nn.functional.silu(x)
    ),
    "concatenate has no derivative rule; use xp.concat([x, y], axis=0)": lambda: xf.grad(
        lambda x: xf.array_namespace(x).concatenate([x, x])[0]
    )(ONES),
}


def torch_gradient(function):
    torch = pytest.importorskip("torch")
    return xf.grad(lambda x: function(torch, x))(torch.ones(3))


@for_each("message", CASES)
def test_wrong_calls(message):
    with pytest.raises(XformerError, match=re.escape(message)) as info:
        CASES[message]()
    assert "\n" not in str(info.value)


def test_names_of_other_libraries_lead_to_those_of_the_standard():
    for name in ("cat", "relu", "unsqueeze"):
        with pytest.raises(AttributeError, match=f"no method '{name}'; use x"):
            xf.grad(lambda x, name=name: getattr(x, name)())(ONES)
    with pytest.raises(AttributeError, match=r"no function 'cat'; use xp\.concat\("):
        xf.grad(lambda x: xf.array_namespace(x).cat([x, x]))(ONES)
    for name, expected in {"ReLU": "ops.relu", "optim": "AdamW", "manual_seed": "Rng"}.items():
        with pytest.raises(AttributeError, match=rf"no attribute '{name}'; use .*xformer\.{expected}"):
            getattr(xf, name)
    with pytest.raises(AttributeError, match=r"'AdamW' object has no attribute 'step'; use xformer\.fit"):
        xf.AdamW().step  # noqa: B018


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_what_the_hints_name_has_a_derivative(library):
    xp, x = pytest.importorskip(library), np.asarray([[1.0, 2.0], [3.0, 5.0]])
    names = {"xformer": xf, "minimum": 0.0, "maximum": 1.0, "value": 0.0, "shape": (4,), "axes": (1, 0), "size": 1}
    for name, hint in ARRAYS.items():
        used = re.match(r"use (.*)", hint)[1].removeprefix("slices, as in ").split(" and ")[0].split(", or ")[0]
        if name in ("backward", "detach", "item", "einsum"):
            continue

        def loss(x, used=used):
            ns = xf.array_namespace(x)
            given = {**names, "mask": xp.asarray(np.asarray([True, False])), "dtype": x.dtype}
            return ns.sum(eval(used, {"xp": ns, "x": x, "y": x, **given}))

        assert xf.grad(loss)(xp.asarray(x)).shape == x.shape


def test_operators_and_keywords_of_torch_in_a_derivative():
    torch = pytest.importorskip("torch")
    x, ones = torch.arange(3.0), torch.ones(3)
    gradient = xf.grad(lambda x: xf.array_namespace(x).sum(ones * x - ones / (1 + x) + (ones @ x)))(x)
    expected = x.clone().requires_grad_()
    (ones * expected - ones / (1 + expected) + (ones @ expected)).sum().backward()
    assert torch.allclose(gradient, expected.grad)
    count = xf.grad(lambda x: xf.array_namespace(x).sum(x * torch.ones(xf.array_namespace(x).argmax(x) + 1)))(x)
    assert count.tolist() == [1.0, 1.0, 1.0]
    with pytest.raises(TypeError, match="sum got dim= or keepdim= of torch; use axis= and keepdims="):
        xf.grad(lambda x: xf.array_namespace(x).sum(x, dim=0))(x)


def test_operators_of_numpy_arrays_and_traced_arrays():
    def loss(x):
        y = np.asarray([1.0, 2.0, 4.0])
        product = (y - x) @ (y + x) + np.float64(2.0) / x[0]
        return product - y[1] ** x[1] + (y < x)[2] * x[2]

    np.testing.assert_allclose(xf.grad(loss)(np.asarray([1.0, 2.0, 5.0])), [-4.0, -4 - 4 * np.log(2), -9.0])
    assert xf.jit(loss)(np.asarray([1.0, 2.0, 5.0])) == loss(np.asarray([1.0, 2.0, 5.0]))


def test_functions_of_numpy_take_what_has_no_gradient():
    x = np.asarray([0.5, 2.0])
    gradient = xf.grad(lambda x: xf.array_namespace(x).sum(x * np.sin(xf.stop_gradient(x))))(x)
    np.testing.assert_allclose(gradient, np.sin(x))


def test_a_traced_array_as_an_option_of_a_numpy_function_is_refused():
    with pytest.raises(XformerError, match="no argument out; use the result"):
        xf.jit(lambda x: np.exp(np.ones(3), out=x))(ONES)
    with pytest.raises(XformerError, match="no argument out; use the result"):
        xf.grad(lambda x: np.add(np.zeros(3), x, out=np.zeros(3))[0])(ONES)


def test_valid_calls_are_accepted():
    def two(model, batch):
        return mean_loss(model, batch)

    @functools.wraps(two)
    def wrapped(model, batch, rng):
        return two(model, batch)

    _, history = fit(wrapped, num_tokens=lambda batch: np.asarray(6))
    assert len(history) == 1
    expected = attention(HEADS, HEADS, HEADS, causal=True)
    np.testing.assert_array_equal(attention(HEADS, HEADS, HEADS, causal=np.True_), expected)


def test_modules_without_postponed_annotations_are_checked():
    own = type("Own", (xf.Module,), {"__annotations__": {"linear": xf.Linear, "size": int}})
    assert own(WIDE, 3).size == 3
    with pytest.raises(XformerError, match="Own got linear=8; expected an instance of Linear"):
        own(8, 3)


def test_a_number_of_tokens_may_be_a_fraction():
    _, history = fit(num_tokens=lambda batch: 0.5)
    assert history[0].num_tokens == 0.5


@for_each("dtype", ["uint8", "int8", "int16", "int32"])
def test_ids_of_any_integer_dtype(dtype, xp):
    table = xf.Embedding(9, 4, init=0)
    ids = from_host(resolve(xp), np.asarray([[3, 8]]), dtype=dtype)
    np.testing.assert_array_equal(to_host(table.to(xp)(ids)), table(np.asarray([[3, 8]])))
