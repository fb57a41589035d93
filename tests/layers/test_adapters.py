"""Low-rank adapters, and frozen arrays."""

from __future__ import annotations

import numpy as np
import pytest

import xformer as xf
from xformer.backends import array_namespace, to_host
from xformer.errors import ConfigError
from xformer.layers.weights import LoraWeight
from xformer.tree import flatten, flatten_parameters, map_parameters, with_fields

CONFIG = xf.LanguageModelConfig(vocab_size=23, d_model=16, num_heads=2, d_ff=32, num_layers=2, dropout=0.0)
IDS = np.random.default_rng(0).integers(3, 23, (2, 9))


def loss_fn(model, batch, rng=None):
    losses = xf.cross_entropy(model(batch[:, :-1], rng=rng), batch[:, 1:])
    return array_namespace(losses).sum(losses)


def arrays(model):
    return {name: to_host(x).copy() for name, x in model.named_arrays()}


def base_arrays(model):
    return {name.replace(".weight.base", ".weight"): x for name, x in arrays(model).items() if ".lora_" not in name}


OPTIONS = {"learning_rate": 1e-2, "steps": 20, "num_tokens": lambda batch: 16}


def test_new_adapters_change_nothing(xp):
    model = xf.LanguageModel(CONFIG, xp=xp)
    adapted, ids = xf.lora(model, 4), array_namespace(model.embedding.weight).asarray(IDS)
    np.testing.assert_allclose(to_host(adapted(ids)), to_host(model(ids)), rtol=0, atol=1e-6)
    names = [name for name, _ in adapted.named_trainable_parameters()]
    assert len(names) == 2 * 2 * 6
    assert all(name.endswith(("lora_a", "lora_b")) for name in names)
    assert adapted.parameter_count() - model.parameter_count() == 2 * 4 * (4 * 32 + 2 * 48)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("optimizer", [xf.AdamW(), xf.SGD(), xf.Muon(), xf.Adafactor()], ids=repr)
def test_training_changes_adapters_only(optimizer, jit):
    model = xf.lora(xf.LanguageModel(CONFIG, seed=0), 4)
    before = arrays(model)
    trained, history = xf.fit(model, loss_fn, [IDS], optimizer=optimizer, jit=jit, **OPTIONS)
    after = arrays(trained)
    assert history[-1].loss < history[0].loss
    for name, x in before.items():
        assert np.array_equal(after[name], x) == (".lora_" not in name), name
    assert arrays(model).keys() == before.keys()
    np.testing.assert_allclose(xf.merge_lora(trained)(IDS), trained(IDS), rtol=0, atol=1e-5)
    assert base_arrays(trained).keys() == arrays(xf.merge_lora(trained)).keys()


def test_gradients_are_those_of_the_product():
    """dA = s dW B^T and dB = s A^T dW, for the gradient dW of the merged weight."""
    layer, rng = xf.Linear(6, 5, init=0).to(dtype="float64"), np.random.default_rng(1)
    weight = LoraWeight.make(layer.weight, rng.normal(size=(6, 2)), rng.normal(size=(2, 5)), 1.5)
    x, g = rng.normal(size=(7, 6)), rng.normal(size=(7, 5))
    found = xf.grad(lambda layer: np_sum(layer(x) * g))(with_fields(layer, weight=weight)).weight
    dense = xf.grad(lambda layer: np_sum(layer(x) * g))(with_fields(layer, weight=weight.merged())).weight
    np.testing.assert_allclose(found.lora_a, 1.5 * dense @ weight.lora_b.T, rtol=0, atol=1e-12)
    np.testing.assert_allclose(found.lora_b, 1.5 * weight.lora_a.T @ dense, rtol=0, atol=1e-12)
    assert found.base is None


def test_gradients_of_magnitudes_are_those_of_constant_norms():
    """The matrix is m V / |V|, where the norms |V| have no gradient (Liu et al., 2024, section 4.3)."""
    layer, rng = xf.Linear(6, 5, init=0).to(dtype="float64"), np.random.default_rng(1)
    a, b, m = rng.normal(size=(6, 2)), rng.normal(size=(2, 5)), rng.uniform(1, 2, 5)
    weight = LoraWeight.make(layer.weight, a, b, 1.5, m)
    v = layer.weight + 1.5 * a @ b
    norms = np.linalg.norm(v, axis=0)
    np.testing.assert_allclose(weight.merged(), m * v / norms, rtol=0, atol=1e-12)
    x, g = rng.normal(size=(7, 6)), rng.normal(size=(7, 5))
    layer, dense = with_fields(layer, weight=weight), x.T @ g
    np.testing.assert_allclose(layer(x), x @ weight.merged() + layer.bias, rtol=0, atol=1e-12)
    found = xf.grad(lambda layer: np_sum(layer(x) * g))(layer).weight
    np.testing.assert_allclose(found.magnitude, np.sum(dense * v / norms, axis=0), rtol=0, atol=1e-12)
    np.testing.assert_allclose(found.lora_a, 1.5 * (dense * m / norms) @ b.T, rtol=0, atol=1e-12)
    np.testing.assert_allclose(found.lora_b, 1.5 * a.T @ (dense * m / norms), rtol=0, atol=1e-12)
    assert found.base is None


