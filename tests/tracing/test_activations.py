"""Recorded and changed activations of models."""

from __future__ import annotations

import copy
import importlib
import threading
from contextvars import copy_context

import numpy as np
import pytest

import xformer as xf
from tests.conftest import assert_close, library_or_skip
from tests.reference import normal, raises_line, small_language_model, small_model, without_jax
from xformer.backends import array_namespace, from_host, to_host
from xformer.errors import BackendError, ConfigError, ShapeError
from xformer.ops import attention_weights
from xformer.tracing import activations as module

TOKENS = [[5, 4, 7, 2], [3, 10, 2, 6]]
ENCODER = {"vocab_size": 13, "d_model": 8, "num_heads": 2, "d_ff": 12, "num_layers": 2}
LLAMA = {"norm": "rms", "activation": "swiglu", "positions": "rotary", "num_heads": 4, "num_key_value_heads": 2}
SHARED_NORM = {"parallel_residual": True, "shared_norm": True, "attention_sinks": True, "window": 2}
MODELS = {
    "gpt2": lambda: (small_language_model(positions="learned", max_positions=9), (TOKENS,)),
    "llama": lambda: (small_language_model(**LLAMA), (TOKENS,)),
    "parallel": lambda: (small_language_model(parallel_residual=True, attention_softcap=9.0), (TOKENS,)),
    "shared norm": lambda: (small_language_model(**SHARED_NORM), (TOKENS,)),
    "experts": lambda: (small_language_model(num_experts=3, shared_expert_d_ff=4), (TOKENS,)),
    "encoder": lambda: (xf.Encoder(xf.EncoderConfig(**ENCODER), dtype="float64"), (TOKENS,)),
    "shared layers": lambda: (xf.Encoder(xf.EncoderConfig(**ENCODER, share_layers=True), dtype="float64"), (TOKENS,)),
    "disentangled": lambda: (
        xf.Encoder(xf.EncoderConfig(**ENCODER, positions="disentangled", norm_position="post"), dtype="float64"),
        (TOKENS,),
    ),
    "transformer": lambda: (small_model(positions="relative", rematerialize=True), (TOKENS, TOKENS)),
    "images": lambda: (
        xf.ImageEncoder(xf.ImageEncoderConfig(image_size=8, patch_size=4, d_model=8, num_heads=2, d_ff=12)),
        (normal(0, 1, 3, 8, 8),),
    ),
}


def total(y):
    return array_namespace(y).sum(y * y)


@pytest.mark.parametrize("kind", MODELS)
def test_every_name_is_recorded_and_the_output_stays(kind):
    model, inputs = MODELS[kind]()
    with xf.record(model) as activations:
        output = model(*inputs)
    assert set(activations) == set(xf.activation_names(model))
    assert_close(output, model(*inputs))
    last = activations["logits" if "logits" in activations else "states"]
    assert_close(last, output, tolerance=0.0)
    for name in xf.activation_names(model):
        with xf.record(model, name) as single:
            model(*inputs)
        assert_close(single[name], activations[name])
    for name, weights in activations.items():
        if name.endswith(".weights") and kind != "shared norm":
            np.testing.assert_allclose(np.sum(weights, axis=-1), 1.0, rtol=1e-6)
        if name.endswith(".heads"):
            scores, values = (activations[name.replace("heads", other)] for other in ("scores", "values"))
            weights = activations[name.replace("heads", "weights")]
            assert scores.shape == weights.shape
            repeats = weights.shape[1] // values.shape[1]
            np.testing.assert_allclose(activations[name], weights @ np.repeat(values, repeats, axis=1), atol=1e-6)


@without_jax
def test_the_values_of_a_model(xp):
    model = small_language_model(xp, **LLAMA)
    plain = model.to("numpy")
    with xf.record(model, ["layers.1.self_attention.*", "*residual_*"]) as activations, xf.record(plain) as expected:
        model(TOKENS)
        plain(TOKENS)
    for name, x in activations.items():
        assert_close(x, expected[name], xp=xp)
    layer, states = "layers.1.self_attention.", xp.asarray(expected["layers.0.residual_out"])
    for first, second in (("0.residual_out", "1.residual_in"), ("1.residual_in", "0.residual_out")):
        assert_close(activations[f"layers.{first}"], activations[f"layers.{second}"], tolerance=0.0)
    weights = attention_weights(activations[f"{layer}queries"], activations[f"{layer}keys"], causal=True)
    assert_close(activations[f"{layer}weights"], weights)
    update = activations["layers.1.residual_mid"] - states
    assert_close(activations[f"{layer}output"], update)


