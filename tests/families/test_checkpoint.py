"""Checkpoints that are damaged, incomplete or unknown are refused in one line that names the cause."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import xformer as xf
from tests.checkpoints import DATA, change_config, copy
from xformer.errors import CheckpointError
from xformer.families.tensor_files import _FP4_PAIRS, _POWERS, TensorFiles
from xformer.tokenizers import load_tokenizer
from xformer.tree import map_arrays


@pytest.fixture
def checkpoint(tmp_path):
    return copy("llama", tmp_path)


def change_tensors(directory, change):
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def refuse(directory, match):
    with pytest.raises(CheckpointError, match=match) as info:
        xf.load_pretrained(directory)
    assert "\n" not in str(info.value)


def test_the_name_of_a_model_of_the_hub_is_answered_with_the_command_that_downloads_it():
    message = r"hf download org/name --local-dir name$"
    refuse("org/name", message)
    for pipeline in (xf.Embedder, xf.Classifier, xf.TextGenerator, xf.Translator, xf.Summarizer, xf.Transcriber):
        with pytest.raises(CheckpointError, match=message):
            pipeline.from_pretrained("org/name")


def test_a_directory_without_config_json_is_answered_with_the_files_of_one(checkpoint):
    (checkpoint / "config.json").unlink()
    expected = r"has no config.json; expected .* \(config.json, model.safetensors, tokenizer.json\) or a .gguf file$"
    with pytest.raises(CheckpointError, match=expected):
        xf.TextGenerator.from_pretrained(checkpoint)
    with pytest.raises(CheckpointError, match="file of another format; expected"):
        xf.TextGenerator.from_pretrained(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    refuse(checkpoint, expected)


@pytest.mark.parametrize("name", ["model.safetensors", "model.gguf", "tokenizer.json", "spiece.model"])
def test_a_pointer_of_git_lfs_is_refused(tmp_path, name):
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 90868376\n")
    if name == "spiece.model":
        (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    read = xf.load_pretrained if name.startswith("model") else load_tokenizer
    with pytest.raises(CheckpointError, match=rf"{name} is a Git LFS pointer, not the file itself; run: git lfs pull$"):
        read(tmp_path)


@pytest.mark.parametrize(("values", "match"), [
    ({"model_type": "lama"}, "has model_type 'lama'; did you mean 'llama'"),
    ({"model_type": "new", "auto_map": {"AutoModel": "x.Y"}}, r"requires custom code \(auto_map"),
    ({"quantization_config": {"quant_method": "gptq"}}, r"is quantized \(gptq\)"),
    ({"attention_chunk_size": 8},
     r"has the key 'attention_chunk_size' \(8\), which xformer does not know in models of type llama"),
    ({"hidden_size": "removed"}, "has no key 'hidden_size'"),
    ({"hidden_act": "xielu"}, "hidden_act 'xielu'; expected 'silu' or 'swish'"),
    ({"intermediate_size": 41}, "gate_proj.weight has shape .* config.json implies"),
    ({"num_hidden_layers": 1}, "has the tensor model.layers.1.* which the model of its config.json does not use"),
    ({"num_hidden_layers": 3}, "lacks the tensor model.layers.2"),
    ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'; expected one of"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5; models of type llama expect 1"),
    ({"rope_parameters": {"rope_type": "linear"}}, "rope_scaling of type 'linear' lacks 'factor'"),
    ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "has factor 0; expected numbers above 0"),
    ({"rope_theta": 1e30, "rope_parameters": {"rope_theta": -1.0}}, "rope_parameters.rope_theta -1.0; expected a"),
    ({"hidden_size": "16"}, "has hidden_size '16'; expected an integer from 1 to 16777216"),
    ({"num_attention_heads": True}, "has num_attention_heads True; expected an integer"),
    ({"num_hidden_layers": 10**6}, r"num_layers is 1000000; expected a number in \[0, 10000\]"),
    ({"rms_norm_eps": float("nan")}, "has rms_norm_eps nan; expected a number above 0 and at most 1e\\+30"),
    ({"mlp_bias": 1}, "has mlp_bias 1; expected true or false"),
    ({"eos_token_id": [2, -1]}, r"has eos_token_id \[2, -1\]; expected integers from 0"),
    ({"head_dim": 2**24, "num_attention_heads": 2**24, "hidden_size": 2**24}, "16777216"),
])  # fmt: skip
def test_configurations_that_xformer_does_not_compute_are_refused(checkpoint, values, match):
    change_config(checkpoint, **values)
    refuse(checkpoint, match)


def test_only_unknown_keys_that_are_null_or_false_by_default_are_harmless(checkpoint):
    change_config(checkpoint, new_key=None, add_cross_attention=False, new_dropout=0.1)
    xf.load_pretrained(checkpoint)
    for value in (False, 0, 0.0, ""):
        change_config(checkpoint, new_key=value)
        refuse(checkpoint, rf"has the key 'new_key' \({value!r}\), which xformer does not know in models of type llama")


def test_weights_in_pickles_are_refused(checkpoint):
    (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")
    refuse(checkpoint, "has its weights in pytorch_model.bin, a format that can run code")


def write_mxfp4(directory):
    """Write a random gpt-oss whose experts are stored in MXFP4, as in the files of OpenAI."""
    config = dataclasses.replace(xf.load_pretrained(DATA / "gpt_oss").config, d_model=32, d_ff=64)
    xf.save_pretrained(xf.LanguageModel(config, seed=1), directory, model_type="gpt_oss")
    rng = np.random.default_rng(0)

    def quantize(tensors):
        for name in [name for name in tensors if name.endswith("_proj") and "experts" in name]:
            matrices, in_features, out_features = tensors.pop(name).shape
            shape = matrices, out_features, in_features // 32
            tensors[f"{name}_blocks"] = rng.integers(0, 256, (*shape, 16), dtype=np.uint8)
            tensors[f"{name}_scales"] = rng.integers(121, 128, shape, dtype=np.uint8)

    change_tensors(directory, quantize)
    change_config(directory, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})


def test_mxfp4_tensors_are_dequantized(tmp_path):
    def value(bits, scale):  # OCP Microscaling Formats, 5.3.3: one bit of sign, two of exponent, one of mantissa
        exponent, mantissa = bits >> 1 & 3, bits & 1
        size = (1.0 + mantissa / 2) * 2.0 ** (exponent - 1) if exponent else mantissa / 2
        return (-size if bits & 8 else size) * 2.0 ** (scale - 127)

    write_mxfp4(tmp_path)
    tensors, name = TensorFiles(tmp_path), "model.layers.1.mlp.experts.gate_up_proj"
    stored = load_file(tmp_path / "model.safetensors")
    blocks, scales = stored[f"{name}_blocks"], stored[f"{name}_scales"]
    matrices, out_features, num_blocks = scales.shape
    expected = [
        [value(bits, int(scale)) for byte in block.tolist() for bits in (byte & 15, byte >> 4)]
        for block, scale in zip(blocks.reshape(-1, 16), scales.reshape(-1), strict=True)
    ]
    expected = np.reshape(expected, (matrices, out_features, 32 * num_blocks)).swapaxes(1, 2)
    actual = tensors[name].read()
    assert actual.dtype == np.float32
    np.testing.assert_array_equal(actual, expected)
    all_scales = [_FP4_PAIRS * power for power in _POWERS[:253]]  # larger ones overflow
    expected = [[(value(b & 15, s), value(b >> 4, s)) for b in range(256)] for s in range(253)]
    np.testing.assert_array_equal(all_scales, expected)

    model = xf.load_pretrained(tmp_path)
    xf.save_pretrained(model, tmp_path / "plain")
    tokens = [[5, 4, 7, 9]]
    np.testing.assert_array_equal(xf.load_pretrained(tmp_path / "plain")(tokens), model(tokens))
    gate = model.layers[1].feed_forward.experts[2].gate.weight
    np.testing.assert_array_equal(gate, actual[2][:, 0::2])


@pytest.mark.parametrize(
    ("suffix", "change", "message"),
    [
        ("blocks", lambda x: x[..., :8], r"_blocks has dtype U8 and shape \(4, 128, 1, 8\).*; expected U8"),
        ("scales", lambda x: x[0], r"_scales U8 and \(128, 1\); expected U8"),
        ("scales", lambda x: x.astype("f4"), r"_scales F32 and \(4, 128, 1\); expected U8"),
        ("scales", None, r"lacks the tensor model.layers.0.mlp.experts.gate_up_proj "),
    ],
)
def test_mxfp4_tensors_that_do_not_fit_are_refused(suffix, change, message, tmp_path):
    write_mxfp4(tmp_path)
    name = f"model.layers.0.mlp.experts.gate_up_proj_{suffix}"

    def damage(tensors):
        x = tensors.pop(name)
        tensors.update({} if change is None else {name: np.ascontiguousarray(change(x))})

    change_tensors(tmp_path, damage)
    refuse(tmp_path, message)


def test_a_quantized_tensor_is_refused(checkpoint):
    change_tensors(checkpoint, lambda t: t.update({"lm_head.weight": t["lm_head.weight"].astype(np.int8)}))
    refuse(checkpoint, "lm_head.weight has dtype I8; .* quantized checkpoints are not supported")


def write_shards(directory):
    """Write the tensors in two files with an index instead of model.safetensors, and return the index."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {name: f"model-{1 + i % 2:05}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in names if weight_map[name] == file}, directory / file)
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index


