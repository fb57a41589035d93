"""`xformer score`: how good translations and summaries are."""

from __future__ import annotations

import enum
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from xformer.text import Score

HELP = """Score translations or summaries, each measure with the signature of its settings.

\b
A translation       xformer score --reference test.en --hypothesis out.en
From a pipe         xformer translate --model run --input test.de | \\
                      xformer score --reference test.en
More references     xformer score --reference a --reference b --hypothesis out
Summaries           xformer score --reference titles --hypothesis out \\
                      --metric rouge
All there is        xformer score --reference test.en --hypothesis out.en \\
                      --metric all --json

\b
bleu    words and phrases that a reference has too (sacreBLEU)
chrf    the same for characters: kinder to inflected languages (sacreBLEU)
ter     edits to a reference for each 100 words: lower is better (sacreBLEU)
rouge   ROUGE-1, ROUGE-2, ROUGE-L: words, pairs of words and the longest
        common sequence, F1, for summaries (rouge-score)

All but TER go from 0 to 100, higher is better. Scores compare only where their signatures are the same. A blank line \
among the hypotheses counts as an empty answer and is reported. With several references, BLEU, chrF and TER use \
them all, as sacreBLEU does, and ROUGE takes the best one for each line.
"""


class Metric(enum.StrEnum):
    """What `--metric` may be."""

    BLEU = "bleu"
    CHRF = "chrf"
    TER = "ter"
    ROUGE = "rouge"
    ALL = "all"


def score(
    reference: Annotated[
        list[Path],
        typer.Option("--reference", metavar="FILE", help="References, one a line; give it again for more of them."),
    ],
    hypothesis: Annotated[
        str, typer.Option("--hypothesis", metavar="FILE", help="Lines to score; - is standard input.")
    ] = "-",
    metric: Annotated[
        list[Metric] | None,
        typer.Option(
            "--metric", metavar="NAME", help="bleu, chrf, ter, rouge or all; again for more (default: bleu and chrf)."
        ),
    ] = None,
    lowercase: Annotated[
        bool, typer.Option("--lowercase", help="Ignore case, for models that lower-case; ROUGE always does.")
    ] = False,
    stem: Annotated[bool, typer.Option("--stem", help="ROUGE compares the stems of English words (Porter).")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Score translations or summaries."""
    from xformer.cli.console import make_console
    from xformer.cli.streams import is_terminal, read_all
    from xformer.errors import ConfigError
    from xformer.text import read_lines

    wanted = _wanted(metric or [Metric.BLEU, Metric.CHRF])
    if stem and Metric.ROUGE not in wanted:
        raise ConfigError("--stem is for ROUGE, which is not asked for; add --metric rouge, or leave --stem out")
    references = [read_lines(path) for path in reference]
    if is_terminal(hypothesis):
        make_console(stderr=True).print("type a line for each reference; Ctrl-D ends")
    hypotheses = read_all(hypothesis)
    _check_counts(hypothesis, hypotheses, dict(zip(reference, references, strict=True)))
    scores = [each for kind in wanted for each in _measures(lowercase, stem)[kind](hypotheses, references)]
    num_blank = _report_blank(hypotheses)
    if as_json:
        values = {each.name: {"score": each.value, "signature": each.signature} for each in scores}
        counts = {"lines": len(hypotheses), "references": len(references), "blank_hypotheses": num_blank}
        print(json.dumps({**values, **counts}))
    else:
        _print_table(scores)


def _wanted(metrics: Sequence[Metric]) -> list[Metric]:
    """The measures to take, each once, in the order of the help."""
    if Metric.ALL in metrics:
        metrics = list(Metric)
    return [metric for metric in Metric if metric in metrics and metric != Metric.ALL]


def _measures(lowercase: bool, stem: bool) -> dict[Metric, Callable[[list[str], list[list[str]]], list[Score]]]:
    from xformer.text import bleu, chrf, rouge, ter

    return {
        Metric.BLEU: lambda *lines: [bleu(*lines, lowercase=lowercase)],
        Metric.CHRF: lambda *lines: [chrf(*lines, lowercase=lowercase)],
        Metric.TER: lambda *lines: [ter(*lines, lowercase=lowercase)],
        Metric.ROUGE: lambda *lines: rouge(*lines, use_stemmer=stem),
    }


def _check_counts(hypothesis: str, hypotheses: list[str], references: dict[Path, list[str]]) -> None:
    """Raise DataError unless every reference file has one line for each hypothesis."""
    from xformer.cli.streams import STANDARD, STANDARD_INPUT
    from xformer.errors import DataError

    name = STANDARD_INPUT if hypothesis == STANDARD else hypothesis
    for path, lines in references.items():
        if len(lines) != len(hypotheses):
            raise DataError(
                f"{path} has {len(lines)} lines and {name} has {len(hypotheses)}; "
                "expected one hypothesis for each reference"
            )


def _report_blank(hypotheses: list[str]) -> int:
    """Count blank hypotheses, and say on stderr that there are some."""
    blank = [number for number, line in enumerate(hypotheses, start=1) if not line.strip()]
    if blank:
        print(
            f"warning: {len(blank):,} of {len(hypotheses):,} hypotheses {'is' if len(blank) == 1 else 'are'} blank, "
            f"the first on line {blank[0]}; they count as empty answers",
            file=sys.stderr,
        )
    return len(blank)


def _print_table(scores: list[Score]) -> None:
    """Print name, value, direction and signature in columns; never wrapped, so that it can be searched and cut."""
    print(f"{'measure':<8} {'score':>7}  better  signature")
    for each in scores:
        better = "lower" if each.lower_is_better else "higher"
        print(f"{each.name:<8} {each.value:>7.2f}  {better:<6}  {each.signature}")