@without_jax
def test_the_gradient_of_every_activation(xp):
    """Compare the gradient of a zero array added to an activation with a difference."""
    model = small_language_model(xp, **LLAMA)
    plain = model.to("numpy")
    with xf.record(plain) as values:
        plain(TOKENS)
    names = [name for name in values if not name.startswith("layers.0") or name.endswith(("weights", "keys"))]
    directions = {name: normal(i, *values[name].shape) for i, name in enumerate(names)}

    def loss(model, deltas):
        xp = array_namespace(*deltas.values())
        adding = {name: lambda x, delta=delta: xp.add(x, delta) for name, delta in deltas.items()}
        with xf.intervene(model, adding):
            return total(model(TOKENS))

    zeros = {name: from_host(xp, np.zeros_like(x)) for name, x in directions.items()}
    gradients = xf.grad(loss, argnums=1)(model, zeros)
    both = xf.grad(lambda arguments: loss(*arguments))((model, zeros))[1]
    for name, direction in directions.items():
        higher, lower = (loss(plain, {name: sign * 1e-5 * direction}) for sign in (1.0, -1.0))
        expected = float(higher - lower) / 2e-5
        assert float(np.sum(to_host(gradients[name]) * direction)) == pytest.approx(expected, rel=1e-6, abs=1e-7)
        assert_close(both[name], gradients[name])


def test_blocks_around_and_inside_derivatives_and_programs():
    model = small_language_model(rematerialize=True)
    name = "layers.1.residual_out"
    with xf.record(model, name) as expected:
        model(TOKENS)

    def loss(model):
        return total(model(TOKENS))

    def penalized(model):
        with xf.record(model, name) as inside:
            loss(model)
        return total(inside[name])

    with xf.record(model, name) as outside:
        value, _ = xf.value_and_grad(penalized)(model)
    assert_close(outside[name], expected[name])  # a plain array
    assert_close(value, total(expected[name]))
    assert not np.any(to_host(xf.grad(penalized)(model).norm.weight))  # the norm comes later
    with xf.record(model, name) as outside:
        hessian_like = xf.grad(lambda m: total(xf.grad(penalized)(m).layers[0].feed_forward.up.bias))(model)
    assert_close(outside[name], expected[name])
    assert np.any(to_host(hessian_like.layers[0].feed_forward.up.bias))
    jitted = xf.jit(lambda model, tokens: total(model(tokens)))
    tokens = np.asarray(TOKENS)
    plain = jitted(model, tokens)
    with xf.record(model, name) as recorded, xf.intervene(model, {"layers.0.feed_forward.output": lambda x: 0 * x}):
        changed = jitted(model, tokens)
    assert float(changed) != pytest.approx(float(plain))
    assert_close(jitted(model, tokens), plain)
    assert not np.allclose(to_host(recorded[name]), to_host(expected[name]))

    def inside(model, tokens):
        with xf.record(model, name) as recorded:
            return model(tokens), recorded[name]

    assert_close(xf.jit(inside)(model, tokens)[1], expected[name])
    assert_close(xf.jit(inside)(model, tokens)[1], expected[name])


def test_jax_compiles_and_differentiates_blocks():
    library_or_skip("jax")
    jax, plain = importlib.import_module("jax"), small_language_model(num_layers=1)
    name = "layers.0.self_attention.weights"

    def inside(delta, model):
        with xf.record(model, name) as recorded, xf.intervene(model, {name: lambda x: x + delta}):
            return total(model(np.asarray(TOKENS))), recorded[name]

    zero = np.zeros((2, 2, 4, 4))
    _, weights = inside(zero, plain)
    compiled = jax.jit(jax.value_and_grad(inside, has_aux=True))
    (_, actual), gradient = compiled(jax.numpy.asarray(zero), plain.to("jax"))
    assert_close(actual, weights, xp=jax.numpy)
    assert_close(gradient, xf.grad(inside, has_aux=True)(zero, plain)[0], xp=jax.numpy)
    (value, _), _ = compiled(actual, plain.to("jax"))  # not traced again
    assert_close(value, inside(weights, plain)[0], xp=jax.numpy)