def assert_equal(model, other):
    for (name, x), (key, y) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert name == key
        np.testing.assert_array_equal(x, y)


def test_files_in_shards_are_read_by_their_index(checkpoint):
    expected = xf.load_pretrained(checkpoint)
    index = write_shards(checkpoint)
    assert_equal(xf.load_pretrained(checkpoint), expected)
    weight_map = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": {name: f"../{file}" for name, file in weight_map.items()}}))
    refuse(checkpoint, "names the file '../model-00001.* expected a file of the same directory")


def test_saving_replaces_a_checkpoint_in_shards(checkpoint, monkeypatch):
    write_shards(checkpoint)
    files = sorted(checkpoint.iterdir())
    model = xf.load_pretrained(checkpoint)
    changed = map_arrays(lambda x: x + 1, model).with_config(rope_theta=500.0)

    def fail(*arguments):
        raise CheckpointError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr("xformer.families.checkpoint.save_arrays", fail)
        with pytest.raises(CheckpointError, match="the disk is full"):
            xf.save_pretrained(changed, checkpoint)
    assert sorted(checkpoint.iterdir()) == files
    assert_equal(xf.load_pretrained(checkpoint), model)
    xf.save_pretrained(changed, checkpoint)
    assert [path.name for path in checkpoint.glob("model*")] == ["model.safetensors"]
    again = xf.load_pretrained(checkpoint)
    assert_equal(again, changed)
    assert again.config == changed.config