@pytest.mark.parametrize("jit", [False, True])
def test_magnitudes_are_trained(jit):
    model = xf.lora(xf.LanguageModel(CONFIG, seed=0), 4, use_dora=True)
    np.testing.assert_allclose(model(IDS), xf.LanguageModel(CONFIG, seed=0)(IDS), rtol=0, atol=1e-5)
    before = arrays(model)
    trained, history = xf.fit(model, loss_fn, [IDS], optimizer=xf.AdamW(), jit=jit, **OPTIONS)
    assert history[-1].loss < history[0].loss
    for name, x in arrays(trained).items():
        assert np.array_equal(before[name], x) == (".lora_" not in name and "magnitude" not in name), name
    np.testing.assert_allclose(xf.merge_lora(trained)(IDS), trained(IDS), rtol=0, atol=1e-5)
    with pytest.raises(ConfigError, match="the model is quantized; use_dora expects floating weights"):
        xf.lora(xf.LanguageModel(CONFIG).quantize(), use_dora=True)


def np_sum(x):
    return array_namespace(x).sum(x)


def test_a_quantized_model_trains():
    model = xf.lora(xf.LanguageModel(CONFIG, seed=0).quantize(), 4)
    before = arrays(model)
    trained, history = xf.fit(model, loss_fn, [IDS], optimizer=xf.AdamW(), **OPTIONS)
    assert history[-1].loss < 0.7 * history[0].loss
    assert all(np.array_equal(x, before[name]) for name, x in arrays(trained).items() if ".lora_" not in name)
    with pytest.raises(ConfigError, match=r"the model is quantized to int8; expected floating weights.*lora"):
        xf.fit(xf.LanguageModel(CONFIG).quantize(), loss_fn, [IDS], optimizer=xf.AdamW(), **OPTIONS)
    merged = xf.merge_lora(trained)  # of floats
    np.testing.assert_allclose(merged(IDS), trained(IDS), rtol=0, atol=1e-5)
    assert {x.dtype.name for _, x in merged.named_arrays()} == {"float32"}


@pytest.mark.parametrize("jit", [False, True])
def test_a_packed_model_trains_as_the_model(jit):
    model = xf.LanguageModel(CONFIG, seed=0)
    found = [
        xf.fit(xf.lora(each, 4), loss_fn, [IDS], optimizer=xf.AdamW(), jit=jit, **OPTIONS)[0]
        for each in (model, model.pack())
    ]
    for name, x in arrays(found[0]).items():
        np.testing.assert_array_equal(arrays(found[1])[name], x, err_msg=name)


def test_generation_and_files(tmp_path):
    model = xf.lora(xf.LanguageModel(CONFIG, seed=0), 4)
    trained, _ = xf.fit(model, loss_fn, [IDS], optimizer=xf.AdamW(), **OPTIONS)
    merged = xf.merge_lora(trained)
    tokens = [[row[0].tokens for row in xf.generate(each, [[3, 4]], max_new_tokens=12)] for each in (trained, merged)]
    assert tokens[0] == tokens[1]
    for refused in (lambda: trained.save(tmp_path / "x"), trained.quantize, trained.pack, lambda: xf.lora(trained)):
        with pytest.raises(ConfigError, match=r"the model has adapters; use merge_lora\(model\), or save_lora"):
            refused()
    merged.save(tmp_path / "x.safetensors")
    np.testing.assert_array_equal(xf.load(tmp_path / "x.safetensors")(IDS), merged(IDS))


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((0,), {}, "rank is 0; expected an integer of at least 1"),
        ((2.0,), {}, r"rank is 2\.0; expected an integer"),
        ((2,), {"alpha": True}, "alpha is True; expected a number above 0"),
        ((2,), {"alpha": 0}, "alpha is 0; expected a number above 0"),
        ((2,), {"alpha": float("nan")}, "alpha is nan; expected a number above 0"),
        ((2,), {"targets": "q_proj"}, "no linear map is called 'q_proj'; "),
        ((2,), {"use_dora": "yes"}, "use_dora is 'yes'; expected True or False"),
        ((2,), {"targets": []}, r"targets is \[\]; expected at least one name"),
        ((2,), {"targets": ["query", "valu"]}, "no linear map is called 'valu'; did you mean 'value'"),
    ],
)
def test_wrong_arguments(arguments, options, message):
    with pytest.raises(ConfigError, match=message):
        xf.lora(xf.LanguageModel(CONFIG), *arguments, **options)


