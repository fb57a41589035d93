"""transformers computes the stored references, and the same as xformer from what xformer writes; `nox -s families`."""

import os
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file

import xformer as xf
from tests.checkpoints import DATA
from tests.families.cases import CASES, IMPLEMENTATIONS
from xformer.families import load_pretrained, save_pretrained
from xformer.generation.processors import Rows
from xformer.pipelines.timestamps import TimestampRules, split_segments
from xformer.random import Rng

pytestmark = pytest.mark.skipif("XFORMER_FAMILIES" not in os.environ, reason="run: nox -s families")


@pytest.fixture(scope="module")
def references():
    """Return the module make_references, which imports torch and transformers."""
    from tests.families import make_references

    return make_references


def relative_error(actual, expected) -> float:
    return float(np.max(np.abs(actual - expected)) / max(np.max(np.abs(expected)), 1e-30))


def load_in_transformers(directory, model_class, implementation="eager"):
    """Return the model of a checkpoint; every tensor must be used, and none but constant tables may be missing."""
    import torch
    import transformers

    model, info = getattr(transformers, model_class).from_pretrained(
        directory, dtype=torch.float64, attn_implementation=implementation, experts_implementation="eager",
        output_loading_info=True,
    )  # fmt: skip
    missing = {name for name in info.pop("missing_keys") if not name.endswith("embed_positions.weight")}
    assert not missing
    assert not any(info.values()), info
    wide = type(model)(model.config).eval().double()  # with constants in float64, if made in float64_throughout
    wide.load_state_dict(model.state_dict())
    return wide


def outputs_in_transformers(references, directory, model_class, implementation="eager"):
    """Return the outputs of a checkpoint."""
    with references.float64_throughout():
        return references.outputs_of(load_in_transformers(directory, model_class, implementation))


def assert_equal_outputs(actual, expected):
    assert actual.keys() == expected.keys()
    largest = max(np.max(np.abs(x)) for x in expected.values() if x.dtype.kind == "f")
    for key, x in expected.items():
        if x.dtype.kind == "f":  # gradients of the biases of keys are zero up to rounding
            np.testing.assert_allclose(
                actual[key], x, rtol=0, atol=1e-9 * np.max(np.abs(x)) + 1e-14 * largest, err_msg=key
            )
        else:
            np.testing.assert_array_equal(actual[key], x, err_msg=key)


@pytest.mark.parametrize("name", CASES)
def test_references_and_outputs_of_saved_checkpoints_are_what_transformers_computes(name, references, tmp_path):
    references.make(name, tmp_path / "made")
    expected = dict(np.load(DATA / name / "reference.npz"))
    assert_equal_outputs(dict(np.load(tmp_path / "made" / "reference.npz")), expected)
    for file in DATA.joinpath(name).rglob("model.safetensors"):
        assert_equal_outputs(load_file(tmp_path / "made" / file.relative_to(DATA / name)), load_file(file))
    save_pretrained(load_pretrained(DATA / name, dtype="float64"), tmp_path / "saved")
    implementation = IMPLEMENTATIONS.get(name, "eager")
    outputs = outputs_in_transformers(references, tmp_path / "saved", CASES[name][1], implementation)
    if not {"greedy", "images"} & expected.keys():  # RoBERTa's positions of padding are not kept
        is_token = (expected["tokens"] != load_pretrained(DATA / name).config.pad_id)[..., None]
        for arrays in (outputs, expected):
            for key in ("hidden_states", "logits"):
                if key in arrays and arrays[key].ndim > 2:
                    arrays[key] = arrays[key] * is_token
    assert_equal_outputs(outputs, expected)


def test_gradients_with_the_load_balancing_loss_are_those_of_transformers(references, tmp_path):
    import torch

    tokens = np.load(DATA / "mixtral" / "reference.npz")["tokens"][:, :8]  # 32 in two layers, exact in float32
    with references.float64_throughout():
        theirs = load_in_transformers(DATA / "mixtral", "MixtralForCausalLM")
        theirs.router_aux_loss_coef = 0.5
        outputs = theirs(torch.tensor(tokens), labels=torch.tensor(tokens), output_router_logits=True)
        outputs.loss.backward()
    for x in theirs.parameters():
        x.data = x.grad
    theirs.save_pretrained(tmp_path)

    def loss_fn(model):
        with xf.record_routing() as routing:
            logits = model(tokens)
        losses = xf.cross_entropy(logits[:, :-1, :], tokens[:, 1:])
        return xf.array_namespace(losses).mean(losses) + 0.5 * xf.load_balancing_loss(routing)

    loss, gradients = xf.value_and_grad(loss_fn)(load_pretrained(DATA / "mixtral", dtype="float64"))
    assert float(loss) == pytest.approx(outputs.loss.item(), rel=1e-10)
    for (key, x), (_, expected) in zip(
        gradients.named_parameters(), load_pretrained(tmp_path, dtype="float64").named_parameters(), strict=True
    ):
        assert relative_error(x, expected) < 1e-10, key