def test_models_in_a_model():
    sizes = {"d_model": 8, "num_heads": 2, "d_ff": 12, "num_layers": 1, "pooler": "identity"}
    text = xf.EncoderConfig(vocab_size=13, pooling="last", **sizes)
    image = xf.ImageEncoderConfig(image_size=8, patch_size=4, **sizes)
    model = xf.ImageTextEncoder(xf.ImageTextEncoderConfig(text=text, image=image), dtype="float64")
    images, tokens = normal(0, 2, 3, 8, 8), [[5, 4, 2], [7, 6, 2]]
    with xf.record(model) as expected:
        model(images, tokens)
    assert set(expected) == set(xf.activation_names(model))
    with xf.record(model) as activations:
        xf.grad(lambda model: total(model(images, tokens)))(model)
    assert list(activations) == list(expected)
    for name, x in activations.items():
        assert_close(x, expected[name])
    first, second = small_language_model(), small_language_model(seed=1)
    pair = Pair(first, second)
    with xf.record(pair, "*.logits") as both:
        pair(TOKENS)
    assert_close(both["first.logits"], first(TOKENS))
    assert_close(both["second.logits"], second(TOKENS))
    message = "a called LanguageModel may be 'first' or 'second' of the model; pass one of them"
    with raises_line(ConfigError, message), xf.record(pair):
        xf.grad(lambda pair: total(pair(TOKENS)))(pair)
    with raises_line(ConfigError, message), xf.record(Pair(first, first)):
        Pair(first, first)(TOKENS)


class Pair(xf.Module):
    first: xf.LanguageModel
    second: xf.LanguageModel

    def __call__(self, tokens):
        return self.first(tokens) + self.second(tokens)


def test_torch_differentiates_recorded_activations():
    torch = pytest.importorskip("torch")
    model = small_language_model("torch")
    for _, array in model.named_parameters():
        array.requires_grad_()
    with xf.record(model, "layers.0.residual_out") as recorded:
        loss = total(model(TOKENS))
    (gradient,) = torch.autograd.grad(loss, [recorded["layers.0.residual_out"]])
    zero = np.zeros(tuple(gradient.shape))
    plain = small_language_model()

    def shifted(delta):
        with xf.intervene(plain, {"layers.0.residual_out": lambda x: x + delta}):
            return total(plain(TOKENS))

    assert_close(gradient, xf.grad(shifted)(zero), xp=library_or_skip("torch"))


def test_interventions_come_first_and_in_order():
    model = small_language_model()
    name = "layers.0.residual_out"
    with xf.record(model, [name, "layers.*.residual_in"]) as clean:
        logits = model(TOKENS)

    def overwrite(x):
        x[:, 0] = 2.0  # of a copy
        return x

    changes = {"layers.0.*_out": overwrite, name: lambda x: 3.0 * x}
    names = ["layers.1.residual_in", "layers.0.feed_forward.output"]
    first, second = xf.intervene(model, changes), xf.intervene(model, {name: lambda x: x + 1.0})
    with xf.record(model, name) as outer, first, second, xf.record(model, names) as inner:
        changed = model(TOKENS)
    expected = 3.0 * clean[name] + 1.0
    expected[:, 0] = 7.0
    assert_close(outer[name], expected)
    assert_close(inner["layers.1.residual_in"], expected)
    assert not np.any(inner["layers.0.feed_forward.output"][:, 0] == 2.0)
    assert not np.allclose(changed, logits)
    with xf.intervene(model, {name: expected}):
        assert_close(model(TOKENS), changed, tolerance=0.0)
    with xf.intervene(model, {name: clean[name]}), xf.intervene(model, {"layers.1.residual_in": clean[name]}):
        assert_close(model(TOKENS), logits, tolerance=0.0)
    assert_close(model(TOKENS), logits, tolerance=0.0)


