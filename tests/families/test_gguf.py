"""GGUF files, written here by the package gguf as llama.cpp's converter does, load like the checkpoints they hold."""

import dataclasses
import json
import re
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.checkpoints import DATA, copy
from tests.reference import for_each, raises_line
from xformer import Adam, LanguageModel, fit, generate, load, lora, native
from xformer.backends import to_host
from xformer.errors import CheckpointError, ConfigError
from xformer.families import gguf_file, load_pretrained, save_pretrained
from xformer.ops import blocks as definition
from xformer.ops.blocks import BlockWeight, PackedBlocks
from xformer.ops.weights import inference_weights

gguf = pytest.importorskip("gguf")
TYPE = gguf.GGMLQuantizationType


def interleaved(x, num_heads):
    """Permute rows as the converter does for llama."""
    return x.reshape(num_heads, 2, -1, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


def llama3_divisors(scaling, head_dim):
    """Return what the converter stores as rope_freqs.weight."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    divisors = []
    for frequency in scaling["rope_theta"] ** (-np.arange(0, head_dim, 2) / head_dim):
        turns = scaling["original_max_position_embeddings"] * frequency / (2 * np.pi)
        smooth = (turns - low) / (high - low)
        smooth = min(max(smooth, 0), 1)
        divisors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return np.array(divisors, dtype=np.float32)


def write_metadata(writer, values):
    """Write config.json as the converter does."""
    width = values.get("n_embd", values.get("hidden_size"))
    heads = values.get("n_head", values.get("num_attention_heads"))
    writer.add_name("A model")
    writer.add_block_count(values.get("n_layer", values.get("num_hidden_layers")))
    writer.add_context_length(values.get("n_positions", values.get("max_position_embeddings")))
    writer.add_embedding_length(width)
    writer.add_head_count(heads)
    writer.add_file_type(0)
    writer.add_bos_token_id(values["bos_token_id"])
    writer.add_eos_token_id(values["eos_token_id"])
    if values.get("pad_token_id") is not None:
        writer.add_pad_token_id(values["pad_token_id"])
    if values["model_type"] == "gpt2":
        writer.add_feed_forward_length(4 * width)
        writer.add_layer_norm_eps(values["layer_norm_epsilon"])
        return
    rope = values["rope_parameters"].get("full_attention", values["rope_parameters"])
    head_dim = values.get("head_dim") or width // heads
    writer.add_feed_forward_length(values["intermediate_size"])
    writer.add_head_count_kv(values["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(values["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    if count := values.get("num_experts", values.get("num_local_experts")):
        writer.add_expert_count(count)
        writer.add_expert_used_count(values["num_experts_per_tok"])
    if values.get("moe_intermediate_size"):
        writer.add_expert_feed_forward_length(values["moe_intermediate_size"])
    if values.get("head_dim"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if values["model_type"] in ("llama", "phi3"):
        writer.add_rope_dimension_count(head_dim)
        writer.add_vocab_size(values["vocab_size"])
    if values["model_type"] == "phi3" or "gemma" in values["model_type"]:
        writer.add_sliding_window(values.get("sliding_window") or 0)
    if values.get("attn_logit_softcapping"):
        writer.add_attn_logit_softcapping(values["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(values["final_logit_softcapping"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] in ("yarn", "longrope"):
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_divisors(rope, head_dim))
    if rope["rope_type"] == "longrope":
        factor = values["max_position_embeddings"] / rope["original_max_position_embeddings"]
        attention = np.sqrt(1 + np.log(factor) / np.log(rope["original_max_position_embeddings"]))
        writer.add_rope_scaling_attn_factors(float(attention))
        for kind in ("short", "long"):
            writer.add_tensor(f"rope_factors_{kind}.weight", np.array(rope[f"{kind}_factor"], dtype=np.float32))


def with_stacked_experts(tensors):
    """Return the tensors with one for the matrices of all experts, as the converter writes them."""
    experts = {}
    for name in sorted(tensors, key=lambda name: [int(part) for part in name.split(".") if part.isdigit()]):
        experts.setdefault(re.sub(r"(?<=\.experts)\.\d+", "", name), []).append(tensors[name])
    return {name: np.stack(xs) if ".experts." in name else xs[0] for name, xs in experts.items()}


def write_gguf(path, values, tensors, *, kind=TYPE.F32, change=lambda writer: None):
    """Write a checkpoint as a GGUF file, its matrices in the type `kind`."""
    names = {"mixtral": "llama", "qwen3_moe": "qwen3moe"}
    model_type = names.get(values["model_type"], values["model_type"].removesuffix("_text"))
    writer = gguf.GGUFWriter(path, model_type)
    write_metadata(writer, values)
    change(writer)
    architecture = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == model_type)
    names = gguf.get_tensor_name_map(architecture, 2)
    for name, x in with_stacked_experts(tensors).items():
        if model_type == "llama" and ".q_proj." in name:
            x = interleaved(x, values["num_attention_heads"])
        if model_type == "llama" and ".k_proj." in name:
            x = interleaved(x, values["num_key_value_heads"])
        if "gemma" in model_type and name.endswith("norm.weight"):
            x = x + 1
        if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
            x = x.T
        key = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if x.ndim == 1 or kind == TYPE.F32:
            writer.add_tensor(key, np.ascontiguousarray(x, dtype=np.float32))
        else:
            writer.add_tensor(key, x if x.dtype == np.uint8 else gguf.quantize(x, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def convert(case, path, **options):
    values = json.loads((DATA / case / "config.json").read_text())
    write_gguf(path, values, load_file(DATA / case / "model.safetensors"), **options)
    return path


def give_layers_different_heads(writer):
    del writer.kv_data[0]["llama.attention.head_count_kv"]
    writer.add_head_count_kv([2, 1])


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return convert("llama", tmp_path_factory.mktemp("gguf") / "llama.gguf")


@pytest.mark.parametrize(
    "case",
    ["gpt2", "llama", "llama_tied_llama3_rope", "llama_linear_rope_biases", "llama_yarn", "qwen2_tied", "qwen3", "phi3",
     "phi3_longrope", "mixtral", "qwen3_moe", "olmoe"],
)  # fmt: skip
def test_a_converted_checkpoint_has_the_parameters_and_logits_of_the_original(case, tmp_path):
    reference = np.load(DATA / case / "reference.npz")
    model = load_pretrained(convert(case, tmp_path / "model.gguf"), dtype="float64")
    original = load_pretrained(DATA / case, dtype="float64")
    # Llama 3 and long ropes are stored as divisors of the frequencies.
    config = model.config
    if case in ("llama_tied_llama3_rope", "phi3_longrope"):
        config = dataclasses.replace(config, rope_scaling=original.config.rope_scaling)
    assert config == original.config
    for (name, x), (other, y) in zip(model.named_parameters(), original.named_parameters(), strict=True):
        assert name == other
        np.testing.assert_array_equal(x, y)
    logits = model(reference["tokens"])
    # The divisors of frequencies are float32 in the file.
    assert np.max(np.abs(logits - reference["logits"])) < 1e-6 * np.max(np.abs(reference["logits"]))


@pytest.mark.parametrize(("case", "factor"), [("gemma2", None), ("gemma3", None), ("gemma3", 8.0)])
def test_gemma_has_the_parameters_and_logits_of_the_original(case, factor, tmp_path):
    copy(case, tmp_path)
    values = json.loads((tmp_path / case / "config.json").read_text())
    del values["layer_types"]
    values["query_pre_attn_scalar"] = values["head_dim"]  # llama.cpp assumes both, except for the scale of 27B
    if factor is not None:
        values["rope_parameters"]["full_attention"] |= {"rope_type": "linear", "factor": factor}
    (tmp_path / case / "config.json").write_text(json.dumps(values))
    write_gguf(tmp_path / "model.gguf", values, load_file(DATA / case / "model.safetensors"))
    model = load_pretrained(tmp_path / "model.gguf", dtype="float64")
    original = load_pretrained(tmp_path / case, dtype="float64")
    assert model.config == original.config
    for (name, x), (other, y) in zip(model.named_parameters(), original.named_parameters(), strict=True):
        assert name == other
        np.testing.assert_allclose(x, y, rtol=1e-7, atol=0)  # weights of norms plus one are float32 in the file
    tokens = np.load(DATA / case / "reference.npz")["tokens"]
    np.testing.assert_allclose(model(tokens), original(tokens), rtol=0, atol=1e-5)


def test_the_scale_of_gemma_27b_depends_on_the_width():
    values = {"hidden_size": 4608, "num_attention_heads": 32, "head_dim": 128}
    scales = {
        (name, layers): gguf_file.ARCHITECTURES[name].defaults({**values, "num_hidden_layers": layers})
        for name in ("gemma2", "gemma3")
        for layers in (26, 46, 62)
    }
    found = {key: value["query_pre_attn_scalar"] for key, value in scales.items()}
    assert {key for key, value in found.items() if value == 144} == {("gemma2", 46), ("gemma3", 62)}
    assert set(found.values()) == {128, 144}


def random_blocks(kind, shape, rng):
    """Return random quantized data, whose scales are finite."""
    num_values, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (shape[0], shape[1] // num_values, num_bytes), dtype=np.uint8)
    scales = {
        TYPE.Q4_K: slice(0, 4), TYPE.Q5_K: slice(0, 4), TYPE.Q6_K: slice(208, 210), TYPE.IQ4_NL: slice(0, 2),
        TYPE.Q2_K: slice(80, 84), TYPE.Q3_K: slice(108, 110),
    }[kind]  # fmt: skip
    blocks[..., scales] = np.frombuffer(np.float16(0.01).tobytes() * 2, np.uint8)[: scales.stop - scales.start]
    return blocks.reshape(shape[0], -1)


@pytest.mark.parametrize("has_library", [True, False])
@pytest.mark.parametrize("name", ["F16", "BF16", *gguf_file.QUANTIZED, "IQ4_NL", "Q2_K", "Q3_K"])
def test_every_type_has_the_values_that_the_package_gguf_computes(name, has_library, tmp_path, monkeypatch):
    if not has_library:
        monkeypatch.setenv("XFORMER_KERNELS", "no-native")
    monkeypatch.setattr(definition, "_CHUNK", 3072)  # several chunks, the last one shorter
    rng, kind = np.random.default_rng(0), TYPE[name]
    values = {
        "model_type": "qwen2", "hidden_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 11,
        "num_key_value_heads": 4, "intermediate_size": 256, "max_position_embeddings": 8, "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    layer, tensors = "model.layers.0.", {"model.embed_tokens.weight": (11, 256), "model.norm.weight": (256,)}
    for matrix in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"):
        tensors[f"{layer}{matrix}.weight"] = (256, 256)
        if "o_proj" not in matrix:
            tensors[f"{layer}{matrix}.bias"] = (256,)
    tensors |= {f"{layer}mlp.{matrix}_proj.weight": (256, 256) for matrix in ("gate", "up", "down")}
    tensors |= {f"{layer}{norm}_layernorm.weight": (256,) for norm in ("input", "post_attention")}
    is_random = name.endswith("_K") or name == "IQ4_NL"  # the package cannot quantize to them
    tensors = {
        key: random_blocks(kind, shape, rng) if is_random and len(shape) == 2 else rng.normal(size=shape).astype("f4")
        for key, shape in tensors.items()
    }
    write_gguf(tmp_path / "model.gguf", values, tensors, kind=kind)
    parameters = dict(load_pretrained(tmp_path).named_parameters())
    assert {str(x.dtype) for x in parameters.values()} == {"float16" if name == "F16" else "float32"}
    for key, parameter in {
        "model.embed_tokens.weight": parameters["embedding.weight"],
        f"{layer}self_attn.q_proj.weight": parameters["layers.0.self_attention.query.weight"].T,
        f"{layer}mlp.down_proj.weight": parameters["layers.0.feed_forward.down.weight"].T,
    }.items():
        stored = tensors[key] if is_random else gguf.quantize(tensors[key], kind)
        np.testing.assert_array_equal(parameter, gguf.dequantize(stored, kind))
    packed = dict(load_pretrained(tmp_path, pack=True).unpack().named_parameters())
    np.testing.assert_array_equal(packed["embedding.weight"], parameters["embedding.weight"])


@pytest.mark.skipif(not native.is_available(), reason="weights are packed by the native library")
def test_the_blocks_of_experts_are_kept(tmp_path):
    values = json.loads((DATA / "mixtral" / "config.json").read_text())
    values |= {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 11}
    model = LanguageModel(dataclasses.replace(load_pretrained(DATA / "mixtral").config, d_model=32, d_ff=32,
                                              num_layers=1, vocab_size=11, head_dim=8))  # fmt: skip
    save_pretrained(model, tmp_path / "original")
    write_gguf(tmp_path / "model.gguf", values, load_file(tmp_path / "original" / "model.safetensors"), kind=TYPE.Q8_0)
    packed = load_pretrained(tmp_path / "model.gguf", pack=True)
    experts = packed.layers[0].feed_forward.experts
    assert all(type(each.down.weight) is BlockWeight for each in experts)
    assert experts[1].down.weight.blocks.base is not None  # in the file
    logits, tokens = packed.unpack()([[3, 4, 5, 6]]), [[3, 4, 5, 6]]
    np.testing.assert_allclose(packed(tokens), logits, rtol=0, atol=1e-4)
    assert np.max(np.abs(logits - model(tokens))) < 0.05 * np.max(np.abs(logits))


def test_a_directory_with_one_file_is_enough_and_several_are_refused(llama, tmp_path):
    shutil.copy(llama, tmp_path / "a.gguf")
    assert load_pretrained(tmp_path).config.num_layers == 2
    shutil.copy(llama, tmp_path / "b.gguf")
    with pytest.raises(CheckpointError, match=r"has 2 GGUF files, a\.gguf first"):
        load_pretrained(tmp_path)


@pytest.mark.parametrize(("change", "message"), [
    (lambda writer: writer.add_tensor("rope_freqs.weight", np.ones(5, "f4")),
     "rope_scaling has 5 factors; expected 3"),
    (lambda writer: writer.add_expert_shared_count(8), r"has the key 'llama\.expert_shared_count' \(8\)"),
    (give_layers_different_heads, r"different values of llama\.attention\.head_count_kv by layer"),
    (lambda writer: writer.add_uint16("split.count", 3), "is one of 3 parts; merge them"),
    (lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE),
     r"has the key 'llama\.rope\.scaling\.type' \('longrope'\)"),
    (lambda writer: writer.add_tensor("rope_factors_long.weight", np.ones(3, "f4")),
     "has the tensor rope_factors_long"),
    (lambda writer: writer.add_tensor("blk.0.extra.weight", np.zeros(3, "f4")), r"has the tensor blk\.0\.extra"),
    (lambda writer: writer.add_tensor("t", np.zeros((1, 82), "u1"), raw_dtype=TYPE.IQ2_S),
     "t has the type IQ2_S; expected one of F32, F16, BF16, Q8_0"),
])  # fmt: skip
def test_what_xformer_does_not_compute_is_refused_by_name(change, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        load_pretrained(convert("llama", tmp_path / "model.gguf", change=change))


def test_an_unknown_architecture_is_refused(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "rwkv7")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match="has the architecture 'rwkv7'; expected one of gemma2, gemma3, gpt2"):
        load_pretrained(tmp_path)


@pytest.mark.parametrize("case", ["llama", "gpt2"])
def test_a_file_that_is_not_causal_has_the_states_of_config_json_with_is_causal_false(case, tmp_path):
    directory = copy(case, tmp_path, is_causal=False)
    path = convert(case, tmp_path / "model.gguf", change=lambda writer: writer.add_causal_attention(False))
    states = [load_pretrained(each, dtype="float64").states([[5, 17, 33, 8, 41, 12]]) for each in (path, directory)]
    np.testing.assert_allclose(*states, rtol=0, atol=1e-5)


# --- weights that stay in blocks --------------------------------------------------------------------------------------

needs_library = pytest.mark.skipif(not native.is_available(), reason="the library was not compiled")


def convert_wider(case, path, kind):
    """Write a file of the type with random weights, four times as wide as the checkpoint, so that rows have blocks."""
    values = json.loads((DATA / case / "config.json").read_text())
    for key in values.keys() & {"hidden_size", "intermediate_size", "head_dim", "n_embd"}:
        values[key] = values[key] and 4 * values[key]
    fixed, rng = (values["vocab_size"], values.get("n_positions")), np.random.default_rng(0)
    tensors = {}
    for name, x in load_file(DATA / case / "model.safetensors").items():
        shape = [size if size in fixed else 4 * size for size in x.shape]
        tensors[name] = rng.normal(1.0 if x.ndim == 1 else 0.0, 0.2, shape).astype(np.float32)
    write_gguf(path, values, tensors, kind=kind)
    return path


def weights_in_blocks(model):
    return [each for each in inference_weights(model) if isinstance(each, BlockWeight)]


@needs_library
@pytest.mark.parametrize(
    ("case", "kind"), [("gpt2", TYPE.Q8_0), ("llama", TYPE.Q4_1), ("qwen2_tied", TYPE.Q8_0), ("phi3", TYPE.Q8_0)]
)
def test_packed_weights_stay_in_the_blocks_of_the_file(case, kind, tmp_path):
    path = convert_wider(case, tmp_path / "model.gguf", kind)
    model, expected = load_pretrained(path, pack=True), load_pretrained(path)
    matrices = [x for name, x in expected.named_parameters() if x.ndim == 2 and "position" not in name]
    assert [each.shape for each in weights_in_blocks(model)] == [x.shape for x in matrices]
    assert model.parameter_count() == expected.parameter_count()
    for (name, x), (other, y) in zip(model.unpack().named_arrays(), expected.named_arrays(), strict=True):
        assert name == other
        np.testing.assert_array_equal(x, y)
    for length in (1, 3, 7):
        ids = np.random.default_rng(0).integers(0, model.config.vocab_size, (2, length))
        logits = expected(ids)
        np.testing.assert_allclose(model(ids), logits, rtol=0.0, atol=1e-5 * np.abs(logits).max())
    tokens = [[each[0].tokens for each in generate(m, ids[:, :3], max_new_tokens=9)] for m in (model, expected)]
    assert tokens[0] == tokens[1]


@needs_library
def test_blocks_are_kept_only_if_nothing_else_was_requested(tmp_path):
    path = convert_wider("llama", tmp_path / "model.gguf", TYPE.Q5_0)
    for options in ({}, {"pack": True, "dtype": "float32"}, {"pack": True, "quantize": "int8"}, {"dtype": "float64"}):
        assert not weights_in_blocks(load_pretrained(path, **options))
    strict = pytest.importorskip("array_api_strict")
    assert not weights_in_blocks(load_pretrained(path, pack=True, xp=strict))


@needs_library
def test_a_model_in_blocks_can_be_saved_moved_and_quantized_but_not_trained(tmp_path, xp):
    path = convert_wider("llama", tmp_path / "model.gguf", TYPE.Q4_0)
    model, expected = load_pretrained(path, pack=True), load_pretrained(path)
    ids = [[5, 4, 7]]
    logits = expected(ids)
    assert model.pack() is not None
    assert weights_in_blocks(model.pack())[0].blocks is weights_in_blocks(model)[0].blocks
    moved = model.to(xp)
    assert weights_in_blocks(moved)
    np.testing.assert_allclose(to_host(moved(ids)), logits, rtol=0.0, atol=1e-5 * np.abs(logits).max())
    double = model.to(xp, dtype="float64")
    assert not weights_in_blocks(double)
    np.testing.assert_allclose(to_host(double(ids)), logits, rtol=0.0, atol=1e-5 * np.abs(logits).max())
    np.testing.assert_array_equal(model.quantize("int8")(ids), expected.quantize("int8")(ids))
    model.save(tmp_path / "model.safetensors")
    np.testing.assert_array_equal(load(tmp_path / "model.safetensors")(ids), logits)
    save_pretrained(model, tmp_path / "out")
    np.testing.assert_array_equal(load_pretrained(tmp_path / "out")(ids), logits)
    with raises_line(ConfigError, "the model is packed for inference; train model.unpack()"):
        fit(model, lambda m, b, r: m(b).sum(), [ids], optimizer=Adam(), learning_rate=1e-3, steps=1)
    assert weights_in_blocks(lora(model))


@for_each("has_library", [True, False])
def test_inputs_of_blocks_are_rounded_on_request(has_library, tmp_path, monkeypatch, xp):
    monkeypatch.setenv("XFORMER_KERNELS", "auto" if has_library else "portable")
    path = convert_wider("llama", tmp_path / "model.gguf", TYPE.Q4_1)
    exact, ids = load_pretrained(path), [[5, 4, 7]]
    model = load_pretrained(path, quantize="int8_inputs", xp=xp)
    assert [type(each) for each in inference_weights(model)] == [PackedBlocks] * len([*inference_weights(model)])
    logits, expected = to_host(model(ids)), exact(ids)
    assert 1e-4 < np.abs(logits - expected).max() / np.abs(expected).max() < 0.05
    own = load_pretrained(path, pack=True).pack(inputs="int8")
    np.testing.assert_allclose(own(ids), logits, rtol=0.0, atol=1e-4 * np.abs(expected).max())
    for each in (own, own.pack(), own.pack(inputs="int8"), load_pretrained(path, quantize="int8_inputs", pack=True)):
        np.testing.assert_array_equal(each(ids), own(ids))
    for (name, x), (other, y) in zip(own.unpack().named_arrays(), exact.named_arrays(), strict=True):
        assert name == other
        np.testing.assert_array_equal(x, y)
    assert own.to(dtype="float64").parameter_count() == own.parameter_count() == exact.parameter_count()


def test_inputs_of_other_weights_are_not_rounded(tmp_path):
    model = load_pretrained(convert_wider("llama", tmp_path / "model.gguf", TYPE.Q8_0))
    for weights in (model, model.pack(), model.quantize("bfloat16")):
        with raises_line(ConfigError, "no weight is in the blocks of a GGUF file; use quantize"):
            weights.pack(inputs="int8")
    with raises_line(ConfigError, "inputs is 'int4'; expected 'int8' or None"):
        model.pack(inputs="int4")
    model.save(tmp_path / "model.safetensors")
    save_pretrained(model, tmp_path / "out")
    for path in ("model.safetensors", "out"):
        with raises_line(ConfigError, "no weight is in the blocks of a GGUF file"):
            load_pretrained(tmp_path / path, quantize="int8_inputs", pack=True)
    with raises_line(ConfigError, "quantize is 'int4'; expected 'int8', 'bfloat16' or 'int8_inputs'"):
        load_pretrained(tmp_path / "out", quantize="int4")
