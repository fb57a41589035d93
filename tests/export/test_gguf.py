"""GGUF files that are written load like the model, and have what the package gguf and llama.cpp's converter write."""

import ctypes
import dataclasses
import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.checkpoints import DATA, copy
from tests.families.test_gguf import random_blocks, write_gguf
from tests.reference import raises_line
from xformer import LanguageModel, LanguageModelConfig, load_pretrained, lora, merge_lora, save_pretrained
from xformer.errors import ConfigError
from xformer.export import export_gguf, export_gguf_lora
from xformer.export.gguf_blocks import QUANTIZERS, quantize
from xformer.families import gguf_file
from xformer.tree import with_fields

gguf = pytest.importorskip("gguf")
TYPE = gguf.GGMLQuantizationType
CASES = [
    "gpt2", "llama", "llama_tied_llama3_rope", "llama_linear_rope_biases", "llama_yarn", "qwen2_tied", "qwen3", "phi3",
    "phi3_longrope", "mixtral", "qwen3_moe", "olmoe", "gemma2", "gemma3",
]  # fmt: skip


def read(path):
    """Return the metadata with its types, and the tensors with theirs, by the package gguf."""
    reader = gguf.GGUFReader(path)
    fields = {key: (field.types, field.contents()) for key, field in reader.fields.items()}
    tensors = {each.name: (each.tensor_type, each.shape.tolist(), each.data.tobytes()) for each in reader.tensors}
    return fields, tensors


def checkpoint(case, directory):
    """Copy a checkpoint with values of config.json that llama.cpp has, such as the scale of attention of Gemma."""
    values = json.loads((DATA / case / "config.json").read_text())
    if "gemma" in case:
        return copy(case, directory, layer_types="removed", query_pre_attn_scalar=values["head_dim"])
    if case == "olmoe":
        config = dataclasses.replace(load_pretrained(DATA / case).config, num_key_value_heads=None)
        save_pretrained(LanguageModel(config, seed=1), directory / case)
        return directory / case
    return copy(case, directory, **({"sliding_window": None} if case == "phi3" else {}))


@pytest.mark.parametrize("case", CASES)
def test_a_model_is_written_as_the_converter_of_llama_cpp_writes_it(case, tmp_path):
    directory = checkpoint(case, tmp_path)
    export_gguf(load_pretrained(directory), tmp_path / "model.gguf")
    fields, tensors = read(tmp_path / "model.gguf")
    values = json.loads((directory / "config.json").read_text())
    write_gguf(tmp_path / "expected.gguf", values, load_file(directory / "model.safetensors"))
    expected_fields, expected = read(tmp_path / "expected.gguf")
    assert tensors.keys() == expected.keys()
    for name, (kind, shape, data) in expected.items():
        assert tensors[name][:2] == (kind, shape)
        x, y = (np.frombuffer(each, "f4") for each in (tensors[name][2], data))
        np.testing.assert_allclose(x, y, rtol=1e-6 if "rope" in name else 0, atol=1e-7 if "norm" in name else 0)
    ours = {
        "general.name",
        "general.file_type",
        *(f"tokenizer.ggml.{each}_token_id" for each in ("bos", "eos", "padding")),
    }
    for key in expected_fields.keys() - ours - {"GGUF.kv_count"}:
        (types, value), (expected_types, expected_value) = fields.get(key, (None, None)), expected_fields[key]
        if not (value is None and key.endswith("sliding_window")):  # 0: none
            is_number = isinstance(expected_value, float)
            expected_value = pytest.approx(expected_value, rel=1e-6) if is_number else expected_value
            assert (types, value) == (expected_types, expected_value), key


