"""Train a Transformer to write sequences in reverse: 7 3 9 4 becomes 4 9 3 7."""

import random
import tempfile

import xformer as xf

rng = random.Random(0)
sequences = [rng.choices("3456789", k=rng.randint(3, 5)) for _ in range(2000)]
sources = [" ".join(each) for each in sequences]
targets = [" ".join(reversed(each)) for each in sequences]

run = xf.train(
    source=sources[100:],
    target=targets[100:],
    valid_source=sources[:100],
    valid_target=targets[:100],
    out=tempfile.mkdtemp(),
    tokenizer={"model": "words", "vocab_size": 11},
    d_model=64,
    num_heads=2,
    d_ff=128,
    num_encoder_layers=1,
    num_decoder_layers=1,
    dropout=0.0,
    learning_rate=0.005,
    warmup_steps=20,
    max_steps=200,  # longer sequences need more steps and a larger d_model
    validate_every=200,
)
print(run.pipeline(["7 3 9 4"]))
assert run.pipeline(["7 3 9 4", "8 3 6"]) == ["4 9 3 7", "6 3 8"]
