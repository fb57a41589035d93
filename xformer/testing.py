"""Checks of an array library: whether Transformers run, train and decode on it, compared with NumPy."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import itertools
import json
import math
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import xformer as xf
from xformer.backends import array_namespace, dtype_name, from_host, resolve, to_host
from xformer.benchmarks.parts import DEFAULTS, VARIANTS, build
from xformer.benchmarks.worker import duration
from xformer.config import check_number
from xformer.errors import BackendError, DataError, check_choice
from xformer.ops.softmax import cross_entropy
from xformer.tracing.rule import RULES, SEQUENCE_RULES

_PACKAGE = Path(__file__).parent
_SIZES: dict[str, Any] = {"d_model": 32, "num_heads": 4, "d_ff": 64}
_VOCAB_SIZE = 13
_STEPS = 20
_DTYPES = {"float16": 0.02, "bfloat16": 0.1, "float64": 1e-12}  # with the tolerance of each
_CAUSES = {  # patterns of the status and the detail of a check
    "Missing functions": r"fails: (AttributeError: (module|the namespace)|NotImplementedError)",
    "Not finished": "fails: not finished",
    "Exceptions": "fails",
    "Wrong dtypes": "differs: dtype",
    "Wrong values": "differs",
    "Missing dtypes (optional)": "lacks",
}


@dataclasses.dataclass(frozen=True)
class Check:
    """The result of one check.

    Attributes:
        group: One of `GROUPS`.
        name: What was computed.
        status: "ok", "differs" from NumPy, "fails" with an exception, or "lacks" a dtype that is optional.
        detail: The largest difference from NumPy, and the times of a part, or the error.
        where: The line of xformer that called the library, if it failed.
        seconds: Time that the check took.
        reproduction: A command that repeats it.
    """

    group: str
    name: str
    status: str
    detail: str
    where: str
    seconds: float
    reproduction: str = ""

    def __str__(self) -> str:
        line = f"{self.status:8} {self.group:10} {self.name:26} {self.detail}".rstrip()
        return f"{line}\n{'':8} at {self.where}" if self.where else line


@dataclasses.dataclass(frozen=True)
class Report:
    """The results of all checks of an array library; `str(report)` is a table.

    Attributes:
        library: Name of the library.
        version: Its version, or "of unknown version".
        missing: Functions of the standard that xformer can differentiate and the library lacks.
        checks: The results.
    """

    library: str
    version: str
    missing: tuple[str, ...]
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """True if all checks pass, without those of the group "dtypes": dtypes other than float32 are optional."""
        return all(check.status == "ok" or check.group == "dtypes" for check in self.checks)

    def to_json(self) -> str:
        """Return the report as JSON."""
        return json.dumps({**dataclasses.asdict(self), "passed": self.passed}, indent=2)

    def to_markdown(self) -> str:
        """Return the failures by cause, each message with a command that repeats it, and the times of all parts."""
        lines = [f"## {self.library}", "", *self.summary().splitlines()]
        failed: dict[str, dict[str, list[Check]]] = {cause: {} for cause in (*_CAUSES, "")}
        for check in self.checks:
            text = f"{check.status}: {check.detail}"
            cause = next((each for each, pattern in _CAUSES.items() if re.match(pattern, text)), "")
            failed[cause].setdefault(check.detail, []).append(check)
        for cause, details in itertools.islice(failed.items(), len(_CAUSES)):
            lines += ["", f"### {cause} ({sum(map(len, details.values()))})", ""] if details else []
            for detail, checks in details.items():
                names = ", ".join(f"`{check.name}` ({check.group})" for check in checks[:4])
                more = f" and {len(checks) - 4} more" if checks[4:] else ""
                lines += [f"- {detail}: {names}{more}", f"  `{checks[0].reproduction}`"]
        timed = [check for check in self.checks if (check.group, check.status) == ("parts", "ok")]
        lines += ["", "### Times", "", "| part | |", "|---|---|"] if timed else []
        lines += [f"| {check.name} | {check.detail} |" for check in timed]
        return "\n".join([*lines, ""])

    def summary(self) -> str:
        """Return the library, what it lacks, and the number of checks that pass."""
        passed = f"{sum(check.status == 'ok' for check in self.checks)} of {len(self.checks)} checks pass"
        missing = f"\nmissing functions: {', '.join(self.missing)}" if self.missing else ""
        return f"{self.library} {self.version}, xformer {xf.__version__}: {passed}{missing}"

    def __str__(self) -> str:
        return "\n".join([*map(str, self.checks), self.summary()])


def check_backend(
    xp: Any,
    *,
    groups: Sequence[str] | None = None,
    time_limit: float | None = None,
    skip_dtypes: Sequence[str] = (),
    on_check: Callable[[Check], None] | None = None,
) -> Report:
    """Run small Transformers on an array library, and compare everything with NumPy.

    Args:
        xp: The library, as a module or by name.
        groups: Groups of checks to run: "forward", "gradients", "training", "decoding", "files", "dtypes" and "other"
            are the default. "functions", "derivatives" and "parts" are small calls and parts of models one by one.
        time_limit: Seconds after which a check is ended, and counts as a failure; only in the main thread, on Unix.
        skip_dtypes: Names of dtypes that are not checked, such as "float64" on a device that cannot compute it.
        on_check: Gets each result as soon as it is there.

    Returns:
        A report; `assert check_backend(xp).passed` is a test.

    Raises:
        BackendError: If the library cannot be used at all: the message names the functions that it lacks.
        ConfigError: For an unknown group or dtype, without a group, or for a time limit that is not above 0.

    Examples:
        >>> report = check_backend("numpy", groups=["forward"])
        >>> report.passed
        True
    """
    results = []
    for _, _, run in checks_of(xp, DEFAULT_GROUPS if groups is None else groups, time_limit, skip_dtypes):
        results.append(run())
        if on_check is not None:
            on_check(results[-1])
    return report_of(xp, results)


def checks_of(
    xp: Any, groups: Sequence[str], time_limit: float | None, skip_dtypes: Sequence[str] = ()
) -> list[tuple[str, str, Callable[[], Check]]]:
    """Return the group, the name and the function of each check; the arguments are those of `check_backend`."""
    groups, skip_dtypes = ((each,) if isinstance(each, str) else tuple(each) for each in (groups, skip_dtypes))
    if time_limit is not None:
        check_number("time_limit", time_limit, above=0, at_most=math.inf)
    for kind, given, known in (("group", groups or (None,), GROUPS), ("skipped dtype", skip_dtypes, _DTYPES)):
        for name in given:
            check_choice(f"the {kind}", name, known)
    library = _Library(resolve(xp))
    return [
        (group, name, functools.partial(_run, library, group, name, functools.partial(function, library), time_limit))
        for group, name, function in _checks()
        if group in groups and not (group == "dtypes" and {*re.findall(r"\w+", name)} & {*skip_dtypes})
    ]


def report_of(xp: Any, checks: Sequence[Check]) -> Report:
    """Return the report on a library with the results of its checks."""
    xp = resolve(xp)
    name = xp.name.removeprefix("array_api_compat.")
    return Report(name, version_of(name), _missing(xp), tuple(checks))


def _run(library: _Library, group: str, name: str, function: Callable[[], Any], time_limit: float | None) -> Check:
    start = time.perf_counter()
    status, detail, where = "ok", "", ""
    try:
        with _time_limit(time_limit):
            excess = function()
        if excess is not None:
            detail = excess if isinstance(excess, str) else f"difference {excess:.1g}"
    except _Difference as difference:
        status, detail = "differs", str(difference)
    except _TimeLimit as limit:
        status, detail, where = "fails", f"not finished after {time_limit:g} s", _caller(limit)
    except Exception as error:  # noqa: BLE001  (libraries raise anything)
        status, detail = "lacks", " ".join(str(error).split())
        if group != "dtypes" or not isinstance(error, BackendError):
            status, detail, where = "fails", f"{type(error).__name__}: {detail}", _caller(error)
    seconds = time.perf_counter() - start
    return Check(group, name, status, detail[:200], where, seconds, _reproduction(library.xp, group, name))


class _Difference(Exception):
    """A result that is not NumPy's."""