def test_changed_weights_and_scores_are_those_that_the_layer_uses():
    model = small_language_model(attention_sinks=True)
    layer = "layers.1.self_attention."
    with xf.intervene(model, {f"{layer}scores": lambda x: 0 * x + 3.0}), xf.record(model, f"{layer}*") as uniform:
        model(TOKENS)
    sink = np.exp(to_host(model.layers[1].self_attention.sinks) - 3.0)
    expected = np.tril(np.ones((4, 4))) / (np.arange(1, 5)[:, None] + sink[:, None, None])  # masked after the change
    assert_close(uniform[f"{layer}weights"], np.stack([expected] * 2), xp=np)
    with xf.intervene(model, {f"{layer}weights": lambda x: 0 * x}), xf.record(model, f"{layer}heads") as nothing:
        model(TOKENS)
    assert not np.any(nothing[f"{layer}heads"])


def test_every_step_of_generation():
    model = small_language_model(positions="rotary")
    prompt = [[5, 4, 7]]
    plain = xf.generate(model, prompt, max_new_tokens=9)[0][0].tokens
    name = "layers.1.self_attention.weights"
    with xf.record(model, [name, "states"], every_call=True) as steps:
        recorded = xf.generate(model, prompt, max_new_tokens=9)[0][0].tokens
    assert recorded == plain
    with xf.record(model, [name, "states"]) as whole:
        model([[*prompt[0], *plain[:-1]]])
    for i, (weights, states) in enumerate(zip(steps[name][1:9], steps["states"][1:9], strict=True), 3):
        assert_close(weights[0, :, 0, :], whole[name][0, :, i, : i + 1])
        assert_close(states[0, 0], whole["states"][0, i])
    # Both programs and prompts of an earlier call are kept.
    change = {"layers.0.feed_forward.output": lambda x: -30 * x}
    with xf.intervene(model, change):
        changed = xf.generate(model, prompt, max_new_tokens=9)[0][0].tokens
        expected = np.argmax(model([[*prompt[0], *changed[:-1]]])[0, 2:], axis=-1)
    assert expected.tolist() == changed != plain
    assert xf.generate(model, prompt, max_new_tokens=9)[0][0].tokens == plain


def test_kept_prompts_are_not_used_in_a_block():
    from xformer.generation.prefix_cache import PrefixCache

    model, cache = small_language_model(), PrefixCache()
    prompt, change = [[3 + i % 9 for i in range(70)]], {"layers.0.residual_in": lambda x: -x}

    def generate():
        return xf.generate(model, prompt, max_new_tokens=3, prefix_cache=cache)[0][0].log_probability

    plain = generate()
    with xf.intervene(model, change):
        changed = generate()
    assert changed != pytest.approx(plain)
    assert generate() == plain


def test_an_encoder_decoder_generates():
    model = small_model()
    with xf.record(model, ["decoder.0.cross_attention.*", "memory"], every_call=True) as steps:
        xf.generate(model, TOKENS[:1], max_new_tokens=3)
    assert len(steps["memory"]) == 1
    assert {x.shape for x in steps["decoder.0.cross_attention.weights"]} == {(1, 2, 1, 4)}
    assert "decoder.0.cross_attention.keys" in steps


@pytest.mark.parametrize("change", ["pack", "quantize"])
def test_models_with_other_weights(change):
    model = small_language_model(dtype="float32", d_model=64)
    changed = getattr(model, change)()
    with xf.record(model, "*.weights") as activations, xf.record(changed, "*.weights") as own:
        model(TOKENS)
        changed(TOKENS)
        copy.deepcopy(model)([[5, 4]])
    for name, x in own.items():
        assert_close(activations[name], x, tolerance=0.02)