def test_a_single_file_is_read_rather_than_shards(checkpoint):
    shutil.copy(checkpoint / "model.safetensors", checkpoint / "new.safetensors")
    index = write_shards(checkpoint)
    (checkpoint / "new.safetensors").rename(checkpoint / "model.safetensors")
    change_tensors(checkpoint, lambda t: t["model.norm.weight"].fill(7.0))
    with pytest.warns(UserWarning, match="model.safetensors is read, as by transformers: delete the"):
        model = xf.load_pretrained(checkpoint)
    assert np.all(np.asarray(model.norm.weight) == 7.0)
    for shard in checkpoint.glob("model-*"):
        shard.unlink()
    assert index.exists()
    assert_equal(xf.load_pretrained(checkpoint), model)


@pytest.mark.parametrize("name", ["llama", "vit_classifier"])
def test_dropout_of_a_checkpoint_is_0_until_the_configuration_of_the_model_says_otherwise(name):
    model, reference = xf.load_pretrained(DATA / name), np.load(DATA / name / "reference.npz")
    assert (model.config.dropout, model.config.attention_dropout, model.config.activation_dropout) == (0.0, 0.0, 0.0)
    inputs = [reference[key] for key in ("source", "images", "tokens") if key in reference.files]
    np.testing.assert_array_equal(model(*inputs, rng=xf.Rng(0)), model(*inputs))
    for field in ("dropout", "attention_dropout", "activation_dropout"):
        changed = model.with_config(**{field: 0.1})
        np.testing.assert_array_equal(changed(*inputs), model(*inputs))
        assert np.max(np.abs(changed(*inputs, rng=xf.Rng(0)) - model(*inputs))) > 1e-3


