"""Run a checkpoint directory, fine-tune its model and save it again."""

import tempfile
from pathlib import Path

import numpy as np
import tokenizers

import xformer as xf

WORDS = ["<pad>", "<bos>", "<eos>", "<unk>", "A", "man", "dog", "sleeps", "runs", "."]


def make_checkpoint(directory: Path) -> None:
    """Write a tiny random Llama and its tokenizer, in place of a public checkpoint."""
    config = xf.LanguageModelConfig(
        vocab_size=len(WORDS), d_model=16, num_heads=2, d_ff=32, num_layers=2,
        max_positions=64,
        positions="rotary", norm="rms", activation="swiglu", scale_embeddings=False,
    )  # fmt: skip
    xf.save_pretrained(xf.LanguageModel(config, seed=0), directory, model_type="llama")
    vocab = {word: index for index, word in enumerate(WORDS)}
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel(vocab, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(WORDS[:4])
    tokenizer.save(str(directory / "tokenizer.json"))


directory = Path(tempfile.mkdtemp())
make_checkpoint(directory / "original")

# Run it. xp="torch", "jax" or "cupy" runs the same model on another library.
generator = xf.TextGenerator.from_pretrained(directory / "original", xp="numpy")
print(generator(["A man"], max_new_tokens=5, do_sample=False))

# Fine-tune it. The loss is a sum over tokens.
model = xf.load_pretrained(directory / "original", dtype="float32")
rows = generator.token_ids(["A man sleeps .", "A dog runs", "A dog sleeps ."])
IGNORED = -100  # the label of padding
labels = np.array(
    [[*row, *[IGNORED] * (max(map(len, rows)) - len(row))] for row in rows]
)


def loss_fn(model, labels, rng):
    # Any id: no token attends to the padding after it.
    tokens = np.where(labels == IGNORED, 0, labels)[:, :-1]
    # Nothing is masked, not even tokens equal to the model's pad_id.
    mask = np.ones((1, 1, 1, 1), dtype=bool)
    losses = xf.cross_entropy(
        model(tokens, mask=mask, rng=rng), labels[:, 1:], pad_id=IGNORED
    )
    return xf.array_namespace(losses).sum(losses)


model, history = xf.fit(
    model,
    loss_fn,
    [labels],
    num_tokens=lambda labels: int((labels[:, 1:] != IGNORED).sum()),
    optimizer=xf.AdamW(),
    learning_rate=1e-2,
    steps=40,
)

# Save model and tokenizer in the same format, which transformers also loads.
xf.save_pretrained(model, directory / "tuned")
generator.tokenizer.save(directory / "tuned")
tuned = xf.TextGenerator.from_pretrained(directory / "tuned")
print(tuned(["A dog"], max_new_tokens=2, do_sample=False))
assert history[-1].loss < history[0].loss