class _TimeLimit(BaseException):
    """A check that takes too long; no Exception, so that libraries do not catch it."""


@contextlib.contextmanager
def _time_limit(seconds: float | None) -> Iterator[None]:
    """Raise _TimeLimit after some seconds, as soon as Python code runs."""
    if seconds is None or not hasattr(signal, "setitimer"):
        yield
        return

    def stop(*_: Any) -> None:
        raise _TimeLimit

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, previous)


def _caller(error: BaseException) -> str:
    """Return the last line of xformer in the traceback of an error, but not the one that raises _TimeLimit."""
    frames = [each for each in traceback.extract_tb(error.__traceback__) if each.name != "stop"]
    frame = [each for each in frames if Path(each.filename).is_relative_to(_PACKAGE)][-1]
    return f"{Path(frame.filename).relative_to(_PACKAGE.parent)}:{frame.lineno}: {frame.line}"


def version_of(library: str) -> str:
    """Return the version of the package of a library, given the name of a module of it."""
    root = library.split(".")[0]
    try:
        return importlib.metadata.version(root)
    except importlib.metadata.PackageNotFoundError:  # e.g. that of cupy is cupy-cuda13x
        return str(getattr(sys.modules.get(root), "__version__", "of unknown version"))


def _missing(xp: Any) -> tuple[str, ...]:
    names = {*RULES, *SEQUENCE_RULES} - {"erf", "scatter_add", "getitem", "setitem", "to_device"}
    return tuple(sorted(name for name in names if not re.search(r"operator_|\.", name) and not hasattr(xp, name)))


