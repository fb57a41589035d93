"""Train a small CLIP on colored pictures, save it, and classify pictures by texts."""

import json
import tempfile
from pathlib import Path

import numpy as np
import tokenizers

import xformer as xf
from xformer.data.images import ImageProcessor

COLORS = {
    "red": (220, 40, 40),
    "green": (40, 180, 60),
    "blue": (40, 60, 220),
    "yellow": (230, 210, 50),
}
WORDS = ["<pad>", "<unk>", "<s>", "</s>", "a", "picture", "of", *COLORS]
directory = Path(tempfile.mkdtemp())

# The files that a public checkpoint has besides the model.
ids = {word: i for i, word in enumerate(WORDS)}
tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token="<unk>"))
tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
    single="<s> $A </s>", special_tokens=[("<s>", 2), ("</s>", 3)]
)
tokenizer.save(str(directory / "tokenizer.json"))
pixels = {"image_processor_type": "CLIPImageProcessor", "size": 8, "crop_size": 8}
pixels |= {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
(directory / "preprocessor_config.json").write_text(json.dumps(pixels))

# Two encoders with vectors of 16 features. These fields are those of CLIP, so that
# transformers can load the model too.
fields = {
    "d_model": 32, "num_heads": 2, "d_ff": 64, "num_layers": 2, "positions": "learned",
    "activation": "quick_gelu", "dropout": 0.0,
    "pooler": "identity", "head_bias": False, "projection_dim": 16,
}  # fmt: skip
text = xf.EncoderConfig(
    vocab_size=len(WORDS), max_positions=8, eos_id=3, pooling="last", causal=True,
    scale_embeddings=False, **fields,
)  # fmt: skip
image = xf.ImageEncoderConfig(
    image_size=8, patch_size=4, patch_bias=False, embedding_norm=True, **fields
)
model = xf.ImageTextEncoder(xf.ImageTextEncoderConfig(text=text, image=image))


def pictures(number):
    """Return a picture of each color, with random brightness and noise."""
    rng = np.random.default_rng(number)
    colors = np.array(list(COLORS.values()))[:, None, None, :]
    colors = colors * rng.uniform(0.6, 1.0, (4, 1, 1, 1)) + rng.normal(
        0, 20, (4, 8, 8, 3)
    )
    return list(np.clip(colors, 0, 255).astype(np.uint8))


def loss_fn(model, images, rng):
    """Return the loss of CLIP: pictures find their texts, and texts their pictures."""
    logits = model(images, tokens, rng=rng)
    xp, labels = xf.array_namespace(logits), np.arange(len(tokens))
    transposed = xp.matrix_transpose(logits)
    return xp.sum(
        xf.cross_entropy(logits, labels) + xf.cross_entropy(transposed, labels)
    )


texts = [f"a picture of {color}" for color in COLORS]
tokens = [each.ids for each in tokenizer.encode_batch(texts)]
processor = ImageProcessor.from_pretrained(directory)
batches = [processor(pictures(number)) for number in range(20)]
model, history = xf.fit(
    model, loss_fn, batches,
    num_tokens=len, optimizer=xf.AdamW(), learning_rate=3e-3, steps=60,
)  # fmt: skip
xf.save_pretrained(model, directory)

# A public checkpoint, such as openai/clip-vit-base-patch32, is used in the same way;
# pictures may be files.
classifier = xf.ZeroShotImageClassifier.from_pretrained(directory)
found = classifier(pictures(99), list(COLORS), template="a picture of {}")
for each in found:
    print(each.label, round(each.probability, 2))
assert [each.label for each in found] == list(COLORS)
