"""Train the recipes with published results: `python bench/recipes.py DIR DATA [options of xformer train]`.

DATA contains, at any depth, a directory with train, val and test_2016_flickr of Multi30k (.en, .de), and one with
input.txt of tiny Shakespeare. Runs go to DIR, which must be new; a short table is printed last. Training uses CuPy in
bfloat16 unless the options say otherwise; `--max-minutes 4` limits each run.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from gpu import refuse, show

ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "docs" / "recipes"
ON_A_GPU = ["--backend", "cupy", "--precision", "bfloat16"]
SIDES = {"source": "train.en", "target": "train.de", "valid-source": "val.en", "valid-target": "val.de"}
TEST = "test_2016_flickr.en", "test_2016_flickr.de"


def main(arguments: list[str]) -> int:
    """Train both models; return the exit status of the first command that failed."""
    if len(arguments) < 2:
        return refuse("expected a directory for the runs, and the directory of the data")
    folder, data = Path(arguments[0]).resolve(), Path(arguments[1]).resolve()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        return refuse(f"{folder} is not an empty directory; expected a new directory for the runs")
    files = {}
    for names in ((*SIDES.values(), *TEST), ("input.txt",)):
        directory = next((path for path in (data, *sorted(data.rglob("*/"))) if contains(path, names)), None)
        if directory is None:
            return refuse(f"no directory in {data} contains {', '.join(names)}")
        files |= {name: str(directory / name) for name in names}
    options = [*ON_A_GPU, *arguments[2:]]  # the last value of an option counts
    folder.mkdir(parents=True, exist_ok=True)
    rows, failed = [("recipe", "measure", "reached", "published", "minutes of training")], 0
    try:
        for train in (translation, language_model):
            rows.append(train(folder, files, options))
    except subprocess.CalledProcessError as error:
        failed = error.returncode
    if rows[1:]:
        show(rows, folder / "recipes.txt")
    return failed


def contains(folder: Path, names: tuple[str, ...]) -> bool:
    """Return True if a directory contains all these files."""
    return all((folder / name).is_file() for name in names)


def translation(folder: Path, files: dict[str, str], options: list[str]) -> tuple[str, ...]:
    """Train English to German with 2.6 million parameters (Wu et al., 2021)."""
    run, hypotheses = folder / "multi30k-en-de", folder / "test.hyp"
    data = [part for side, name in SIDES.items() for part in (f"--{side}", files[name])]
    recipe = ["--recipe", RECIPES / "multi30k-en-de-tiny.toml"]
    minutes = xformer("train", *recipe, *data, "--out", run, *options)
    search = ["--num-beams", "5", "--length-penalty", "1.0"]
    xformer("translate", "--model", run, "--input", files[TEST[0]], "--output", hypotheses, *search)
    score = [sys.executable, "-m", "xformer", "score", "--reference", files[TEST[1]], "--hypothesis", hypotheses]
    output = subprocess.run([*score, "--lowercase", "--json"], cwd=ROOT, check=True, capture_output=True, text=True)
    return "multi30k-en-de-tiny", "BLEU", f"{json.loads(output.stdout)['BLEU']['score']:.2f}", "41.02", f"{minutes:.1f}"


def language_model(folder: Path, files: dict[str, str], options: list[str]) -> tuple[str, ...]:
    """Train on characters of tiny Shakespeare with nanoGPT's GPU setting."""
    run = folder / "tinyshakespeare"
    recipe = ["--recipe", RECIPES / "tinyshakespeare-gpu.toml"]
    minutes = xformer("train-lm", *recipe, "--text", files["input.txt"], "--out", run, *options)
    lines = map(json.loads, (run / "log.jsonl").read_text(encoding="utf-8").splitlines())
    best = min(line["loss"] for line in lines if line["event"] == "validation")
    return "tinyshakespeare-gpu", "best validation loss", f"{best:.4f}", "1.4697", f"{minutes:.1f}"


def xformer(*arguments: object) -> float:
    """Run a command and return its minutes; raise CalledProcessError if it fails."""
    start = time.monotonic()
    subprocess.run([sys.executable, "-m", "xformer", *map(str, arguments)], cwd=ROOT, check=True)
    return (time.monotonic() - start) / 60.0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