@pytest.mark.parametrize("case", CASES)
def test_a_model_that_was_written_has_the_same_logits_and_is_written_the_same_again(case, tmp_path):
    model = load_pretrained(checkpoint(case, tmp_path))
    export_gguf(model, tmp_path / "first.gguf")
    loaded = load_pretrained(tmp_path / "first.gguf")
    tokens = np.load(DATA / case / "reference.npz")["tokens"]
    logits = model(tokens)
    np.testing.assert_allclose(loaded(tokens), logits, rtol=0, atol=1e-5 * np.abs(logits).max())
    for (name, x), (other, y) in zip(loaded.named_parameters(), model.named_parameters(), strict=True):
        assert name == other
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-7)
    export_gguf(loaded, tmp_path / "second.gguf", source=tmp_path / "first.gguf")
    export_gguf(None, tmp_path / "third.gguf", source=tmp_path / "first.gguf")
    assert len({(tmp_path / f"{name}.gguf").read_bytes() for name in ("first", "second", "third")}) == 1


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("gemma2", {"tie_output": False}, "tie_output is False; GGUF files of gemma2 expect True"),
        ("gemma2", {"attention_bias": True}, "nearest family is gemma2: attention_bias is True; expected False"),
        ("gemma3", {"attention_softcap": 2.0}, "family is gemma3_text: attention_softcap is 2.0; expected None"),
        ("gemma3", {"causal": False}, "nearest family is gemma3_text: .*causal is False; expected True"),
        ("qwen2_tied", {"head_dim": 16}, "attention_output_bias is False; expected True"),
        ("qwen3_moe", {"attention_bias": True}, "nearest family is qwen3_moe: attention_bias is True; expected False"),
        ("olmoe", {"num_key_value_heads": 2}, "nearest family is olmoe: num_key_value_heads is 2; expected 4"),
    ],
)
def test_what_llama_cpp_does_not_compute_is_refused(case, changes, message, tmp_path):
    model = load_pretrained(checkpoint(case, tmp_path))
    changed = LanguageModel(dataclasses.replace(model.config, **changes), seed=0)
    with raises_line(ConfigError, message):
        export_gguf(with_fields(changed, model_type=model.model_type), tmp_path / "model.gguf")


def test_the_context_of_phi3_is_its_window(tmp_path):
    model = load_pretrained(checkpoint("phi3", tmp_path))
    changed = LanguageModel(dataclasses.replace(model.config, window=5), seed=0)
    export_gguf(with_fields(changed, model_type="phi3"), tmp_path / "model.gguf")
    loaded = load_pretrained(tmp_path / "model.gguf")
    assert loaded.config.max_positions == 5
    assert loaded.config.window == changed.config.window == 5


def test_windows_that_exceed_the_context_and_other_models_with_long_ropes_are_those_of_phi3(tmp_path):
    scaling = {"rope_type": "longrope", "short_factor": [1.5] * 32, "long_factor": [2.0] * 32, "factor": 2.0,
               "original_max_position_embeddings": 16}  # fmt: skip
    for model in (wide(window=4096, max_positions=4096), wide(rope_scaling=scaling)):
        export_gguf(model, tmp_path / "model.gguf")
        assert read(tmp_path / "model.gguf")[0]["general.architecture"][1] == "phi3"
        loaded = load_pretrained(tmp_path / "model.gguf")
        np.testing.assert_allclose(loaded([[3, 4, 5, 6]]), model([[3, 4, 5, 6]]), rtol=0, atol=1e-5)


# --- types ------------------------------------------------------------------------------------------------------------


def numbers(rng, shape):
    """Return numbers of many magnitudes, and rows of zeros, equal numbers, halves, and numbers of one sign."""
    x = (rng.normal(size=shape) * np.exp(rng.normal(size=(shape[0], 1)))).astype(np.float32)
    x[0], x[1], x[2], x[3], x[4] = 0, 2.5, -2.5, np.round(x[3] * 2) / 2, np.abs(x[4])
    x[5, ::2] *= 1e-3
    return x


