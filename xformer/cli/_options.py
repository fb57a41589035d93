"""Options shared by several commands, and the backend."""

from __future__ import annotations

import functools
import inspect
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from xformer.backends import BACKENDS, backend_of, resolve
from xformer.config import check_value, options_of
from xformer.errors import BackendError, ConfigError
from xformer.kernels.registry import load
from xformer.threads import disable_malloc_trim, num_threads
from xformer.training.precision import check_precision

DATA, DURATION, RECIPE, COMPUTING = "Data", "Duration", "Recipe", "Computing"
SEARCH, LENGTH, STEER, SAMPLE, LIMITS = "Search", "Length of the output", "Steering", "Sampling", "Limits"
_BACKEND_HELP = f"Array library to compute with: {', '.join(BACKENDS)}"

BackendOption = Annotated[
    str, typer.Option("--backend", metavar="NAME", help=f"{_BACKEND_HELP}.", rich_help_panel=COMPUTING)
]
OptionalBackendOption = Annotated[
    str | None,
    typer.Option("--backend", metavar="NAME", help=f"{_BACKEND_HELP} (default: the run's).", rich_help_panel=COMPUTING),
]
ModelOption = Annotated[
    Path, typer.Option("--model", metavar="DIR", help="Directory of a training run.", rich_help_panel=DATA)
]
OutOption = Annotated[
    Path, typer.Option("--out", metavar="DIR", help="Directory of the run: new or empty.", rich_help_panel=DATA)
]
MaxMinutesOption = Annotated[
    float | None,
    typer.Option(
        help="Stop after this many minutes in total, validation included (default: the recipe's; 30 if no limit is "
        "set).",
        rich_help_panel=DURATION,
    ),
]
MaxUpdatesOption = Annotated[
    int | None,
    typer.Option(
        help="Stop after this many updates (default: the recipe's). The cosine and linear schedules end there, so "
        "changing it changes the learning rates.",
        rich_help_panel=DURATION,
    ),
]
RecipeOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE.toml", help="Settings of model, tokenizer and training.", rich_help_panel=RECIPE),
]
SeedOption = Annotated[
    int | None,
    typer.Option(
        help="Seed; the same seed gives the same model, to the bit, on the same machine (default: the recipe's, or 0).",
        rich_help_panel=RECIPE,
    ),
]
SetRecipeOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="TABLE.NAME=VALUE",
        help="Override any setting of the recipe, e.g. model.num_heads=8; repeatable.",
        rich_help_panel=RECIPE,
    ),
]
DtypeOption = Annotated[
    str | None,
    typer.Option(
        metavar="float32|float64",
        help="Data type of the parameters (default: the recipe's, or float32).",
        rich_help_panel=COMPUTING,
    ),
]
PrecisionOption = Annotated[
    str | None,
    typer.Option(
        metavar="bfloat16|float16|float32",
        help="Mixed precision: compute forward and backward in 16 bits and keep the parameters in float32; float32 "
        "turns it off. Useful on hardware with fast 16-bit arithmetic (default: the recipe's, or float32).",
        rich_help_panel=COMPUTING,
    ),
]


def file_option(name: str, help: str) -> Any:
    """Return an option that names a text file."""
    return typer.Option(name, metavar="FILE", help=help, rich_help_panel=DATA)


def option_name(name: str) -> str:
    """Return the option of a setting.

    >>> option_name("max_updates")
    '--max-updates'
    """
    return f"--{name.replace('_', '-')}"


def check_options(options: Mapping[str, Any]) -> None:
    """Raise ConfigError, naming the option, for an invalid value of a training setting; None is always valid."""
    from xformer.runs.tasks import TASKS

    fields = {name: field for spec in TASKS.values() for name, _, field in options_of(spec.training)}
    for name, value in options.items():
        if name in fields and value is not None:
            check_value(fields[name], value, option_name(name))


def parse_assignments(assignments: Sequence[str] | None) -> dict[str, Any]:
    """Parse the values of --set, which are written as in TOML; quotes may be omitted.

    >>> parse_assignments(["training.batch_tokens=512", "model.activation=gelu", "top_k=3"])
    {'training': {'batch_tokens': 512}, 'model': {'activation': 'gelu'}, 'top_k': 3}
    """
    values: dict[str, Any] = {}
    for assignment in assignments or []:
        name, equals, text = assignment.partition("=")
        if not equals or not name.strip():
            raise ConfigError(f"--set is {assignment!r}; expected NAME=VALUE")
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text
        table, dot, key = name.strip().partition(".")
        if dot:
            values.setdefault(table, {})[key] = value
        else:
            values[table] = value
    return values


def parse_recipe_overrides(assignments: Sequence[str] | None) -> dict[str, dict[str, Any]]:
    """Parse the values of --set for a recipe; raises ConfigError unless each names a table."""
    values = parse_assignments(assignments)
    for name, value in values.items():
        if not isinstance(value, dict):
            raise ConfigError(f"--set is '{name}={value}'; expected TABLE.NAME=VALUE, e.g. training.batch_tokens=4096")
    return values


def open_backend(name: str, dtype: str | None = None, precision: str = "float32") -> Any:
    """Return the namespace of an array library and prepare the process for computing with it.

    Args:
        name: Name of the library.
        dtype: Data type of the model, if known.
        precision: Precision of training.

    Raises:
        BackendError: If the library is unknown, not installed, finds no device, or does not support the precision.
        ConfigError: If XFORMER_KERNELS, XFORMER_CHECK_KERNELS or XFORMER_NUM_THREADS is invalid.
    """
    xp = resolve(name)
    disable_malloc_trim()
    backend_of(xp).configure(dtype=dtype, num_threads=num_threads())
    try:
        array = xp.zeros(1, dtype=xp.float32)
    except (RuntimeError, OSError) as error:
        # A library without a usable device fails at the first array.
        reason = " ".join(str(error).split())
        raise BackendError(f"backend {name!r} is installed but cannot compute here: {reason}") from error
    check_precision(precision, array)
    load(xp)
    num_threads()
    return xp


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

# Name, type with its help, default; the names are those of GenerationConfig and of the arguments of the pipelines.
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
        "min_new_tokens",
        Annotated[int, option(LENGTH, f"Fewest tokens. {_WINS}")],
        0,
    ),
    (
        "max_new_tokens",
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
        "target_length",
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
        Annotated[str, option(LENGTH, "What --target-length counts.", metavar="tokens|words")],
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
        Annotated[float, option(LENGTH, "How far from --target-length an output may be, as a fraction of it.")],
        0.1,
    ),
    (
        "prefix",
        Annotated[str | None, option(STEER, "What every output begins with.", metavar="TEXT", callback=utf8)],
        None,
    ),
    (
        "sequence_bias",
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
    ("sequence_bias_strength", Annotated[float, option(STEER, "How much to favor topics, in logits.")], 2.0),
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
