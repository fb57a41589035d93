"""Options shared by several commands, and the backend."""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field
from pathlib import Path
from types import GenericAlias, MappingProxyType
from typing import Annotated, Any

import typer

from xformer.backends import BACKENDS
from xformer.config import Config, check_keys, check_value, field_names, option, options_of
from xformer.errors import ConfigError
from xformer.families.checkpoint import check_exists
from xformer.generation import GenerationConfig
from xformer.native import use_reproducible_algorithms

DATA, RECIPE, COMPUTING = "Files", "Recipe", "Computing"
_TYPES: dict[str, Any] = {each.__name__: each for each in (int, float, bool, str)}
_TYPES |= {f"tuple[{each.__name__}, ...]": GenericAlias(list, each) for each in (int, float, str)}
BACKEND_HELP = f"Array library to compute with: {', '.join(BACKENDS)}."
_METAVARS = {"tuple[str, ...]": "TEXT", "tuple[int, ...]": "N", "tuple[float, ...]": "X"}


def check_utf8(value: Any) -> Any:
    """Return the value of an option; raise BadParameter for bytes that are not UTF-8."""
    for text in value if isinstance(value, list) else [value]:
        try:
            str(text).encode()
        except UnicodeEncodeError:  # Python keeps such bytes of the command line as lone surrogates
            raise typer.BadParameter("expected UTF-8 text") from None
    return value


def value_option(name: str, metavar: str | None, help: str, panel: str | None = DATA, **settings: Any) -> Any:
    """Return an option with a value, which help shows as `metavar`; settings are further ones of `typer.Option`."""
    return typer.Option(name, metavar=metavar, help=help, rich_help_panel=panel, **settings)


def flag(name: str, help: str) -> Any:
    """Return an option without a value."""
    return typer.Option(name, help=help)


def argument(metavar: str, help: str) -> Any:
    """Return an argument, whose default help does not show."""
    return typer.Argument(metavar=metavar, help=help, show_default=False)


def file_option(name: str, help: str, panel: str | None = DATA) -> Any:
    """Return an option that names a text file."""
    return value_option(name, "FILE", help, panel)


def _model_option(help: str, name: str = "--model") -> Any:
    def check(path: Path | None) -> Path | None:
        if path is not None:
            check_exists(path)  # before any input is read
        return path

    return value_option(name, "DIR", help, callback=check)


ModelOption = Annotated[Path, _model_option("Directory of a run or public checkpoint, or a .gguf file.")]
_DRAFT_HELP = "Smaller model with the same vocabulary that proposes tokens: the same outputs in fewer steps."
DraftModelOption = Annotated[Path | None, _model_option(_DRAFT_HELP, "--draft-model")]
CheckpointOption = Annotated[Path, _model_option("Directory of a public checkpoint.")]
OutOption = Annotated[Path, value_option("--out", "DIR", "Directory of the run: new or empty.")]
_SET_HELP = "Any other field of GenerationConfig, e.g. coverage_penalty=0.2; repeatable."
SetOption = Annotated[list[str] | None, value_option("--set", "NAME=VALUE", _SET_HELP, "Advanced", callback=check_utf8)]


class CommonOptions(Config):
    """Options of several commands.

    Args:
        init: Start from the model and the tokenizer of a public checkpoint, a GGUF file or a run.
        recipe: Settings of model, tokenizer and training.
        task: Task; for summarization the source is one document per line and the target its summary.
        set: Any other setting of the recipe, e.g. training.warmup_steps=4000; repeatable.
        logger: Also log scalars, samples and attention to this tool; repeatable. `xformer resume` continues the log.
        quantize: Store weights in 8 or 16 bits: less memory, and faster on NumPy; int8_inputs: keep the blocks of a
            GGUF file, and multiply them by inputs in 8 bits.
        distributed: Train with all processes that mpiexec has started; nccl: with one NVIDIA GPU each.
        reproducible: Give float32 on NumPy the same bits in any batch, for any number of threads and processor.
    """

    init: str | None = option(default=None, metavar="PATH", panel=DATA)
    recipe: str | None = option(default=None, metavar="FILE.toml", panel=RECIPE)
    task: str = option(default="translation", metavar="translation|summarization")
    set: tuple[str, ...] = option(default=(), metavar="TABLE.NAME=VALUE")
    logger: tuple[str, ...] = option(default=(), metavar="tensorboard|mlflow|wandb", panel="Validation and checkpoints")
    quantize: str | None = option(default=None, choices=("int8", "bfloat16", "int8_inputs"), panel=COMPUTING)
    distributed: str | None = option(default=None, choices=("mpi", "nccl"))
    backend: str = option(BACKEND_HELP, default="numpy", metavar="NAME")
    reproducible: bool = option(default=False)


# Options that a command receives as a dictionary, by the name of its parameter.
GROUPS: dict[str, tuple[str, ...]] = {
    "loading": ("backend", "quantize"),
    "resuming": ("logger", "distributed"),
    "training": ("init", "recipe", "set", "logger", "distributed", "backend"),
}


def option_name(name: str) -> str:
    """Return the option of a setting.

    Examples:
        >>> option_name("max_steps")
        '--max-steps'
    """
    return f"--{name.replace('_', '-')}"


