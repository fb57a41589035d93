"""Write the tiny checkpoints of cases.py and the outputs that transformers computes for them, in float64.

Requires torch and transformers: `python -m tests.families.make_references DIR [CASE ...]`.
"""

import contextlib
import json
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import transformers
from transformers.models.bloom import modeling_bloom
from transformers.models.deberta_v2 import modeling_deberta_v2

from tests.families.cases import CASES, GRADIENTS, IMPLEMENTATIONS


@contextlib.contextmanager
def float64_throughout():
    """Replace the casts to float32 inside norms, softmax and rotary positions by casts to float64."""
    to, softmax, arange = torch.Tensor.to, torch.nn.functional.softmax, torch.arange

    def wide(dtype):
        return torch.float64 if dtype == torch.float32 else dtype

    def to_wide(self, *args, **keywords):
        keywords = {name: wide(value) if name == "dtype" else value for name, value in keywords.items()}
        return to(self, *map(wide, args), **keywords)

    def gelu(x):  # the constant of BLOOM has eight digits
        return torch.nn.functional.gelu(x, approximate="tanh")

    def scale(query, factor):  # the root of DeBERTa is float32
        return torch.tensor(query.shape[-1] * factor, dtype=torch.float64).sqrt()

    with (
        mock.patch.object(modeling_bloom, "bloom_gelu_forward", gelu),
        mock.patch.object(modeling_deberta_v2, "scaled_size_sqrt", scale),
        mock.patch.object(torch.Tensor, "to", to_wide),
        mock.patch.object(torch.Tensor, "float", torch.Tensor.double),
        mock.patch.object(torch, "arange", lambda *args, dtype=None, **k: arange(*args, dtype=wide(dtype), **k)),
        mock.patch.object(
            torch.nn.functional,
            "softmax",
            lambda x, *args, dtype=None, **keywords: softmax(x, *args, dtype=wide(dtype), **keywords),
        ),
    ):
        yield