CLASSES = {
    "pegasus": "PegasusForConditionalGeneration",
    "marian": "MarianMTModel",
    "llama": "LlamaForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}


def assert_same_model(model, directory, model_type, references):
    """Save a model, and compare the logits and the greedy output of transformers with its own."""
    model = model.to("numpy", dtype="float64")
    save_pretrained(model, directory)
    outputs = outputs_in_transformers(references, directory, CLASSES[model_type])
    inputs = [outputs[key] for key in ("source", "tokens") if key in outputs]
    assert relative_error(outputs["logits"], model(*inputs)) < 1e-9
    tokens = outputs["greedy"][0].tolist()
    prefix = inputs[-1][0, : 1 if "source" in outputs else 5].tolist()
    for index, token in enumerate(tokens):
        logits = model(*(x[:1] for x in inputs[:-1]), [[*prefix, *tokens[:index]]])[0, -1]
        logits[sorted(model.config.suppressed_ids)] = -np.inf
        assert int(np.argmax(logits)) == token


@pytest.mark.parametrize("model_type", ["llama", "marian"])
def test_a_fine_tuned_checkpoint_is_exported(model_type, references, tmp_path):
    reference = np.load(DATA / model_type / "reference.npz")
    inputs = [reference[key] for key in ("source", "tokens") if key in reference.files]

    def loss_fn(model, batch, rng):
        logits = model(*batch[:-1], batch[-1][:, :-1], rng=rng)
        losses = xf.cross_entropy(logits, batch[-1][:, 1:])
        return xf.array_namespace(losses).sum(losses)

    model, history = xf.fit(
        load_pretrained(DATA / model_type), loss_fn, [inputs], optimizer=xf.AdamW(), learning_rate=1e-2, steps=10,
        num_tokens=lambda batch: 16,
    )  # fmt: skip
    assert history[-1].loss < history[0].loss
    assert_same_model(model, tmp_path, model_type, references)


@pytest.mark.parametrize("name", ["BartForConditionalGeneration", "GPT2LMHeadModel"])
@pytest.mark.parametrize("settings", [
    {"repetition_penalty": 1.5}, {"repetition_penalty": 0.8}, {"no_repeat_ngram_size": 2}, {"min_new_tokens": 6},
    {"suppress_tokens": [5, 6, 7, 8]}, {"begin_suppress_tokens": [9, 10, 11, 12, 13, 14]}, {"eos_token_id": [2, 7, 9]},
])  # fmt: skip
def test_beams_with_processors_have_the_scores_of_transformers(name, settings, tmp_path):
    """Truncated outputs, which compete with finished ones in transformers only, are left out."""
    import torch
    import transformers

    ours = {{"eos_token_id": "stop_token_ids"}.get(key, key): value for key, value in settings.items()}
    common = {"max_new_tokens": 12, "num_beams": 4}
    sizes = {"vocab_size": 40, "decoder_start_token_id": 2, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
    sizes |= {"d_model": 24, "encoder_layers": 1, "decoder_layers": 1, "num_layers": 1, "d_kv": 12, "d_ff": 32}
    sizes |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_heads": 2, "forced_eos_token_id": None}
    sizes |= {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "n_embd": 24, "n_layer": 1, "n_head": 2}
    sizes |= {"init_std": 0.6, "initializer_range": 0.6, "initializer_factor": 3.0}
    model_class = getattr(transformers, name)
    known = {*model_class.config_class().to_dict(), *([] if name.startswith("GPT2") else ["decoder_start_token_id"])}
    config = model_class.config_class(**{key: value for key, value in sizes.items() if key in known})
    compared = 0
    for seed in range(8):
        torch.manual_seed(seed)
        model = model_class(config).eval().double()
        model.save_pretrained(tmp_path / str(seed))
        prompt = [11, 12, 13 + seed, 14, 3]
        options = {"length_penalty": 0.0, "early_stopping": "never", "do_sample": False}
        options |= {"return_dict_in_generate": True, "output_scores": True, "pad_token_id": 1}
        expected = model.generate(torch.tensor([prompt]), **common, **options, **settings)
        loaded = load_pretrained(tmp_path / str(seed), dtype="float64")
        ((found,),) = xf.generate(loaded, [prompt], keep_greedy=False, **common, **ours)
        tokens = expected.sequences[0].tolist()[1 if model.config.is_encoder_decoder else len(prompt) :]
        ends = [index for index, token in enumerate(tokens) if token in settings.get("eos_token_id", [2])]
        if bool(ends) == found.finished:
            assert found.tokens == tokens[: [*ends, None][0]]
            assert found.score == pytest.approx(float(expected.sequences_scores[0]), abs=1e-3)
            compared += 1
    assert compared > 4


def test_outputs_of_whisper_with_timestamps_are_those_of_transformers():
    import torch
    from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor
    from transformers.models.whisper.generation_whisper import WhisperGenerationMixin

    settings = SimpleNamespace(
        no_timestamps_token_id=33, eos_token_id=30, bos_token_id=30, max_initial_timestamp_index=5
    )
    theirs, rules = WhisperTimeStampLogitsProcessor(settings, begin_index=3), TimestampRules(34, 30, 5)
    for seed in range(20):
        draws, rows = Rng(seed), Rows.first([[31, 32]], [0], is_normalized=False)
        for step in range(25):
            logits = draws.fold_in(step).normal((1, 60), 2.0)
            logits[:, 34:] += draws.fold_in(step, "bias").normal((1,), 3.0)
            tokens = rows.history(0)
            expected = theirs(torch.tensor([[31, *tokens]]), torch.tensor(logits)).numpy()
            actual = rules(rows.tokens, rows.lengths, logits, rows)
            np.testing.assert_array_equal(actual, expected)
            token = int(np.argmax(actual))
            if token == 30:
                break
            rows = rows.extend([token])
        output = rows.history(0)[2:]
        (segments, step) = WhisperGenerationMixin._retrieve_segment(
            torch.tensor(output), [None], torch.zeros(1, dtype=torch.float64), 34, torch.tensor([50]), 0.02, 0.01, 2,
            0, 0, False, torch.zeros((1, 0)),
        )  # fmt: skip
        ours, next_position = split_segments(output, 34, 30, 25)
        assert next_position == int(step) / 2
        assert [each.tokens for each in ours] == [[t for t in each["tokens"].tolist() if t < 30] for each in segments]
        if next_position < 25:  # else transformers begins with the window, not with the first timestamp
            times = [(round(float(each["start"]) * 50), round(float(each["end"]) * 50)) for each in segments]
            assert [(each.start, each.end) for each in ours] == times


def test_pixels_of_images_are_those_of_transformers(tmp_path):
    import transformers

    from tests.data.test_images import CASES as PICTURES
    from tests.data.test_images import processor

    for settings, picture, _ in PICTURES.values():
        values = dict(settings)
        theirs = getattr(transformers, f"{values.pop('image_processor_type')}Pil")(**values)
        picture = np.broadcast_to(picture[..., None], (*picture.shape, 3)) if picture.ndim == 2 else picture
        (expected,) = theirs([np.ascontiguousarray(picture)], input_data_format="channels_last")["pixel_values"]
        np.testing.assert_array_equal(processor(tmp_path, settings)([picture])[0], expected)


@pytest.mark.parametrize("name", ["clip", "siglip", "siglip_masked"])
def test_zero_shot_classification_of_images_is_that_of_transformers(name, tmp_path):
    import transformers
    from PIL import Image

    from tests.pipelines.test_zero_shot_images import EXPECTED, LABELS, PICTURES, write_checkpoint

    directory = write_checkpoint(name, tmp_path)
    processor = f"{'CLIP' if name == 'clip' else 'Siglip'}ImageProcessorPil"
    classify = transformers.pipeline(
        "zero-shot-image-classification",
        model=str(directory),
        image_processor=getattr(transformers, processor).from_pretrained(directory),
    )
    images = [Image.fromarray(picture).convert("RGB") for picture in PICTURES]
    for row, expected in zip(classify(images, candidate_labels=LABELS), EXPECTED[name], strict=True):
        scores = {each["label"]: each["score"] for each in row}
        np.testing.assert_allclose([scores[label] for label in LABELS], expected, rtol=0, atol=1e-6)
