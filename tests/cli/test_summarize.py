"""`xformer train --task summarization` and `xformer summarize`, from documents to summaries."""

from __future__ import annotations

import json

import pytest

from tests.cli.conftest import RECIPE
from xformer.cli.main import exit_code
from xformer.families.run_directory import RunDirectory
from xformer.pipelines import Summarizer

DOCUMENTS = [
    "We count words. One two three four. The end is near.",
    "A dog runs home. It is late.",
    "Cats sleep all day. They dream. Nobody knows of what.",
    "We train models. Models learn. Then they stop.",
]
TITLES = ["counting words", "a dog", "sleeping cats", "training models"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("summaries")
    for name, lines in (("documents", DOCUMENTS), ("titles", TITLES)):
        (folder / name).write_text("\n".join(lines * 3) + "\n", encoding="utf-8")
    (folder / "recipe.toml").write_text(RECIPE, encoding="utf-8")
    files = ["--source", "documents", "--target", "titles", "--valid-source", "documents", "--valid-target", "titles"]
    files = [str(folder / name) if not name.startswith("--") else name for name in files]
    options = ["--recipe", str(folder / "recipe.toml"), "--task", "summarization", "--out", str(folder / "run")]
    options += ["--max-steps", "4", "--max-length", "12"]
    assert exit_code(["train", *files, *options]) == 0
    return folder / "run"


def test_the_run_knows_its_task(run):
    config = RunDirectory(run).read_config()
    assert config["task"] == "summarization"
    assert config["recipe"]["tokenizer"]["documents"] is True
    assert config["recipe"]["training"]["truncation"] == "cut"
    assert config["counts"]["train_sources_cut"] > 0
    events = [json.loads(line) for line in (run / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    assert {event["metric"] for event in events if event["event"] == "validation"} == {"ROUGE"}


def test_one_summary_a_document(xformer, run, tmp_path):
    (tmp_path / "in").write_text("\n".join(DOCUMENTS) + "\n", encoding="utf-8")
    done = xformer("summarize", "--model", run, "--input", tmp_path / "in", "--max-new-tokens", 6, "--num-beams", 2)
    expected = Summarizer.from_pretrained(run)(DOCUMENTS, max_new_tokens=6, num_beams=2)
    assert (done.code, done.out) == (0, "".join(f"{line}\n" for line in expected))
