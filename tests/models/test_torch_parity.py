"""The whole model equals torch.nn.Transformer with embeddings, positions and head written out here."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.conftest import assert_close
from tests.reference import (
    LABELS,
    SMALL,
    SOURCE,
    TARGET,
    decoder_layer_arrays,
    encoder_layer_arrays,
    gradients,
    norm_arrays,
    prefixed,
    randomize,
    small_model,
    translation_loss,
    values,
)
from xformer import value_and_grad
from xformer.tree import replace

torch = pytest.importorskip("torch", reason="torch is what the model is compared with")
functional = torch.nn.functional
pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")  # torch's note about its own speed


class TorchTranslator(torch.nn.Module):
    """The module that a user of torch writes around nn.Transformer."""

    def __init__(self, *, pre_norm, activation, tied, bias):
        super().__init__()
        d_model, vocabulary = SMALL["d_model"], SMALL["target_vocab_size"]
        self.source = torch.nn.Embedding(SMALL["source_vocab_size"], d_model, dtype=torch.float64)
        self.target = torch.nn.Embedding(vocabulary, d_model, dtype=torch.float64)
        self.transformer = torch.nn.Transformer(
            d_model,
            SMALL["num_heads"],
            SMALL["num_encoder_layers"],
            SMALL["num_decoder_layers"],
            SMALL["d_ff"],
            dropout=0.0,
            activation=activation,
            batch_first=True,
            norm_first=pre_norm,
            dtype=torch.float64,
        )
        if not pre_norm:  # a post-norm stack ends with a norm already; torch adds one more
            self.transformer.encoder.norm = self.transformer.decoder.norm = None
        self.head = None if tied else torch.nn.Linear(d_model, vocabulary, bias=False, dtype=torch.float64)
        self.bias = torch.nn.Parameter(torch.zeros(vocabulary, dtype=torch.float64)) if bias else None

    def embed(self, table, ids):
        length, d_model = ids.shape[1], SMALL["d_model"]
        position = torch.arange(length, dtype=torch.float64)[:, None]
        angle = position * torch.exp(torch.arange(0, d_model, 2, dtype=torch.float64) * (-math.log(1e4) / d_model))
        positions = torch.stack([torch.sin(angle), torch.cos(angle)], dim=-1).reshape(length, d_model)
        return table(ids) * math.sqrt(d_model) + positions

    def forward(self, source, target):
        future = torch.triu(torch.ones(target.shape[1], target.shape[1], dtype=torch.bool), diagonal=1)
        output = self.transformer(
            self.embed(self.source, source),
            self.embed(self.target, target),
            tgt_mask=future,
            src_key_padding_mask=source == 0,
            tgt_key_padding_mask=target == 0,
            memory_key_padding_mask=source == 0,
        )
        weight = self.target.weight if self.head is None else self.head.weight
        return functional.linear(output, weight, self.bias)

    def arrays(self, of):
        arrays = {"source_embedding.weight": of(self.source.weight), "target_embedding.weight": of(self.target.weight)}
        for side, layer_arrays in (("encoder", encoder_layer_arrays), ("decoder", decoder_layer_arrays)):
            stack = getattr(self.transformer, side)
            for index, layer in enumerate(stack.layers):
                arrays |= prefixed(f"{side}.{index}", layer_arrays(layer, of))
            if stack.norm is not None:
                arrays |= prefixed(f"{side}_norm", norm_arrays(stack.norm, of))
        if self.head is not None:
            arrays["output.weight"] = of(self.head.weight).T
        if self.bias is not None:
            arrays["output_bias"] = of(self.bias)
        return arrays


def torch_loss(logits):
    return functional.cross_entropy(
        logits.flatten(0, 1), torch.tensor(LABELS).flatten(), ignore_index=0, label_smoothing=0.1
    )


@pytest.mark.parametrize(
    ("pre_norm", "activation", "tied", "bias"),
    [
        (True, "relu", True, False),
        (False, "relu", True, True),
        (True, "gelu", False, True),
        (False, "gelu", False, False),
    ],
)
def test_logits_loss_and_all_gradients_equal_those_of_torch(pre_norm, activation, tied, bias):
    theirs = randomize(TorchTranslator(pre_norm=pre_norm, activation=activation, tied=tied, bias=bias))
    expected = theirs(torch.tensor(SOURCE), torch.tensor(TARGET))
    expected_loss = torch_loss(expected)
    expected_loss.backward()

    model = small_model(
        norm_position="pre" if pre_norm else "post", activation=activation, tie_output=tied, output_bias=bias
    )
    model = replace(model, theirs.arrays(values))
    assert_close(model(SOURCE, TARGET), expected.detach().numpy())
    loss, found = value_and_grad(translation_loss)(model)
    assert_close(np.asarray(loss), expected_loss.detach().numpy())
    expected_gradients = theirs.arrays(gradients)
    for name, gradient in found.named_parameters():
        assert_close(gradient, expected_gradients[name])


def test_a_shared_embedding_gets_the_gradients_of_source_target_and_output():
    theirs = randomize(TorchTranslator(pre_norm=True, activation="relu", tied=True, bias=False))
    theirs.source = theirs.target
    torch_loss(theirs(torch.tensor(SOURCE), torch.tensor(TARGET))).backward()
    model = small_model(source_vocab_size=SMALL["target_vocab_size"], share_embeddings=True)
    arrays = theirs.arrays(values)
    del arrays["target_embedding.weight"]
    _, found = value_and_grad(translation_loss)(replace(model, arrays))
    assert_close(found.source_embedding.weight, theirs.target.weight.grad.numpy())
