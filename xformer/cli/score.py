"""`xformer score`: how good translations are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

HELP = """Score translations against references: BLEU and chrF, by sacreBLEU, with their signatures.

\b
  xformer score --reference test.en --hypothesis out.en
  xformer translate --model run --input test.de | \\
    xformer score --reference test.en

Both scores go from 0 to 100, higher is better. Scores compare only where their signatures are the same.
"""


def score(
    reference: Annotated[Path, typer.Option("--reference", metavar="FILE", help="Reference translations, one a line.")],
    hypothesis: Annotated[
        str, typer.Option("--hypothesis", metavar="FILE", help="Translations to score; - is standard input.")
    ] = "-",
    lowercase: Annotated[bool, typer.Option("--lowercase", help="Ignore case; for models that lower-case.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Score translations with BLEU and chrF."""
    from xformer.cli.streams import STANDARD, STANDARD_INPUT, read_all
    from xformer.errors import DataError
    from xformer.text import bleu, chrf, read_lines

    references, hypotheses = read_lines(reference), read_all(hypothesis)
    if len(references) != len(hypotheses):
        name = STANDARD_INPUT if hypothesis == STANDARD else hypothesis
        raise DataError(
            f"{reference} has {len(references)} lines and {name} has {len(hypotheses)}; "
            "expected one translation for each reference"
        )
    scores = [measure(hypotheses, references, lowercase=lowercase) for measure in (bleu, chrf)]
    if as_json:
        values = {s.name: {"score": s.value, "signature": s.signature} for s in scores}
        print(json.dumps({**values, "lines": len(references)}))
    else:
        for each in scores:
            print(each)
