"""Train a translator of number words on lists of strings, and use it."""

import tempfile
from pathlib import Path

import xformer as xf
from xformer.data.demo_tasks import numbers_task

task = numbers_task(num_train=2000, num_valid=20, num_test=20, largest=9999)
out = Path(tempfile.mkdtemp()) / "run"

run = xf.train(
    source=task.train.source,
    target=task.train.target,
    valid_source=task.valid.source,
    valid_target=task.valid.target,
    out=out,
    d_model=32,
    num_heads=2,
    d_ff=64,
    num_encoder_layers=1,
    num_decoder_layers=1,
    vocab_size=120,
    learning_rate=0.003,
    max_steps=20,
    validate_every=10,
)
print(run.reason)
print([event["loss"] for event in run.history if event["event"] == "validation"])
print(run.pipeline(["one hundred and seven"], num_beams=3))

longer = xf.resume(out, max_steps=30)  # bit-identical to a run of 30 steps
print(longer.reason)

translator = xf.Translator.from_pretrained(out)  # in another program
print(translator(["forty-two"]))
