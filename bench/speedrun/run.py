"""Run an entry of docs/speedrun.md: `python bench/speedrun/run.py shakespeare --minutes 1 DATA`.

DATA is a directory with the texts that the entry names. Each seed is one process; the clock runs from its start to its
end, validation included. Prints a row of the table for each seed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "docs" / "recipes"
ENTRIES = {
    "shakespeare": ("train-lm", "tinyshakespeare-speedrun.toml", {"text": "input.txt"}, "loss"),
    "multi30k": (
        "train",
        "multi30k-de-en.toml",
        {"source": "train.de", "target": "train.en", "valid-source": "val.de", "valid-target": "val.en"},
        "score",
    ),
    "titles": (
        "train",
        "acl-titles.toml",
        {f"{kind}{side}": f"{split}.{name}" for kind, split in (("", "train"), ("valid-", "dev"))
         for side, name in (("source", "abstract"), ("target", "title"))},
        "score",
    ),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("entry", choices=ENTRIES)
    parser.add_argument("data", type=Path)
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--recipe", type=Path, help="another recipe")
    options, more = parser.parse_known_args()  # other options are those of the command
    command, recipe, texts, name = ENTRIES[options.entry]
    words = [sys.executable, "-m", "xformer", command, "--recipe", str(options.recipe or RECIPES / recipe)]
    words += [word for key, file in texts.items() for word in (f"--{key}", str(options.data.resolve() / file))]
    best = min if name == "loss" else max
    for seed in range(options.seeds):
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder) / "run"
            limit = ["--max-minutes", str(options.minutes), "--out", str(run), "--set", f"training.seed={seed}"]
            start = time.monotonic()
            subprocess.run([*words, *limit, *more], check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
            seconds = time.monotonic() - start
            events = [json.loads(line) for line in (run / "log.jsonl").read_text(encoding="utf-8").splitlines()]
            steps = max(event["step"] for event in events)
            values = [event[name] for event in events if event["event"] == "validation" and event[name] is not None]
        threads = os.environ.get("XFORMER_NUM_THREADS", os.cpu_count())
        row = f"{options.entry}, {options.minutes:g} minutes", seed, f"{seconds:.0f} s", f"{steps:,}", threads
        print(f"| {' | '.join(map(str, row))} | {best(values):.4f} |", flush=True)


if __name__ == "__main__":
    main()