@pytest.mark.parametrize(
    ("xp", "dtype"), [("numpy", "bfloat16"), ("numpy", "float16"), ("torch", "bfloat16"), ("jax", "float16")]
)
def test_16_bit_files_are_read_on_every_library(checkpoint, xp, dtype, tmp_path):
    pytest.importorskip(xp)
    ml_dtypes = pytest.importorskip("ml_dtypes")
    wide = dict(xf.load_pretrained(checkpoint).named_parameters())
    narrow = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16
    change_tensors(checkpoint, lambda t: t.update({name: x.astype(narrow) for name, x in t.items()}))
    model = xf.load_pretrained(checkpoint, xp=xp)
    expected = "float32" if (xp, dtype) == ("numpy", "bfloat16") else dtype
    for name, x in model.named_parameters():
        assert expected in str(x.dtype)
        np.testing.assert_array_equal(xf.backends.to_host(x), wide[name].astype(narrow).astype(np.float32))
    xf.save_pretrained(model, tmp_path / "again")
    again = xf.load_pretrained(tmp_path / "again", dtype="float32")
    for name, x in again.named_parameters():
        np.testing.assert_array_equal(x, wide[name].astype(narrow).astype(np.float32))


def test_a_head_that_repeats_the_embedding_is_tied_and_another_one_is_not(checkpoint):
    assert xf.load_pretrained(checkpoint).output is not None
    change_tensors(checkpoint, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].copy()}))
    assert xf.load_pretrained(checkpoint).output is None
    change_tensors(checkpoint, lambda t: t.pop("lm_head.weight"))
    for value in (False, "removed"):
        change_config(checkpoint, tie_word_embeddings=value)
        refuse(
            checkpoint,
            r"\(tie_word_embeddings is false\), and the checkpoint lacks the tensor lm_head.weight; expected",
        )
    change_config(checkpoint, tie_word_embeddings=True)
    assert xf.load_pretrained(checkpoint).output is None


def test_names_without_the_prefix_are_read(tmp_path):
    checkpoint = copy("gpt2", tmp_path)
    expected = dict(xf.load_pretrained(checkpoint).named_parameters())
    tensors = load_file(checkpoint / "model.safetensors")
    save_file({name.removeprefix("transformer."): x for name, x in tensors.items()}, checkpoint / "model.safetensors")
    for name, x in xf.load_pretrained(checkpoint).named_parameters():
        np.testing.assert_array_equal(x, expected[name])


def test_old_spellings_of_rotary_positions_are_read(tmp_path):
    checkpoint = copy("llama_tied_llama3_rope", tmp_path)
    expected = xf.load_pretrained(checkpoint).config
    rope = json.loads((checkpoint / "config.json").read_text())["rope_parameters"]
    theta = rope.pop("rope_theta")
    change_config(checkpoint, rope_parameters="removed", rope_theta=theta, rope_scaling=rope)
    assert xf.load_pretrained(checkpoint).config == expected
    rope["type"] = rope.pop("rope_type")
    change_config(checkpoint, rope_scaling=rope)
    assert xf.load_pretrained(checkpoint).config == expected