# --- models and data --------------------------------------------------------------------------------------------------


class _Library:
    """Small models on NumPy and on the library, and batches for them; each is made at its first use."""

    def __init__(self, xp: Any) -> None:
        self.xp = xp
        rng = np.random.default_rng(0)
        self.source = rng.integers(3, _VOCAB_SIZE, (4, 6))
        self.source[1, 4:] = 0
        self.target = np.concatenate([np.ones((4, 1), int), self.source[:, :-1]], axis=1)
        self.batch = self.source, self.target, self.source  # the last one are the labels
        self.prompts = [[int(token) for token in row if token] for row in self.source]

    @functools.cache  # noqa: B019  (a library lives as long as its checks)
    def models(self, kind: str, **options: Any) -> tuple[Any, Any]:
        """Return a model on NumPy, and the same model on the library."""
        model, config, own = _MODELS[kind]
        vocabulary = "source_vocab_size" if kind == "encoder-decoder" else "vocab_size"
        reference = model(config(**{vocabulary: _VOCAB_SIZE, **_SIZES, **own, **options}), seed=0)
        return reference, reference.to(self.xp)

    @functools.cached_property
    def trained(self) -> tuple[Any, Any]:
        """Return a model that copies its input, on NumPy and on the library."""
        model, _ = self.models("encoder-decoder")
        model, _ = _fitted(self, model, xf.Adam(), steps=60, learning_rate=1e-2)
        return model, model.to(self.xp)


_DECODER: dict[str, Any] = {"positions": "rotary", "norm": "rms", "activation": "swiglu", "num_key_value_heads": 2}
_MODELS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "encoder-decoder": (
        xf.Transformer,
        xf.TransformerConfig,
        {"num_encoder_layers": 1, "num_decoder_layers": 1, "target_vocab_size": _VOCAB_SIZE, "dropout": 0.1},
    ),
    "language model": (xf.LanguageModel, xf.LanguageModelConfig, {"num_layers": 2, **_DECODER}),
    "encoder": (xf.Encoder, xf.EncoderConfig, {"num_layers": 2, "activation": "gelu"}),
}


def _fitted(library: _Library, model: Any, optimizer: Any, **options: Any) -> Any:
    num_tokens = int(np.count_nonzero(library.source))
    options = {"learning_rate": 3e-3, "num_tokens": lambda batch: num_tokens, **options}
    return xf.fit(model, _translation_loss, [library.batch], optimizer=optimizer, **options)


