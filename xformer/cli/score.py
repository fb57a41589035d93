r"""`xformer score`: score translations and summaries.

Score translations or summaries; each score comes with a signature of its settings.

\b
A translation       xformer score --reference test.en --hypothesis out.en
From a pipe         xformer translate --model run --input test.de | \
                      xformer score --reference test.en
Several references  xformer score --reference a --reference b --hypothesis out
Summaries           xformer score --reference titles --hypothesis out \
                      --metric rouge
Chinese             xformer score --reference test.zh --hypothesis out.zh \
                      --tokenize zh
All metrics         xformer score --reference test.en --hypothesis out.en \
                      --metric all --json

\b
bleu    n-grams of words shared with a reference (sacreBLEU)
chrf    n-grams of characters, better for inflected languages (sacreBLEU)
ter     edits per 100 words of a reference; lower is better (sacreBLEU)
rouge   ROUGE-1, ROUGE-2, ROUGE-L: F1 of words, pairs of words and the
        longest common subsequence, for summaries (rouge-score)

Scores range from 0 to 100 and higher is better, except for TER. Scores are comparable only if their signatures are
the same. Blank hypotheses count as empty answers and are reported. With several references, BLEU, chrF and TER use
all of them, as sacreBLEU does, and ROUGE takes the best one for each line.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from xformer.cli import _io
from xformer.cli._options import file_option, flag, value_option
from xformer.errors import ConfigError, DataError, check_choice
from xformer.runs.console import make_console
from xformer.text import Score, bleu, chrf, read_lines, rouge, ter
from xformer.text.metrics import bleu_tokenizer

_METRIC_HELP = "bleu, chrf, ter, rouge or all; repeatable (default: bleu and chrf)."
_TOKENIZE_HELP = (
    "Tokenizer of sacreBLEU: 13a, zh, ja-mecab, ko-mecab, intl, char, flores200 (default: that of the suffix of the "
    "reference, e.g. zh for test.zh, or 13a)."
)


def score(
    reference: Annotated[list[Path], file_option("--reference", "References, one per line; repeatable.", None)],
    hypothesis: Annotated[str, file_option("--hypothesis", "Lines to score; - is standard input.", None)] = "-",
    metric: Annotated[list[str] | None, value_option("--metric", "NAME", _METRIC_HELP, None)] = None,
    tokenize: Annotated[str | None, value_option("--tokenize", "NAME", _TOKENIZE_HELP, None)] = None,
    lowercase: Annotated[bool, flag("--lowercase", "Ignore case, for lowercase models; ROUGE always does.")] = False,
    stem: Annotated[bool, flag("--stem", "Compare the stems of English words (Porter), for ROUGE.")] = False,
    as_json: Annotated[bool, flag("--json", "Print one JSON object.")] = False,
) -> None:
    """Score translations or summaries."""
    scorers: dict[str, Callable[..., list[Score]]] = {  # in the order of the help
        "bleu": lambda *lines: [bleu(*lines, lowercase=lowercase, tokenize=tokenizer)],
        "chrf": lambda *lines: [chrf(*lines, lowercase=lowercase)],
        "ter": lambda *lines: [ter(*lines, lowercase=lowercase)],
        "rouge": lambda *lines: rouge(*lines, use_stemmer=stem),
    }
    selected = metric or ["bleu", "chrf"]
    for name in selected:
        check_choice("--metric", name, (*scorers, "all"))
    metrics = [name for name in scorers if name in selected or "all" in selected]
    if stem and "rouge" not in metrics:
        raise ConfigError("--stem applies only to ROUGE; expected --metric rouge")
    if tokenize is not None and "bleu" not in metrics:
        raise ConfigError("--tokenize applies only to BLEU; expected --metric bleu")
    tokenizer = tokenize or (bleu_tokenizer(reference[0].suffix[1:]) if "bleu" in metrics else "")
    references = [read_lines(path) for path in reference]
    if _io.is_terminal(hypothesis):
        make_console(stderr=True).print("type a line for each reference; Ctrl-D ends the input")
    hypotheses = _io.read_all(hypothesis)
    name = _io.STANDARD_INPUT if hypothesis == _io.STANDARD else hypothesis
    for path, lines in zip(reference, references, strict=True):
        if len(lines) != len(hypotheses):
            counts = f"{path} has {len(lines)} lines and {name} has {len(hypotheses)}"
            raise DataError(f"{counts}; expected one hypothesis per reference")
    scores = [each for name in metrics for each in scorers[name](hypotheses, references)]
    blank = [number for number, line in enumerate(hypotheses, start=1) if not line.strip()]
    if blank:
        verb = "is" if len(blank) == 1 else "are"
        count = f"{len(blank):,} of {len(hypotheses):,} hypotheses {verb} blank, the first on line {blank[0]}"
        print(f"warning: {count}; they count as empty answers", file=sys.stderr)
    if as_json:
        values = {each.name: {"score": each.value, "signature": each.signature} for each in scores}
        sizes = {"lines": len(hypotheses), "references": len(references), "blank_hypotheses": len(blank)}
        print(json.dumps({**values, **sizes}))
    else:
        print(f"{'metric':<8} {'score':>7}  better  signature")  # never wrapped, so that it is easy to parse
        for each in scores:
            better = "lower" if each.lower_is_better else "higher"
            print(f"{each.name:<8} {each.value:>7.2f}  {better:<6}  {each.signature}")