def test_wrong_models():
    model = xf.LanguageModel(CONFIG)
    with pytest.raises(ConfigError, match="the model has adapters; use merge_lora"):
        xf.lora(xf.lora(model))
    with pytest.raises(ConfigError, match="expected a Module with linear maps"):
        xf.lora([1, 2])
    with pytest.raises(ConfigError, match="the model has no adapters"):
        xf.merge_lora(model)
    with pytest.raises(ConfigError, match=r"all arrays of the model are frozen.*unfreeze"):
        xf.fit(xf.freeze(model), loss_fn, [IDS], optimizer=xf.Adam(), **OPTIONS)


# --- frozen arrays -------------------------------------------------------------------------------------------------


def test_a_frozen_model_generates_but_has_no_gradient():
    model = xf.freeze(xf.LanguageModel(CONFIG, seed=0))
    assert len(xf.generate(model, [[3, 4]], max_new_tokens=3)[0][0].tokens) <= 3
    with pytest.raises(ConfigError, match="all arrays are frozen; expected at least one parameter"):
        xf.value_and_grad(loss_fn)(model, IDS)
    for wrong in (3, np.ones(3), [], {"a": 1}):
        with pytest.raises(ConfigError, match="expected a Module, or a container of Modules"):
            xf.freeze(wrong)


def test_a_frozen_part_keeps_its_arrays():
    model = xf.LanguageModel(CONFIG, seed=0)
    frozen = xf.freeze(model, "embedding")
    _, gradient = xf.value_and_grad(loss_fn)(frozen, IDS)
    _, full = xf.value_and_grad(loss_fn)(model, IDS)
    assert gradient.embedding.weight is None
    np.testing.assert_array_equal(gradient.norm.weight, full.norm.weight)
    trained, _ = xf.fit(frozen, loss_fn, [IDS], optimizer=xf.Adam(), **OPTIONS)
    assert trained.embedding.weight is model.embedding.weight
    assert not np.array_equal(trained.norm.weight, model.norm.weight)
    assert frozen.parameter_count() == model.parameter_count()
    assert len(list(frozen.named_parameters())) == len(list(model.named_parameters()))
    assert len(flatten_parameters(frozen)[0]) == len(flatten(model)[0]) - 1
    assert map_parameters(np.zeros_like, frozen).embedding.weight is None
    thawed = xf.unfreeze(trained)
    assert len(flatten_parameters(thawed)[0]) == len(flatten(model)[0])
    assert not list(xf.freeze(model).to(dtype="float64").named_trainable_parameters())


class Table(xf.Module):
    rows: dict[str, object]
    inner: tuple[object, ...]


def test_fields_are_frozen_by_their_names():
    table = xf.freeze(
        Table({"a": np.ones(2), "b": (np.ones(3), np.ones(1))}, (xf.Linear(2, 2, init=0), np.ones(4))), "rows"
    )
    assert [name for name, _ in table.named_trainable_parameters()] == ["inner.0.weight", "inner.0.bias", "inner.1"]
    assert not list(xf.freeze(table, "inner").named_trainable_parameters())
    with pytest.raises(ConfigError, match="Table has no field 'row'; did you mean 'rows'"):
        xf.freeze(table, "row")
    with pytest.raises(ConfigError, match="freeze got a list; expected a Module"):
        xf.freeze([table], "rows")
    with pytest.raises(ConfigError, match=r"a field is \['rows'\]; expected a name"):
        xf.freeze(table, ["rows"])
    with pytest.raises(ConfigError, match=r"LanguageModel\.config has no arrays to freeze"):
        xf.freeze(xf.LanguageModel(CONFIG, seed=0), "config")


def test_containers_of_arrays_are_frozen():
    table = Table({"a": np.ones(2), "b": (np.ones(3), np.ones(1))}, (xf.Linear(2, 2, init=0), np.ones(4)))
    assert len(list(table.named_trainable_parameters())) == 6
    assert not list(xf.freeze(table).named_trainable_parameters())
    assert not flatten_parameters(xf.freeze(table))[0]