def _translation_loss(model: Any, batch: Any, rng: Any) -> Any:
    losses = cross_entropy(model(batch[0], batch[1], rng=rng), batch[2], pad_id=0, label_smoothing=0.1)
    return array_namespace(losses).sum(losses)


def _sum_of_squares(model: Any, batch: Any, rng: Any) -> Any:
    y = model(*batch)
    return array_namespace(y).mean(y * y)


def _compare(value: Any, reference: Any, tolerance: float) -> float:
    """Return the largest difference, relative to the largest value; raise _Difference if it is above a tolerance."""
    value, reference = (np.asarray(to_host(x) if hasattr(x, "dtype") else x, "float64") for x in (value, reference))
    difference = float(np.max(np.abs(value - reference)) / max(1.0, float(np.max(np.abs(reference)))))
    if not difference <= tolerance:
        raise _Difference(f"{difference:.1g} from NumPy, expected at most {tolerance:.0e}")
    return difference


def _equal(value: Any, reference: Any) -> None:
    if value != reference:
        raise _Difference(f"{value} and not {reference}")


# --- checks -----------------------------------------------------------------------------------------------------------


def _checks() -> Iterator[tuple[str, str, Callable[[_Library], Any]]]:
    for kind in _MODELS:
        yield "forward", kind, functools.partial(_forward, kind=kind)
    for positions in ("sinusoidal", "learned", "alibi", "relative"):
        forward = functools.partial(_forward, kind="language model", positions=positions)
        yield "forward", f"{positions} positions", forward
    for kind in _MODELS:
        yield "gradients", kind, functools.partial(_gradients, kind=kind)
    yield "gradients", "second derivative", _second_derivative
    yield "gradients", "dropout", _dropout
    for optimizer in ("SGD", "Adam", "AdamW", "Adafactor", "Muon"):
        yield "training", f"{_STEPS} steps of {optimizer}", functools.partial(_training, optimizer=optimizer)
    yield "decoding", "greedy", _decoding
    yield "decoding", "beam search", functools.partial(_decoding, num_beams=3)
    options: dict[str, Any] = {"do_sample": True, "top_k": 5, "top_p": 0.9, "temperature": 0.7, "rng": xf.Rng(3)}
    yield "decoding", "sampling", functools.partial(_decoding, **options)
    yield "decoding", "stream", _stream
    yield "decoding", "language model", functools.partial(_decoding, kind="language model")
    yield "files", "save and load", _save_and_load
    yield "files", "to NumPy and back", _to_numpy_and_back
    yield "files", "load_pretrained", _load_pretrained
    for dtype, tolerance in _DTYPES.items():
        yield "dtypes", dtype, functools.partial(_dtype, dtype=dtype, tolerance=tolerance)
    for precision in ("float16", "bfloat16"):
        yield "dtypes", f"fit(precision={precision!r})", functools.partial(_precision, precision=precision)
    yield "other", "jit", _jit
    yield "other", "ids out of range", _out_of_range
    for call in _CALLS[0] + _CALLS[1]:
        yield "functions", call, functools.partial(_function, call, False)
    for call in _CALLS[0]:
        yield "derivatives", call, functools.partial(_function, call, True)
    for name in VARIANTS:
        yield "parts", name, functools.partial(_part, name)


def _forward(library: _Library, *, kind: str, **options: Any) -> float:
    reference, model = library.models(kind, **options)
    inputs = (library.source, library.target) if kind == "encoder-decoder" else (library.source,)
    return _compare(model(*inputs), reference(*inputs), 1e-5)


def _gradients(library: _Library, *, kind: str) -> float:
    reference, model = library.models(kind)
    is_translation = kind == "encoder-decoder"
    loss, batch = (_translation_loss, library.batch) if is_translation else (_sum_of_squares, (library.source,))
    gradients = [xf.value_and_grad(loss)(each, batch, None)[1].named_parameters() for each in (model, reference)]
    return max(_compare(g, expected, 1e-4) for (_, g), (_, expected) in zip(*gradients, strict=True))