def config_options(
    *configs: type[Config],
    names: Sequence[str] = (),
    default_of: str = "",
    variants: Mapping[str, type[Config]] = MappingProxyType({}),
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that gives a command options for fields of configurations, in place of its `settings`.

    The command receives, as `settings`, a dictionary of the fields that were given; with `GenerationConfig`, also those
    of --set. Help, choices and panels are the metadata of the fields. A parameter of the name of one of `GROUPS` is a
    dictionary of its options. Commands with --backend also have --reproducible.

    Args:
        *configs: Configurations with the fields.
        names: Names of the fields, in order.
        default_of: Source of the defaults, named before the default of the field, e.g. "the recipe's".
        variants: Configurations with other defaults or fields, by the words that say when they apply.
    """
    every = (*variants.values(), CommonOptions, *configs)
    declared = {option[0]: option for config in every for option in options_of(config)}

    def defaults_of(name: str, origin: str) -> list[str]:
        """Return the defaults of a field, as the help shows them."""
        default = declared[name][-1].default
        own = [] if default in (None, False, ()) else [f"{'or ' if origin else ''}{default}"]
        others = [
            f"{getattr(config, name)} {condition}"
            for condition, config in variants.items()
            if getattr(config, name, default) != default
        ]
        return [*([origin] if origin else []), *own, *others]

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        def run(**values: Any) -> Any:
            given = {name: value for name, value in values.items() if name in offered and value not in (None, [])}
            for name, value in given.items():
                check_value(declared[name][-1], value, option_name(name))
            if given.get("reproducible"):
                use_reproducible_algorithms()  # also for processes that this one starts
            arguments = {name: value for name, value in values.items() if name in own}
            for group in own.keys() & GROUPS:
                arguments[group] = {name: given.get(name, declared[name][-1].default) for name in GROUPS[group]}
            if "settings" in own:
                arguments["settings"] = settings = {name: given[name] for name in names if name in given}
            if GenerationConfig in configs:
                assigned = parse_assignments(values["assignments"])
                check_keys(assigned, field_names(GenerationConfig), "--set")
                settings |= assigned
            return command(**arguments)

        own = inspect.signature(command, eval_str=True).parameters
        parameters: list[inspect.Parameter] = []
        for name, parameter in own.items():
            if name in (*GROUPS, "settings"):
                origin = default_of if name == "settings" else ""
                fields = GROUPS.get(name, names)
                parameters += [_parameter(*declared[each], defaults_of(each, origin)) for each in fields]
            else:
                parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
        offered = {parameter.name for parameter in parameters} - own.keys()
        if "backend" in {parameter.name for parameter in parameters} and "reproducible" not in offered:
            parameters.append(_parameter(*declared["reproducible"], []))
            offered.add("reproducible")
        parameters += [_keyword("assignments", SetOption)] if GenerationConfig in configs else []
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


def _parameter(name: str, type_name: str, panel: str, field: Field[Any], defaults: Sequence[str]) -> inspect.Parameter:
    """Return the parameter of a command for a field; its value is None if the option is not given."""
    metadata, flags = field.metadata, option_name(name)
    note = f" \\[default: {', '.join(defaults)}]" if defaults else ""
    if type_name == "bool" and defaults:
        flags = f"{flags}/--no-{flags.removeprefix('--')}"
    metavar = "|".join(metadata["choices"] or ()) or metadata["metavar"] or _METAVARS.get(type_name)
    option = value_option(flags, metavar, f"{metadata['help']}{note}", panel or RECIPE, callback=check_utf8)
    return _keyword(name, Annotated[_TYPES[type_name] | None, option])


def _keyword(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def parse_assignments(assignments: Sequence[str] | None) -> dict[str, Any]:
    """Parse the values of --set, which are written as in TOML; quotes may be omitted.

    Examples:
        >>> parse_assignments(["training.batch_tokens=512", "model.activation=gelu"])
        {'training.batch_tokens': 512, 'model.activation': 'gelu'}
    """
    values: dict[str, Any] = {}
    for assignment in assignments or []:
        name, equals, text = assignment.partition("=")
        if not equals or not name.strip():
            raise ConfigError(f"--set is {assignment!r}; expected NAME=VALUE")
        try:
            values[name.strip()] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            values[name.strip()] = text
    return values


def parse_recipe_overrides(assignments: Sequence[str] | None) -> dict[str, dict[str, Any]]:
    """Parse the values of --set for a recipe, by table; raise ConfigError unless each names a table."""
    overrides: dict[str, dict[str, Any]] = {}
    for name, value in parse_assignments(assignments).items():
        table, _, key = name.partition(".")
        if not key:
            raise ConfigError(f"--set is '{name}={value}'; expected TABLE.NAME=VALUE, e.g. training.batch_tokens=4096")
        overrides.setdefault(table, {})[key] = value
    return overrides


def launch_arguments(settings: dict[str, Any], training: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `xformer.train` or `train_lm` for the options of a command.

    Args:
        settings: Settings of the recipe; those of --set override them.
        training: The group "training".
    """
    tables = parse_recipe_overrides(training["set"])
    if training["init"] is not None:
        tables["init"] = {**tables.get("init", {}), "path": training["init"]}
    shared = {name: training[name] for name in ("recipe", "distributed")}
    return {**shared, "xp": training["backend"], "loggers": training["logger"], **settings, **tables}
