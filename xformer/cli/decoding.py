"""The options of commands that write text: how to search, how long, about what."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Annotated, Any

import typer

SEARCH, LENGTH, STEER, SAMPLE, LIMITS = "Search", "Length of the output", "Steering", "Sampling", "Limits"


def option(panel: str, what: str, **settings: Any) -> Any:
    """An option with its help, in a panel of the page of help."""
    return typer.Option(help=what, rich_help_panel=panel, **settings)


def utf8(value: Any) -> Any:
    """Pass on an option that is text, or several; raises BadParameter for bytes that are no text."""
    for text in [value] if isinstance(value, str) else value or []:
        try:
            text.encode()
        except UnicodeEncodeError:  # Python keeps such bytes of a command line as lone surrogates
            raise typer.BadParameter("expected UTF-8 text") from None
    return value


_WINS = "Where limits contradict each other for a sentence, the maximum wins."

# Name, type with its help, default; the names are those of GenerationRequest and DecodingOptions.
_OPTIONS: list[tuple[str, Any, Any]] = [
    ("num_beams", Annotated[int, option(SEARCH, "Hypotheses kept at each step; 1 is greedy search.", min=1)], 1),
    (
        "num_return_sequences",
        Annotated[int, option(SEARCH, "Outputs for each line; above 1 with scores (see above).", min=1)],
        1,
    ),
    (
        "length_penalty",
        Annotated[float, option(SEARCH, "alpha of Wu et al. (2016): above 0 favors longer outputs.")],
        0.0,
    ),
    (
        "coverage_penalty",
        Annotated[float, option(SEARCH, "beta of Wu et al. (2016): favors outputs that attend to all of the source.")],
        0.0,
    ),
    (
        "num_beam_groups",
        Annotated[int, option(SEARCH, "Diverse beam search (Vijayakumar et al., 2016): groups, dividing the beam.")],
        1,
    ),
    (
        "diversity_penalty",
        Annotated[float | None, option(SEARCH, "What a token costs that an earlier group took (default 0.5).")],
        None,
    ),
    (
        "min_length",
        Annotated[int, option(LENGTH, f"Fewest tokens. {_WINS}")],
        0,
    ),
    (
        "max_length",
        Annotated[
            int | None,
            option(
                LENGTH,
                f"Most tokens (default: twice the source plus 20). Outputs that reach it are counted. {_WINS}",
                min=1,
            ),
        ],
        None,
    ),
    (
        "min_length_ratio",
        Annotated[float, option(LENGTH, f"Fewest tokens, times those of the source. {_WINS}")],
        0.0,
    ),
    (
        "max_length_ratio",
        Annotated[float | None, option(LENGTH, f"Most tokens, times those of the source. {_WINS}")],
        None,
    ),
    (
        "desired_length",
        Annotated[
            int | None,
            option(
                LENGTH, "How long outputs should be; a beam (of 4 unless given) finds one that ends near it.", min=1
            ),
        ],
        None,
    ),
    (
        "length_unit",
        Annotated[str, option(LENGTH, "What --desired-length counts.", metavar="tokens|words")],
        "tokens",
    ),
    (
        "keep_greedy",
        Annotated[
            bool,
            typer.Option(
                "--keep-greedy/--no-keep-greedy",
                help="The greedy hypothesis keeps its place in the beam, which is then never worse.",
                rich_help_panel=SEARCH,
            ),
        ],
        True,
    ),
    (
        "align",
        Annotated[
            bool,
            typer.Option(
                "--align", help="Also the source token that each token attends to most.", rich_help_panel=SEARCH
            ),
        ],
        False,
    ),
    (
        "length_tolerance",
        Annotated[float, option(LENGTH, "How far from --desired-length an output may be, as a fraction of it.")],
        0.1,
    ),
    (
        "prefix",
        Annotated[str | None, option(STEER, "What every output begins with.", metavar="TEXT", callback=utf8)],
        None,
    ),
    (
        "topics",
        Annotated[
            list[str] | None,
            typer.Option(
                "--topic",
                help="A word or phrase to favor; may be repeated.",
                metavar="TEXT",
                rich_help_panel=STEER,
                callback=utf8,
            ),
        ],
        None,
    ),
    ("topic_strength", Annotated[float, option(STEER, "How much to favor topics, in logits.")], 2.0),
    ("no_repeat_ngram_size", Annotated[int, option(STEER, "No n-gram of this size comes twice (0: any may).")], 0),
    (
        "repetition_penalty",
        Annotated[float, option(STEER, "Above 1 discourages tokens that are there already (Keskar et al., 2019).")],
        1.0,
    ),
    ("temperature", Annotated[float | None, option(SAMPLE, "Sample; logits are divided by it.")], None),
    ("top_k", Annotated[int | None, option(SAMPLE, "Sample from the k best tokens.", min=1)], None),
    (
        "top_p",
        Annotated[float | None, option(SAMPLE, "Sample from the fewest tokens with that much probability.")],
        None,
    ),
    (
        "min_p",
        Annotated[float | None, option(SAMPLE, "Sample from tokens with that fraction of the best probability.")],
        None,
    ),
    ("seed", Annotated[int, option(SAMPLE, "The same seed draws the same outputs.")], 0),
    (
        "max_source_length",
        Annotated[int, option(LIMITS, "Most tokens of a line of input; a longer one is an error, never cut.", min=1)],
        1024,
    ),
    (
        "batch_tokens",
        Annotated[int, option(LIMITS, "Most tokens worked on at once, padding included: memory against speed.", min=1)],
        4096,
    ),
]


def with_decoding_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command these options; it gets them all as one dictionary, `settings`."""
    return _with(command, _OPTIONS)


def with_some_decoding_options(
    names: Collection[str], instead: Sequence[tuple[str, Any, Any]]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command the options of these names, some of them with a type, help and default of its own."""
    own = {option[0]: option for option in instead}
    return functools.partial(_with, options=[own.get(option[0], option) for option in _OPTIONS if option[0] in names])


def _with(command: Callable[..., Any], options: Sequence[tuple[str, Any, Any]]) -> Callable[..., Any]:
    def run(**given: Any) -> Any:
        settings = {name: given.pop(name) for name, _, _ in options}
        return command(**given, settings=settings)

    own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "settings"]
    shared = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        for name, kind, default in options
    ]
    own = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
    parameters = [*own[:-1], *shared, own[-1]]  # the backend comes last
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    return run