def test_old_files_of_olmo3_scale_the_layers_without_a_window_only(tmp_path):
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    checkpoint = copy("olmo3", tmp_path, rope_parameters="removed", rope_theta=1000.0, rope_scaling=scaling)
    config = xf.load_pretrained(checkpoint).config
    assert (config.rope_theta, config.rope_scaling, config.rope_local_theta) == (1000.0, scaling, 500000.0)


def test_layers_of_smollm3_without_positions(tmp_path):
    for number, (values, has_positions) in enumerate((
        ({}, [False, True]),
        ({"no_rope_layers": "removed", "no_rope_layer_interval": 2}, [True, False]),
        ({"no_rope_layers": "removed"}, [True, True]),  # every fourth one by default
        ({"no_rope_layers": [1, 0, 1]}, [True, False]),
        ({"no_rope_layers": [1]}, None),
        ({"no_rope_layers": [1, -1]}, None),
    )):  # fmt: skip
        checkpoint = copy("smollm3", tmp_path / str(number), **values)
        if has_positions is None:
            refuse(checkpoint, "no_rope_layers")
        else:
            without = xf.load_pretrained(checkpoint).config.layers_without_positions
            assert [layer not in without for layer in range(2)] == has_positions


TYPES = ["sliding_attention", "full_attention", "full_attention"]


def test_windows_are_those_of_transformers(tmp_path):
    old, mistral = {"layer_types": "removed"}, {"model_type": "mistral"}
    for number, (values, windows) in enumerate((
        (old, [None, 4, 4]),  # of layers from max_window_layers on
        ({**old, "max_window_layers": "removed"}, [None, None, None]),  # 28 by default
        ({**old, "max_window_layers": 0}, [4, 4, 4]),
        ({"layer_types": TYPES}, [4, None, None]),
        ({**old, "max_window_layers": 2, "sliding_window": "removed"}, [None, None, 4096]),
        ({**old, "sliding_window": None}, [None, None, None]),
        ({**old, "use_sliding_window": False}, [None, None, None]),
        ({**old, **mistral}, [4, 4, 4]),
        ({**old, **mistral, "sliding_window": None}, [None, None, None]),
        (mistral, [None, 4, 4]),
        ({**old, "model_type": "llama"}, [None, None, None]),
        ({"sliding_window": None}, "layers of the type 'sliding_attention'; expected a sliding_window"),
        ({"use_sliding_window": False}, "layers of the type 'sliding_attention'; expected a sliding_window"),
        ({"model_type": "llama"}, "layers of the type 'sliding_attention'; expected a sliding_window"),
        ({"layer_types": TYPES[1:2]}, "has 1 layer_types; expected one for each of 3 layers"),
        ({"layer_types": ["linear_attention"] * 3}, "expected a list of sliding_attention, full_attention"),
    )):  # fmt: skip
        checkpoint = copy("qwen2_window", tmp_path / str(number), **{"attention_bias": True, **values})
        tensors = load_file(checkpoint / "model.safetensors")
        tensors |= {name.replace("q_proj", "o_proj"): x for name, x in tensors.items() if name.endswith("q_proj.bias")}
        if values.get("model_type") in ("llama", "mistral"):  # their output projections have biases, too
            save_file(tensors, checkpoint / "model.safetensors")
        if isinstance(windows, str):
            refuse(checkpoint, windows)
        else:
            assert [layer.self_attention.window for layer in xf.load_pretrained(checkpoint).layers] == windows


SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