def _second_derivative(library: _Library) -> float:
    def norm_of_gradient(x: Any) -> Any:
        g = xf.grad(lambda y: array_namespace(y).sum(array_namespace(y).tanh(y) ** 3))(x)
        return array_namespace(g).sum(g * g)

    x = np.asarray([0.3, -0.5], dtype="float32")
    return _compare(xf.grad(norm_of_gradient)(from_host(library.xp, x)), xf.grad(norm_of_gradient)(x), 1e-5)


def _dropout(library: _Library) -> float | None:
    reference, model = library.models("encoder-decoder")
    first, second, other = (_translation_loss(model, library.batch, xf.Rng(seed)) for seed in (0, 0, 1))
    _equal(float(first), float(second))
    if float(first) == float(other):
        raise _Difference("two seeds draw the same masks")
    if library.xp.name in ("cupy", "jax"):  # which draw other masks, on their devices
        return None
    return _compare(first, _translation_loss(reference, library.batch, xf.Rng(0)), 1e-4)


def _training(library: _Library, *, optimizer: str) -> float:
    models = library.models("encoder-decoder", dropout=0.0)
    expected, loss = (_fitted(library, each, getattr(xf, optimizer)(), steps=_STEPS)[1][-1].loss for each in models)
    return _compare(loss, expected, 1e-3)


def _tokens(hypotheses: Any) -> list[list[list[int]]]:
    return [[each.tokens for each in rows] for rows in hypotheses]


def _decoding(library: _Library, *, kind: str = "", **options: Any) -> None:
    reference, model = library.models(kind) if kind else library.trained
    results = [xf.generate(each, library.prompts, max_new_tokens=8, **options) for each in (model, reference)]
    _equal(*map(_tokens, results))


def _stream(library: _Library) -> None:
    reference, model = library.trained
    _equal(*(list(xf.stream(each, library.prompts[:1], max_new_tokens=8)) for each in (model, reference)))


def _same_parameters(model: Any, other: Any) -> None:
    pairs = zip(model.named_parameters(), other.named_parameters(), strict=True)
    if not all(np.array_equal(to_host(a), to_host(b)) for (_, a), (_, b) in pairs):
        raise _Difference("parameters changed")


def _save_and_load(library: _Library) -> None:
    _, model = library.models("encoder-decoder")
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model.safetensors"
        model.save(path)
        _same_parameters(xf.load(path, xp=library.xp), model)


def _to_numpy_and_back(library: _Library) -> None:
    _, model = library.models("encoder-decoder")
    _same_parameters(model.to(np).to(library.xp), model)


def _load_pretrained(library: _Library) -> float:
    options = {"positions": "learned", "max_positions": 32, "activation": "gelu_tanh", "norm": "layer"}
    options |= {"num_key_value_heads": None, "pad_id": None, "scale_embeddings": False}
    reference, _ = library.models("language model", **options)
    with tempfile.TemporaryDirectory() as directory:
        xf.save_pretrained(reference, Path(directory) / "gpt2")
        model: Any = xf.load_pretrained(Path(directory) / "gpt2", xp=library.xp)
        return _compare(model(library.source), reference(library.source), 1e-5)


def _dtype(library: _Library, *, dtype: str, tolerance: float) -> float:
    reference, model = library.models("language model")
    model = model.to(dtype=dtype)
    xf.value_and_grad(_sum_of_squares)(model, (library.source,), None)
    return _compare(model(library.source), reference.to(dtype="float64")(library.source), tolerance)


def _precision(library: _Library, *, precision: str) -> None:
    _, model = library.models("encoder-decoder")
    _, history = _fitted(library, model, xf.AdamW(), steps=5, precision=precision)
    if not math.isfinite(history[-1].loss):
        raise _Difference(f"the loss is {history[-1].loss}")


def _jit(library: _Library) -> float:
    reference, model = library.models("encoder-decoder")
    source, target = (from_host(library.xp, each) for each in (library.source, library.target))
    result = xf.jit(lambda source, target: model(source, target))(source, target)
    return _compare(result, reference(library.source, library.target), 1e-5)


def _out_of_range(library: _Library) -> None:
    _, model = library.models("encoder-decoder")
    with contextlib.suppress(DataError):
        model(library.source + 100, library.target)
        raise _Difference("ids from NumPy that exceed the vocabulary are not refused")