def test_other_models_threads_and_errors():
    model, other = small_language_model(), small_language_model(seed=1)
    seen, errors = [], []

    def in_thread():
        try:
            model(TOKENS)
            with xf.record(model, "logits") as own:
                other(TOKENS)
            seen.append(dict(own))
        except Exception as error:  # noqa: BLE001
            errors.append(error)

    with xf.record(model) as activations:
        other(TOKENS)
        other.layers[0].self_attention(np.ones((1, 3, 8)))
        thread = threading.Thread(target=in_thread)
        thread.start()
        thread.join()
    assert (activations, seen, errors) == ({}, [{}], [])
    with pytest.raises(ZeroDivisionError), xf.intervene(model, {"logits": lambda x: x / (1 // 0)}):
        model(TOKENS)
    assert not module.OPEN_BLOCKS
    shared = MODELS["shared layers"]()[0]

    def fail_at_first(x):
        if not seen.pop():
            raise ValueError("stop")
        return x

    seen[:] = [True, False]
    with xf.record(shared, "*.hidden") as activations, xf.record(shared, "*.hidden", every_call=True) as calls:
        with pytest.raises(ValueError, match="stop"), xf.intervene(shared, {"layers.0.residual_mid": fail_at_first}):
            shared(TOKENS)
        shared(TOKENS)
    assert {name: len(x) for name, x in calls.items()} == {f"layers.{i}.feed_forward.hidden": 1 for i in range(2)}
    seen.clear()
    barrier = threading.Barrier(2)

    def wait(x):
        barrier.wait(5)
        return x

    changes = {"embeddings": wait, "layers.0.residual_mid": wait, "layers.1.*.hidden": lambda x: seen.append(x) or x}
    with xf.intervene(shared, changes):  # each thread counts the calls of a layer
        both = [threading.Thread(target=copy_context().run, args=(shared, TOKENS)) for _ in range(2)]
        for thread in both:
            thread.start()
        for thread in both:
            thread.join()
    assert len(seen) == 2
    assert_close(*seen)
    with pytest.raises(KeyError, match=r"'layers.0.feed_forward.hide' was not recorded; did you mean 'layers.0"):
        activations["layers.0.feed_forward.hide"]
    with xf.record(model) as empty, pytest.raises(KeyError, match="was not recorded: the model was not called"):
        empty["logits"]


def test_wrong_calls():
    model = small_language_model()
    with (
        raises_line(ConfigError, "record got a ndarray; expected a model, e.g. a LanguageModel"),
        xf.record(np.ones(3)),
    ):
        pass
    with raises_line(ConfigError, "record got a Linear; expected a model"), xf.record(model.layers[0].feed_forward.up):
        pass
    for name in ("layers.9.residual_out", "layers.-1.residual_out"):
        message = rf"LanguageModel has no activation '{name}'; expected one of layers.0.residual_out, layers.1.res\w*$"
        with raises_line(ConfigError, message), xf.record(model, name):
            pass
    message = r"has no activation 'nothing\*'; expected one of embeddings, states, logits, layers.\*.residual_in, "
    with raises_line(ConfigError, message), xf.record(model, ["logits", "nothing*"]):
        pass
    for names in (3, None, [], [3], {}):
        with raises_line(ConfigError, r"names is .*; expected names of activations"), xf.record(model, names):
            pass
    for changes in (None, abs, ["logits"], {}):
        with raises_line(ConfigError, "interventions is .*; expected a dict"), xf.intervene(model, changes):
            pass
    for value in (None, 0.0, [1.0]):
        message = "the intervention at 'logits' is .*; expected a function or an array"
        with raises_line(ConfigError, message), xf.intervene(model, {"logits": value}):
            pass
    for value, received in (
        (lambda x: None, "None"),
        (lambda x: 0.0, "a float"),
        (lambda x: x.tolist(), "a list"),
        (lambda x: x[0], r"float64\[4, 13\]"),
        (lambda x: x.astype("float32"), r"float32\[2, 4, 13\]"),
        (np.zeros(3), r"float64\[3\]"),
    ):
        message = rf"the intervention at 'logits' returned {received}; expected an array like float64\[2, 4, 13\]"
        with raises_line(ShapeError, message), xf.intervene(model, {"logits": value}):
            model(TOKENS)
    strict = library_or_skip("array_api_strict")
    message = "returned an array of array_api_strict; expected one of numpy"
    with raises_line(BackendError, message), xf.intervene(model, {"logits": lambda x: strict.asarray(x)}):
        model(TOKENS)
    with raises_line(ConfigError, "the interventions were not applied"), xf.intervene(model, {"logits": abs}):
        copy.deepcopy(model)(TOKENS)