@pytest.mark.parametrize(
    ("values", "generation", "ids"),
    [
        ({}, None, (0, 1, 2)),
        (dict.fromkeys(SPECIAL, "removed"), None, (None, None, None)),
        (dict.fromkeys(SPECIAL), None, (None, None, None)),
        (dict.fromkeys(SPECIAL, "removed"), {"bos_token_id": 3, "eos_token_id": [4, 5]}, (None, 3, 4)),
        ({"eos_token_id": [7, 8]}, {"eos_token_id": 6}, (0, 1, 6)),
        ({"eos_token_id": [7, 8]}, {"eos_token_id": None}, (0, 1, 7)),
    ],
)
def test_a_special_token_that_no_file_names_is_none(checkpoint, values, generation, ids):
    change_config(checkpoint, **values)
    if generation is not None:
        (checkpoint / "generation_config.json").write_text(json.dumps(generation))
    model = xf.load_pretrained(checkpoint)
    assert (model.config.pad_id, model.config.bos_id, model.config.eos_id) == ids
    xf.save_pretrained(model, checkpoint / "again")
    assert xf.load_pretrained(checkpoint / "again").config == model.config
    ((output,),) = xf.generate(model, [[5]], max_new_tokens=20)
    assert (len(output.tokens), output.finished) == (20, False) or ids[2] is not None


@pytest.mark.parametrize("key", ["decoder_start_token_id", "eos_token_id"])
def test_an_encoder_decoder_without_start_or_end_is_refused(key, tmp_path):
    checkpoint = copy("marian", tmp_path, **{key: "removed"})
    refuse(checkpoint, f"has no key '{key}', which an encoder-decoder needs")
    (checkpoint / "generation_config.json").write_text(json.dumps({key: 7}))
    config = xf.load_pretrained(checkpoint).config
    assert (config.eos_id if key == "eos_token_id" else config.bos_id) == 7


@pytest.mark.parametrize("name", ["marian", "pegasus"])
def test_saved_positions_other_than_the_computed_ones_are_refused(name, tmp_path):
    checkpoint = copy(name, tmp_path)
    angles = np.arange(32)[:, None] / 10000 ** (np.arange(0, 24, 2) / 24)
    table = np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float16)
    key = "model.encoder.embed_positions.weight"
    change_tensors(checkpoint, lambda tensors: tensors.update({key: table}))
    xf.load_pretrained(checkpoint)
    change_tensors(checkpoint, lambda tensors: tensors.update({key: table[::-1].copy()}))
    refuse(checkpoint, "encoder.embed_positions.weight has values other than sinusoidal positions")


def test_loading_reports_progress_and_reads_runs_of_xformer(checkpoint, tmp_path):
    calls = []
    model = xf.load_pretrained(checkpoint, progress=lambda done, total: calls.append((done, total)))
    assert calls[-1][0] == calls[-1][1] == sum(x.size for _, x in model.named_parameters())
    model.save(tmp_path / "model.safetensors")
    again = xf.load_pretrained(tmp_path / "model.safetensors")
    assert again.config == model.config


@pytest.mark.parametrize("case", ["llama", "glm4", "bart", "gpt2"])
@pytest.mark.parametrize(("quantize", "pack"), [(None, True), ("int8", False), ("bfloat16", True)])
def test_weights_are_quantized_and_packed_as_they_are_read(case, quantize, pack):
    """The result has the bits of a model that is converted after it is loaded."""
    directory = DATA / case
    expected = xf.load_pretrained(directory, dtype="float32")
    expected = expected if quantize is None else expected.quantize(quantize)
    expected = expected.pack() if pack else expected
    actual = xf.load_pretrained(directory, dtype="float32", quantize=quantize, pack=pack)
    assert repr(actual) == repr(expected)
    for (name, x), (other, y) in zip(actual.named_arrays(), expected.named_arrays(), strict=True):
        assert name == other
        assert x.dtype == y.dtype
        assert x.flags.c_contiguous
        np.testing.assert_array_equal(x, y)