@pytest.mark.parametrize("code", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_types_have_the_bits_that_the_package_gguf_computes(code):
    x = numbers(np.random.default_rng(0), (64, 256))
    with np.errstate(divide="ignore"):
        expected = gguf.quantize(x, TYPE[code]).tobytes()
    assert quantize(x, code) == expected


def relative_error(x, data, code):
    values = gguf.dequantize(np.frombuffer(data, np.uint8), TYPE[code]).reshape(x.shape)
    assert np.isfinite(values).all()
    return float(np.sqrt(np.mean((values - x) ** 2) / np.mean(x**2)))


@pytest.mark.parametrize(("code", "largest"), [("Q4_K", 0.075), ("Q5_K", 0.038), ("Q6_K", 0.019)])
def test_the_error_of_k_quants_is_that_of_llama_cpp(code, largest):
    x = numbers(np.random.default_rng(0), (256, 512))
    error = relative_error(x, quantize(x, code), code)
    assert error < largest
    llama = pytest.importorskip("xllamacpp.xllamacpp", exc_type=ImportError)  # has ggml
    function = ctypes.CDLL(llama.__file__).ggml_quantize_chunk
    function.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    function.restype = ctypes.c_size_t
    data = np.empty(gguf.quant_shape_to_byte_shape(x.shape, TYPE[code]), np.uint8)
    assert function(TYPE[code], x.ctypes.data, data.ctypes.data, 0, *x.shape, None) == data.size
    assert error < 1.01 * relative_error(x, data, code)


@pytest.mark.parametrize("code", ["Q4_K", "Q5_K", "Q6_K"])
def test_values_of_k_quants_are_kept_by_a_second_quantization(code):
    kind, rng = TYPE[code], np.random.default_rng(0)
    x = gguf.dequantize(random_blocks(kind, (64, 512), rng), kind)
    assert relative_error(x, quantize(x, code), code) < {"Q4_K": 0.04, "Q5_K": 0.02, "Q6_K": 0.01}[code]


def wide(**fields):
    """Return a small language model whose matrices have rows of 256 and of 96."""
    defaults = {"vocab_size": 11, "d_model": 256, "num_heads": 4, "d_ff": 96, "num_layers": 1, "positions": "rotary",
                "norm": "rms", "activation": "swiglu", "attention_bias": False, "feed_forward_bias": False,
                "scale_embeddings": False}  # fmt: skip
    return LanguageModel(LanguageModelConfig(**defaults | fields), seed=1)


@pytest.mark.parametrize(
    ("code", "d_ff", "fallback"),
    [("Q4_K", 96, "Q5_0"), ("Q5_K", 96, "Q5_1"), ("Q6_K", 96, "Q8_0"), ("Q4_K", 40, "F16"), ("Q8_0", 40, "F16")],
)
def test_rows_that_are_no_multiple_of_the_block_get_the_type_of_llama_cpp(code, d_ff, fallback, tmp_path):
    phrase = export_gguf(wide(d_ff=d_ff), tmp_path / "model.gguf", quantization=code)
    assert f"1 in {fallback}, as their rows do not fit {code}" in phrase
    assert f"7 in {code}" in phrase
    tensors = read(tmp_path / "model.gguf")[1]
    assert tensors["blk.0.ffn_down.weight"][0] == TYPE[fallback]
    assert tensors["blk.0.ffn_norm.weight"][0] == TYPE.F32


@pytest.mark.parametrize("code", [*QUANTIZERS][1:])
def test_every_type_loads_and_stays_the_same(code, tmp_path):
    model = wide(d_ff=256)
    export_gguf(model, tmp_path / "model.gguf", quantization=code)
    loaded, tokens = load_pretrained(tmp_path / "model.gguf", dtype="float32"), [[3, 4, 5, 6]]
    logits = model(tokens)
    assert np.abs(loaded(tokens) - logits).max() < (0.5 if "4" in code else 0.25) * np.abs(logits).max()
    assert f"8 in {code}" in export_gguf(loaded, tmp_path / "copy.gguf", source=tmp_path / "model.gguf")
    assert (tmp_path / "copy.gguf").read_bytes() == (tmp_path / "model.gguf").read_bytes()


def test_types_that_are_only_read_stay_in_tensors_that_did_not_change(tmp_path):
    source, rng = tmp_path / "source.gguf", np.random.default_rng(0)
    export_gguf(wide(d_ff=512, vocab_size=23), tmp_path / "float.gguf")
    reader, kinds = gguf.GGUFReader(tmp_path / "float.gguf"), [TYPE.Q2_K, TYPE.Q3_K, TYPE.IQ4_NL, TYPE.Q4_K, TYPE.Q6_K]
    writer, expected = gguf.GGUFWriter(source, "llama"), {}
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            writer.add_key_value(key, field.contents(), field.types[0])
    for i, tensor in enumerate(reader.tensors):
        kind = kinds[i % 5] if len(tensor.shape) == 2 else TYPE.F32
        data = tensor.data if kind == TYPE.F32 else random_blocks(kind, tensor.data.shape, rng)
        writer.add_tensor(tensor.name, data, raw_dtype=kind)
        expected[tensor.name] = (kind, data)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    assert {*kinds} <= {kind for kind, _ in expected.values()}
    for key, entry in gguf_file.read_header(source)[1].items():
        np.testing.assert_array_equal(entry.read(), gguf.dequantize(expected[key][1], expected[key][0]))
    model = load_pretrained(source)
    np.testing.assert_allclose(load_pretrained(source, pack=True)([[3, 4]]), model([[3, 4]]), rtol=1e-4, atol=1e-4)
    model.layers[0].feed_forward.down.weight.T[...] += 0.5
    export_gguf(model, tmp_path / "changed.gguf", source=source)
    before, after = read(source)[1], read(tmp_path / "changed.gguf")[1]
    assert [name for name in before if before[name] != after[name]] == ["blk.0.ffn_down.weight"]
    export_gguf(None, tmp_path / "copy.gguf", source=source)
    assert (tmp_path / "copy.gguf").read_bytes() == source.read_bytes()


def test_only_what_changed_is_quantized_again(tmp_path):
    export_gguf(wide(d_ff=256), tmp_path / "model.gguf", quantization="Q4_K")
    loaded = load_pretrained(tmp_path / "model.gguf")
    loaded.layers[0].feed_forward.down.weight[...] += 0.5
    export_gguf(loaded, tmp_path / "changed.gguf", source=tmp_path / "model.gguf")
    (fields, before), (changed_fields, after) = (read(tmp_path / f"{name}.gguf") for name in ("model", "changed"))
    assert fields == changed_fields
    assert [name for name in before if before[name] != after[name]] == ["blk.0.ffn_down.weight"]
    found = load_pretrained(tmp_path / "changed.gguf").layers[0].feed_forward.down.weight
    assert np.abs(found - loaded.layers[0].feed_forward.down.weight).max() < 0.1


def test_the_types_of_a_file_change_without_the_model(tmp_path):
    export_gguf(wide(d_ff=256), tmp_path / "model.gguf", quantization="Q8_0")
    phrase = export_gguf(None, tmp_path / "small.gguf", source=tmp_path / "model.gguf", quantization="Q6_K")
    assert phrase == "tensors: 8 in Q6_K; 3 in F32"
    fields = read(tmp_path / "small.gguf")[0]
    assert fields["general.file_type"][1] == 18  # LLAMA_FTYPE_MOSTLY_Q6_K
    calls = []
    options = {"source": tmp_path / "model.gguf", "quantization": "F32", "progress": lambda *each: calls.append(each)}
    export_gguf(None, tmp_path / "float.gguf", **options)
    assert calls == [(i + 1, 11) for i in range(11)]


# --- errors -----------------------------------------------------------------------------------------------------------


def test_what_gguf_files_do_not_have_is_refused_in_one_line(tmp_path):
    path = tmp_path / "model.gguf"
    for case, message in [
        ("bert", "model is an Encoder; GGUF files expect a LanguageModel"),
        ("t5", "model is a Transformer; GGUF files expect a LanguageModel"),
        ("bloom", "cannot be written in the GGUF format: the nearest family is"),
        ("mistral_window", "cannot be written in the GGUF format: the nearest family is .*window is"),
        ("cohere", "cannot be written in the GGUF format: the nearest family is"),
    ]:
        with raises_line(ConfigError, message):
            export_gguf(load_pretrained(DATA / case), path)
    model = wide()
    with raises_line(ConfigError, "quantization is 'Q4_K_M'; expected one of F32, F16, BF16, Q8_0"):
        export_gguf(model, path, quantization="Q4_K_M")
    with raises_line(ConfigError, "model is a string|expected a model"):
        export_gguf("model", path)
    with raises_line(ConfigError, "adapters"):
        export_gguf(lora(model, 2), path)
    assert not path.exists()
    export_gguf(model, path)
    content = path.read_bytes()
    with raises_line(ConfigError, "the output .* would replace"):
        export_gguf(None, path, source=path, quantization="Q8_0")
    with raises_line(ConfigError, "has no blk.0.ffn_gate.weight of shape .*, as the model has; expected its file"):
        export_gguf(wide(d_ff=64), tmp_path / "other.gguf", source=path)
    assert path.read_bytes() == content
    assert [each.name for each in tmp_path.iterdir()] == ["model.gguf"]


# --- adapters ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["llama", "gpt2", "phi3", "qwen3", "mixtral"])
def test_adapters_are_the_difference_of_the_matrices(case, tmp_path):
    base, rng = load_pretrained(checkpoint(case, tmp_path)), np.random.default_rng(0)
    targets = ("query", "key", "output") if case in ("llama", "qwen3") else ("self_attention.output",)
    model = lora(base, 2, alpha=3.0, targets=targets)
    for name, x in model.named_trainable_parameters():
        if name.endswith("lora_b"):
            x[...] = rng.normal(size=x.shape)
    export_gguf_lora(model, tmp_path / "lora.gguf")
    export_gguf(base, tmp_path / "base.gguf")
    export_gguf(merge_lora(model), tmp_path / "merged.gguf")
    fields, adapters = read(tmp_path / "lora.gguf")
    assert fields["general.architecture"][1] == case.replace("mixtral", "llama")
    assert fields["general.type"][1] == "adapter"
    assert fields["adapter.type"][1] == "lora"
    assert fields["adapter.lora.alpha"] == ([gguf.GGUFValueType.FLOAT32], 3.0)
    matrices = []
    for name in ("base", "merged"):
        tensors = read(tmp_path / f"{name}.gguf")[1]
        matrices.append({key: np.frombuffer(x[2], "f4").reshape(x[1][::-1]) for key, x in tensors.items()})
    arrays = {key: np.frombuffer(x[2], "f4").reshape(x[1][::-1]) for key, x in adapters.items()}
    names = {key.rpartition(".")[0] for key in arrays}
    assert names == {key for key in matrices[0] if not np.array_equal(*(each[key] for each in matrices))}
    for name in names:
        expected = matrices[1][name] - matrices[0][name]
        product = 1.5 * arrays[f"{name}.lora_b"] @ arrays[f"{name}.lora_a"]
        np.testing.assert_allclose(product, expected, rtol=0, atol=1e-5)


def test_adapters_that_llama_cpp_does_not_have_are_refused(tmp_path):
    for model in (lora(wide(), 2, use_dora=True), lora(load_pretrained(DATA / "mixtral"), 2)):
        with raises_line(ConfigError, "which llama.cpp does not read; use merge_lora and export_gguf"):
            export_gguf_lora(model, tmp_path / "lora.gguf")
    with raises_line(ConfigError, "adapters"):
        export_gguf_lora(wide(), tmp_path / "lora.gguf")
    assert not [*tmp_path.iterdir()]