def randomize(model, seed: int) -> None:
    """Give all parameters values that make every one of them visible in the output."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        constants = {id(m.weight) for m in model.modules() if "Sinusoidal" in type(m).__name__ and hasattr(m, "weight")}
        for name, x in model.named_parameters():
            if id(x) in constants:
                continue
            noise = torch.randn(x.shape, generator=generator)
            if x.dim() == 1 and name.endswith("weight"):
                x.copy_(1.0 + 0.2 * noise)
            else:
                x.copy_(noise * (0.3 if x.dim() < 2 else x.shape[-1] ** -0.5))


def make(name: str, directory: Path) -> None:
    config_class, model_class, values = CASES[name]
    implementation = IMPLEMENTATIONS.get(name, "eager")
    config = getattr(transformers, config_class)(
        **values, attn_implementation=implementation, experts_implementation="eager"
    )
    model = getattr(transformers, model_class)(config)
    randomize(model, seed=len(name))
    model.tie_weights()
    model.eval().save_pretrained(directory)
    with float64_throughout():
        wide = getattr(transformers, model_class)(config).eval().double()
        wide.load_state_dict({key: x.double() for key, x in model.state_dict().items()})
        arrays = outputs_of(wide)
        if name in GRADIENTS:
            save_gradients(wide, arrays, directory / "gradients")
    np.savez_compressed(directory / "reference.npz", **arrays)
    (directory / "generation_config.json").unlink(missing_ok=True)
    print(name, json.dumps({key: list(np.shape(value)) for key, value in arrays.items()}))


def outputs_of(model) -> dict:
    """Return inputs and outputs of a float64 model."""
    for module in model.modules():  # Marian's tables and Gemma's scale are float32
        if hasattr(module, "scalar_embed_scale"):
            module.embed_scale = torch.tensor(module.scalar_embed_scale, dtype=torch.float64)
        if "Sinusoidal" in type(module).__name__ and hasattr(module, "weight"):
            positions, size = module.weight.shape
            angle = torch.arange(positions).double()[:, None] / 10000.0 ** (torch.arange(0, size, 2).double() / size)
            module.weight.data = torch.cat([torch.sin(angle), torch.cos(angle)], dim=1)
    if model.config.model_type == "t5gemma" and (c := model.model.encoder.config).sliding_window:
        c.sliding_window -= 1  # transformers 5 counts one token more on each side
    functions = {"whisper": speech, "vit": images, "dinov2": images, "clip": pairs, "siglip": pairs}
    compute = functions.get(model.config.model_type)
    if compute is None and model.config.is_encoder_decoder:
        compute = encoder_decoder
    if compute is None:
        compute = language_model if model.can_generate() else encoder
    return {key: np.asarray(value) for key, value in compute(model).items()}


def save_gradients(model, arrays: dict, directory: Path) -> None:
    """Write the gradient of the cross-entropy of class 2, summed over all outputs, as a checkpoint of the model."""
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            module.padding_idx = None  # else the gradient of its row is left out
    values = list(model.parameters())
    if hasattr(model, "final_logits_bias"):  # a buffer
        values.append(model.final_logits_bias.requires_grad_())
    tensors = {key: torch.tensor(x) for key, x in arrays.items()}
    if "images" in tensors and "tokens" in tensors:
        logits = model(input_ids=tensors["tokens"], pixel_values=tensors["images"]).logits_per_image
    elif "images" in tensors:
        logits = model(tensors["images"]).logits
    elif "source" in tensors:
        mask = (tensors["source"] != model.config.pad_token_id).int()
        logits = model(tensors["source"], attention_mask=mask, decoder_input_ids=tensors["tokens"]).logits
    elif "token_types" in tensors:
        mask = (tensors["tokens"] != model.config.pad_token_id).int()
        logits = model(tensors["tokens"], attention_mask=mask, token_type_ids=tensors["token_types"]).logits
    else:
        logits = model(tensors["tokens"]).logits
    (-torch.log_softmax(logits, dim=-1)[..., 2].sum()).backward()
    for x in values:
        if x.requires_grad:
            x.data = torch.zeros_like(x) if x.grad is None else x.grad
    model.save_pretrained(directory)
    (directory / "generation_config.json").unlink(missing_ok=True)


def language_model(model) -> dict:
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(3, model.config.vocab_size - 1, (2, 9), generator=generator)
    with torch.no_grad():
        outputs = model(tokens, output_hidden_states=True)
        greedy = model.generate(tokens[:1, :5], max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    return {
        "tokens": tokens,
        "logits": outputs.logits,
        "hidden_states": torch.stack(outputs.hidden_states),
        "greedy": greedy[:, 5:],
    }


def encoder_decoder(model) -> dict:
    generator, c = torch.Generator().manual_seed(7), model.config
    source = torch.randint(3, c.vocab_size - 1, (2, 7), generator=generator)
    source[:, -1] = c.eos_token_id
    source[1, 4:] = torch.tensor([c.eos_token_id, c.pad_token_id, c.pad_token_id])
    target = torch.randint(3, c.vocab_size - 1, (2, 9), generator=generator)
    start = getattr(c, "decoder_start_token_id", None)
    target[:, 0] = c.bos_token_id if start is None else start
    mask = torch.tensor([[1] * 7, [1] * 5 + [0] * 2])
    with torch.no_grad():
        outputs = model(source, attention_mask=mask, decoder_input_ids=target, output_hidden_states=True)
        greedy = model.generate(
            source[:1], attention_mask=mask[:1], max_new_tokens=8, do_sample=False, num_beams=1, eos_token_id=-1,
            forced_eos_token_id=None,
        )  # fmt: skip
    return {
        "source": source, "tokens": target, "logits": outputs.logits,
        "encoder_hidden_states": torch.stack(outputs.encoder_hidden_states),
        "hidden_states": torch.stack(outputs.decoder_hidden_states), "greedy": greedy[:, 1:],
    }  # fmt: skip


def speech(model) -> dict:
    generator, c = torch.Generator().manual_seed(7), model.config
    frames = torch.randn((2, 2 * c.max_source_positions, c.num_mel_bins), generator=generator).double()
    target = torch.randint(3, 50, (2, 9), generator=generator)
    target[:, 0] = c.decoder_start_token_id
    features, greedy = frames.transpose(1, 2), target[:1, :1]
    with torch.no_grad():
        outputs = model(features, decoder_input_ids=target, output_hidden_states=True)
        for _ in range(8):  # generate() of Whisper needs the tokens of a real vocabulary
            logits = model(features[:1], decoder_input_ids=greedy).logits
            greedy = torch.cat([greedy, logits[:, -1:].argmax(dim=-1)], dim=1)
    return {
        "source": frames, "tokens": target, "logits": outputs.logits,
        "encoder_hidden_states": torch.stack(outputs.encoder_hidden_states),
        "hidden_states": torch.stack(outputs.decoder_hidden_states), "greedy": greedy[:, 1:],
    }  # fmt: skip


def encoder(model) -> dict:
    generator, pad_id = torch.Generator().manual_seed(7), model.config.pad_token_id
    tokens = torch.randint(3, model.config.vocab_size - 1, (2, 9), generator=generator)
    tokens[1, 6:] = pad_id
    types = {}
    if getattr(model.config, "type_vocab_size", 1) > 1:
        types = {"token_type_ids": torch.tensor([[0] * 4 + [1] * 5] * 2)}
    with torch.no_grad():
        outputs = model(tokens, attention_mask=(tokens != pad_id).int(), output_hidden_states=True, **types)
    pooled = getattr(outputs, "pooler_output", None)
    return {
        "tokens": tokens,
        "hidden_states": torch.stack(outputs.hidden_states),
        **({"token_types": types["token_type_ids"]} if types else {}),
        **({"logits": outputs.logits} if "logits" in outputs else {}),
        **({} if pooled is None else {"pooled": pooled}),
    }


def images(model) -> dict:
    generator, c = torch.Generator().manual_seed(7), model.config
    pixels = torch.randn((2, c.num_channels, c.image_size, c.image_size), generator=generator).double()
    with torch.no_grad():
        outputs = model(pixels, output_hidden_states=True)
    heads = {"logits": "logits", "last_hidden_state": "states", "pooler_output": "pooled"}
    arrays = {ours: outputs[theirs] for theirs, ours in heads.items() if theirs in outputs}
    if c.model_type == "dinov2":  # interpolates positions
        arrays["wide_images"] = torch.randn((1, c.num_channels, 16, 20), generator=generator).double()
        with torch.no_grad():
            arrays["wide_hidden_states"] = torch.stack(
                model(arrays["wide_images"], output_hidden_states=True).hidden_states
            )
    return {"images": pixels, "hidden_states": torch.stack(outputs.hidden_states), **arrays}


def pairs(model) -> dict:
    generator, text, c = torch.Generator().manual_seed(7), model.config.text_config, model.config.vision_config
    pixels = torch.randn((2, c.num_channels, c.image_size, c.image_size), generator=generator).double()
    tokens, eos_id = torch.randint(3, text.vocab_size - 2, (3, 9), generator=generator), text.vocab_size - 1
    tokens[0, 4] = tokens[1, 8] = eos_id
    tokens[2, 6:] = eos_id
    with torch.no_grad():
        outputs = model(input_ids=tokens, pixel_values=pixels, output_hidden_states=True)
    parts = {"image": outputs.vision_model_output, "text": outputs.text_model_output}
    return {
        "images": pixels,
        "tokens": tokens,
        "logits": outputs.logits_per_image,
        **{f"{name}_hidden_states": torch.stack(part.hidden_states) for name, part in parts.items()},
        **{f"{name}_vectors": part.pooler_output for name, part in parts.items()},
    }


if __name__ == "__main__":
    for case in sys.argv[2:] or CASES:
        make(case, Path(sys.argv[1]) / case)