# --- functions and parts ----------------------------------------------------------------------------------------------

_INPUTS = {
    "x": "xp.asarray([[0.5, -1.5, 2.0], [1.0, 0.25, -0.75]], dtype=xp.float32)",
    "y": "xp.asarray([[2.0, 0.5, 1.5], [0.25, 3.0, 1.0]], dtype=xp.float32)",
    "i": "xp.asarray([1, 0])",
    "b": "xp.asarray([[True, False, True], [False, True, True]])",
}
# One call of each function: those with a derivative, then the others.
_CALLS = [
    re.sub(r"([a-z][\w.]*)\(", r"xp.\1(", text).splitlines()
    for text in (_PACKAGE / "standard_calls.txt").read_text(encoding="utf-8").split("\n\n")
]
_PART_SIZES = {"batch": 2, "length": 16, "heads": 2, "head_dim": 8, "layers": 1, "vocabulary": 50}


def _program(name: str, is_gradient: bool) -> tuple[str, str]:
    """Return the statements that make the arrays of a call, and the call or its gradient."""
    inputs = [f"{each} = {code}" for each, code in _INPUTS.items() if re.search(rf"\b{each}\b", name)]
    x = "x" if re.search(r"\bx\b", name) else "y"
    gradient = f"xf.grad(lambda {x}: (xp := xf.array_namespace({x})).sum(({name}) ** 2))({x})"
    return "; ".join(inputs), gradient if is_gradient else name


def _function(name: str, is_gradient: bool, library: _Library) -> float:
    inputs, call = _program(name, is_gradient)
    scopes: list[dict[str, Any]] = [{"xp": xp, "xf": xf} for xp in (library.xp, resolve("numpy"))]
    for scope in scopes:
        exec(inputs, scope)
    value, expected = (eval(call, scope) for scope in scopes)
    if isinstance(expected, tuple) and not isinstance(value, tuple):
        raise _Difference(f"returns a {type(value).__name__}, expected a tuple")
    values, references = (each if isinstance(expected, tuple) else (each,) for each in (value, expected))
    for fact in ("dtype", "shape"):
        own, theirs = ([_fact(each, fact) for each in arrays] for arrays in (values, references))
        if own != theirs:
            raise _Difference(f"{fact} {', '.join(own)}, expected {', '.join(theirs)}")
    return max(map(_compare, values, references, itertools.repeat(1e-5)))


def _fact(value: Any, name: str) -> str:
    fact = getattr(value, name, name)
    return str(tuple(fact)) if name == "shape" else re.sub("^int.*", "int", dtype_name(fact))  # indices: of any size


def _part(name: str, library: _Library) -> str:
    part, _, backward = name.partition(", ")
    fingerprints, times = [], []
    for backend in (library.xp, "numpy"):
        computation = build({**DEFAULTS, **_PART_SIZES, "part": part, "backward": bool(backward), "backend": backend})
        with computation.context():
            fingerprints.append(computation.fingerprint(computation.step(0)))
            times.append(min(duration(computation, 1, 1) for _ in range(5)))
    difference, (own, numpy) = max(_compare(a, b, 1e-4) for a, b in zip(*fingerprints, strict=True)), times
    return f"difference {difference:.1g}, {1e3 * own:.2f} ms, {own / numpy:.2f} times NumPy's"


def _reproduction(xp: Any, group: str, name: str) -> str:
    """Return a command that repeats a check."""
    if group not in ("functions", "derivatives"):
        return f"xformer check-backend {xp.name.removeprefix('array_api_compat.')} --group {group}"
    inputs, call = _program(name, group == "derivatives")
    imports = f"import {xp.module.__name__} as xp{', xformer as xf' if group == 'derivatives' else ''}"
    return f'python -c "{imports}; {inputs}{"; " if inputs else ""}print({call})"'


GROUPS = tuple(dict.fromkeys(group for group, _, _ in _checks()))
DEFAULT_GROUPS = tuple(group for group in GROUPS if group not in ("functions", "derivatives", "parts"))
