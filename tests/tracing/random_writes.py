"""Random programs that write in place: eager execution and central differences are the truth for every transformation.

A program is the text of a Python function: in-place operators, assignments, aliases, views, containers, helpers that
write, and plain buffers that are used again. It is written statement by statement, from templates whose names and keys
are random; each is first executed eagerly, and left out if it fails. `check` compares the transformations with the
eager function.
"""

from __future__ import annotations

import functools
import math
import random
import re
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import xformer as xf
from xformer.backends import array_namespace, is_floating, resolve
from xformer.errors import XformerError

MAX_SIZE, MAX_VALUE = 48, 100.0
EAGER_ERRORS = (TypeError, ValueError, RuntimeError, IndexError, AttributeError)
# Restrictions of jit that its documentation names, whether or not the function writes.
DOCUMENTED = r"boolean array|depends on values"

HELPERS = """\
class Box:
    def __init__(self, h):
        self.h = h

    def add(self, b):
        self.h += b


def add(a, b):
    a += b


def scale(a, b):
    a *= b
    return a


def put(a, key, b):
    a[key] = b


def add_to_rows(a, b):
    for row in a:
        row += b


def halve_after(a, b):
    c = a
    c -= b
    a *= 0.5
    return c


def swap(a):
    a[0], a[-1] = a[-1], a[0]
"""

# What may stand for a part of a template. Other parts are names of arrays: f, i and b of floats, integers and booleans
# that may be traced; p, j and q of plain ones; w of floats to write into; v and u are new names of either.
PARTS = {
    "o": ["0.5", "2.0", "-1.5", "3", "W", "W2", "{p}", "{i}", *["{f}"] * 9, "{f} * 0.5", "({f} + 1.0)", "xp.sin({f})",
          "xp.tanh({f})", "{f} * {f}", "xp.flip({f})", "{f}[0]", "{f}[..., :1]", "{f}[1:]", "xp.sum({f})",
          "xp.max({f})", "xp.mean({f}, axis=0)", "{f}[..., 0]", "xp.reshape({f}, (-1,))", "{f}[:].mT"],
    "k": ["0", "-1", "1:", ":-1", "::2", "1::2", ":2", "...", "0:1", "0, 1:", ":, 0", "1:, ::2", "..., 0", ":, [0, 1]",
          "0, 0", "-1, :", ":, -1", "[0, 1]", "[1, 0]", "[1, 1]", "I", "M", "{i}", "{j}", "{f} > 0.7",
          "xp.argsort({f}[..., 0])[:2]", "xp.argsort({f})[:2]", "::-1", "::-2", "-1:0:-1", "-2::-1"],
    "m": ["M", "{b}", "{q}", "({f} > 0.5)"],
    "n": ["I", "n", "{i}", "{j}"],
}  # fmt: skip
NEW = [
    *(f"xp.{name}({{f}})" for name in ("sin", "tanh", "cos", "square", "abs", "atan", "negative", "zeros_like")),
    *("{f} * {o}", "{f} + {o}", "{f} - {o}", "{o} * {f}", "{o} - {f}", "xp.multiply({f}, {o})", "xp.maximum({f}, {o})"),
    *("xp.where({f} > 0.9, {f}, {o})", "{f} / ({f} * {f} + 0.5)", "{f} ** 2", "xp.sqrt(xp.square({f}) + 1.0)"),
    *("xp.stack([{f}, {f}])", "xp.asarray({f}, copy=True)", "xp.zeros(3)", "xp.full((2, 3), 0.5)", "{f} @ {f}"),
    *("xp.where({m}, {f}, {o})", "xp.clip({f}, 0.2, 1.3)", "xp.exp(xp.tanh({f}))", "xp.sort({f})", "{f} @ W2"),
    *("xp.sum({f}, axis=0)", "xp.mean({f}, axis=-1)", "xp.cumulative_sum({f}, axis=-1)", "xp.concat([{f}, {f}])"),
    *("xp.roll({f}, 1)", "xp.tile({f}, (2,))", "xp.repeat({f}, 2)", "xp.diff({f})", "xp.take({f}, {n}, axis=-1)"),
]
SCALARS = ["xp.sum({f})", "xp.max({f})", "{f}[0]", "xp.mean({f})", "xp.asarray(0.5)", "{f}[()]", "xp.zeros(())"]
VIEWS = [
    *["{f}[{k}]"] * 4, "{i}[{k}]", "xp.reshape({f}, (-1,))", "xp.flip({f})", "xp.expand_dims({f}, axis=-1)",
    "{f}[None]", "{f}[..., None]", "xp.permute_dims({f}, (1, 0))", "xp.matrix_transpose({f})", "{f}[:].mT", "[*{f}][1]",
    "xp.moveaxis({f}, 0, -1)", "xp.squeeze({f}, axis=0)", "xp.unstack({f})[-1]", "xp.unstack({f})[0]",
    "xp.broadcast_to({f}, (2, 3, 3))",
]  # fmt: skip
ALIASES = [
    "{f}",
    "{f}",
    "xp.asarray({f})",
    "xp.astype({f}, {f}.dtype, copy=False)",
    "+{f}",
    "xp.clip({f})",
    "{i}",
    "{b}",
]
INTEGERS = ["n + 1", "n * 2", "n % 2", "xp.argsort({f})", "xp.astype({f} * 3.0, xp.int64)", "{f} > 0.8", "{f} < 1.1"]
ROWS = ["for row in {w}:\n    row += {o}", "for row in xp.unstack({w}):\n    row *= {o}", "add_to_rows({w}, {o})"]
ROWS += ["for i, row in enumerate({w}):\n    row[...] = {o}", "for i in range(3):\n    {w}[i] += {o}", "swap({w})"]
PLAIN = ["lib.zeros(3)", "lib.ones((3, 3))", "lib.asarray([0.5, -1.5, 1.0])", "lib.asarray([0, 2, 1])", "{p}[::2]"]
PLAIN += ["lib.zeros(3) > 1.0", "lib.asarray([True, False, True])", "{p}[1:]", "{p}[...]", "{p}"]
LOOPS = [
    ("lib.zeros(3)", "[...] = k + 1", "{f} * {u}"), ("lib.zeros((3, 3))", "[...] = 0.5 * k", "xp.sum({f} @ {u})"),
    ("lib.zeros(3)", " += 0.5", "{f} * {f} * {u}"), ("lib.zeros(3)", "[1:] = k", "xp.where({u} > 0.5, {f}, 0.5)"),
    ("lib.zeros(3) > 1.0", "[0] = k > 0", "xp.where({u}, {f}, 0.5)"),
    ("lib.asarray([0, 0])", "[...] = k % 3", "xp.sum(xp.take({f}, {u}, axis=-1))"),
]  # fmt: skip
# Groups of templates with their weights.
STATEMENTS: dict[str, tuple[int, list[str]]] = {
    "new": (16, [f"{{v}} = {form}" for form in NEW]),
    "scalars": (3, [f"{{v}} = {form}" for form in SCALARS]),
    "views": (16, [f"{{v}} = {form}" for form in VIEWS]),
    "aliases": (6, [f"{{v}} = {form}" for form in ALIASES]),
    "integers": (5, [f"{{v}} = {form}" for form in INTEGERS]),
    "containers": (4, [
        "c{v} = [{f}, {f}]\n{v} = c{v}[1]", 'c{v} = {"k": {f}, "l": {f}}\n{v} = c{v}["l"]', "{v} = list({f})[-1]",
        "c{v} = Box({f})\n{v} = c{v}.h",
    ]),
    "in place": (20, [
        *["{w} += {o}", "{w} -= {o}", "{w} *= {o}"] * 2, "{w} /= ({o} * {o} + 0.6)", "{w} **= 2", "{w} **= 3",
        "{w} //= 1.3", "{w} %= 0.7", "{w} @= W2", "{w} += {w}",
    ]),
    "items": (18, ["{w}[{k}] = {o}", "{w}[{k}] = {o}", "{w}[{k}] += {o}", "{w}[{k}] *= {o}"]),
    "helpers": (8, [
        "add({w}, {o})", "{v} = scale({w}, {o})", "put({w}, -1, {o})", "{v} = halve_after({w}, {o})",
        "add({w}[{k}], {o})",
        "c{v} = Box({w})\nc{v}.add({o})", "def {v}f(a):\n    a += {o}\n\n{v}f({w})",
        "for each in [{w}, {w}]:\n    each += {o}",
    ]),
    "rows": (5, ROWS),
    "integers in place": (6, [f"{{i}} {o}= {{n}}" for o in ("+", "-", "*", "&", "|", "^")] + [
        "{i} //= 2", "{i} %= 3", "{i} <<= 1", "{i} >>= 1", "{i} **= 2", "{i}[{k}] = {i}",
    ]),
    "booleans in place": (4, ["{b} &= {m}", "{b} |= {m}", "{b} ^= {m}"]),
    "plain": (6, [f"{{u}} = {form}" for form in PLAIN]),
    "plain in place": (8, [
        "{p}[...] = 0.5", "{p}[{k}] = 2.0", "{p} += {p}", "{p} *= -0.5", "add({p}, 0.25)", "{j}[...] = xp.flip({j})",
        "{j}[0] = 1", "{j} ^= 1", "{q}[...] = ~{q}", "{q} ^= True", "{q}[{k}] = True", "np.multiply({p}, 2.0, out={p})",
        "{p}.fill(0.7)", "{p}.mul_(0.5)",
    ]),
    "plain operands": (9, [
        *("{w} += {p}", "{w} *= {p}", "{w}[...] = {p}", "{w}[0] = {p}[0]", "{w}[{j}] += 1.0", "{w}[{q}] *= 2.0"),
        *("{v} = {f} * {p}", "{v} = {p} - {f}", "{v} = {f} @ {p}", "{v} = xp.where({f} > {p}, {f}, {p})"),
        *("{v} = xp.stack([{f}, {p}])", "{v} = {f}[..., {j}]", "{v} = xp.where(~{q}, {f}, {o})", "{v} = {f} * {q}"),
    ]),
    "loops": (3, [f"{{u}} = {start}\n{{v}} = {{f}} * 0.5\nfor k in range(3):\n    {{u}}{fill}\n    {{v}} {assign} {use}"
                  for start, fill, use in LOOPS for assign in ("+=", "= {v} +")]),
}  # fmt: skip
OVERLAPS = [  # torch leaves their results open
    *("{w}[1:] = {f}[:-1]", "{w}[:-1] += {f}[1:]", "{w}[...] = xp.flip({f})", "{w}[[0, 1]] = {f}[[1, 0]]"),
    *("{w}[...] = {f}[::-1]", "{w}[::-1] *= {f}", "{w} += {f}[::-1]", "{w}[:, 1:] = {f}[:, :-1]", "{w}[0] = {f}[:, 0]"),
    *("{w}[...] = {f}[:].mT", "{w} += {f}[:].mT", "{w} *= {f}[0]", "{w} -= {f}[..., :1]"),
]


class Program(NamedTuple):
    """The statements and outputs of a function of `x` and `y`, of which derivatives are taken, and integers `n`."""

    library: str
    inputs: tuple[Any, Any, Any]
    body: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def text(self) -> str:
        lines = ["global OUT", "xp = xf.array_namespace(x)", *"\n".join(self.body).splitlines()]
        lines.append(f"return [{', '.join(self.outputs)}]")
        return "def program(x, y, n):\n" + "\n".join(f"    {line}" for line in lines) + "\n"

    def build(self) -> dict[str, Any]:
        """Return a new module with the function and its constants; it may overwrite `OUT`."""
        xp, generator = resolve(self.library), np.random.default_rng(2)
        constants = {"W": generator.uniform(-1.5, 1.5, 3), "W2": generator.uniform(-1.5, 1.5, (3, 3))}
        constants |= {"I": np.asarray([2, 0]), "M": np.asarray([True, False, True]), "OUT": np.zeros(3)}
        module = {"np": np, "xf": xf, "lib": xp} | {name: xp.asarray(value) for name, value in constants.items()}
        exec(HELPERS + self.text, module)
        return module

    def arguments(self, number: int = 0, step: float = 0.0) -> list[Any]:
        """Return new arrays: for a call, and moved along the direction of the derivative."""
        scale = np.random.default_rng(number).uniform(0.8, 1.2) if number else 1.0
        values = [scale * value + step * v for value, v in zip(self.inputs, directions(self), strict=False)]
        return [
            resolve(self.library).asarray(value) for value in (*values, self.inputs[2][:: -1 if number else 1].copy())
        ]


def directions(program: Program) -> list[Any]:
    generator = np.random.default_rng(1)
    return [generator.standard_normal(x.shape) for x in program.inputs[:2]]


def host(value: Any) -> Any:
    """Return a copy on the host."""
    return np.array(value.detach().numpy() if hasattr(value, "detach") else value)


def kind_of(name: str, value: Any) -> str:
    """Return the part of a template that an array stands for."""
    kind = host(value).dtype.kind
    return {"f": "p", "i": "j", "b": "q"}[kind] if name[0] in "uO" else kind


def is_small(value: Any) -> bool:
    values = host(value)
    return 0 < values.size <= MAX_SIZE and values.ndim <= 4 and bool(np.all(np.abs(values * 1.0) < MAX_VALUE))


class Writer:
    """Writes a random program; `kinds` are those of all arrays so far. It may write into `x` if `donates`."""

    def __init__(self, seed: str, library: str) -> None:
        self.random, self.library, self.kinds = random.Random(seed), library, {"x": "f", "y": "f", "n": "i"}
        self.donates = self.random.random() < 0.1
        shapes = self.random.choices([(3,), (3, 3), (2, 3), (2, 2, 3), (1, 3), ()], (6, 4, 4, 1, 1, 1), k=2)
        generator = np.random.default_rng(self.random.randrange(2**32))
        first, second = (generator.uniform(0.3, 1.7, shape) for shape in shapes)
        self.inputs, self.body = (first, second, generator.integers(0, 3, 3)), list[str]()
        groups = STATEMENTS | ({} if library == "torch" else {"overlaps": (8, OVERLAPS)})
        self.templates, self.weights = (
            [group for _, group in groups.values()],
            [weight for weight, _ in groups.values()],
        )
        if self.random.random() < 0.2:
            self.body, self.kinds["OUT"] = ["OUT[...] = 1.5"], "p"
        self.restart()

    def write(self) -> Program:
        length = self.random.randrange(4, 14)
        while len(self.body) < length or all(re.match(r"[cuv]+\d+ = |OUT", line) for line in self.body):
            self.attempt(self.random.choice(self.random.choices(self.templates, self.weights)[0]))
        names = [name for name in self.kinds if name != "OUT"]
        outputs = [name for name in names if self.random.random() < 0.8] or names[-1:]
        return Program(self.library, self.inputs, tuple(self.body), tuple(outputs))

    def restart(self) -> None:
        """Execute all statements again, in a new environment."""
        program = Program(self.library, self.inputs, (), ())
        self.env = program.build() | dict(zip("xyn", program.arguments(), strict=True))
        self.env["xp"] = array_namespace(self.env["x"])
        self.fixed = [self.env[name] for name in ("y", "n", "W", "W2", "I", "M", *["x"] * (not self.donates))]
        self.originals = [host(value) for value in self.fixed]
        for statement in self.body:
            exec(statement, self.env)

    def attempt(self, template: str) -> None:
        """Append a statement if it is valid."""
        new = {"v": f"v{len(self.body)}", "u": f"u{len(self.body)}"}
        try:
            statement = self.fill(template, new)
            exec(statement, self.env)
            kinds = {name: kind_of(name, self.env[name]) for name in new.values() if name in self.env}
            values = [self.env[name] for name in self.kinds | kinds]
            unchanged = all(np.array_equal(host(a), b) for a, b in zip(self.fixed, self.originals, strict=True))
            is_valid = unchanged and all(map(is_small, values))
        except (*EAGER_ERRORS, LookupError):
            is_valid = False
        if is_valid:
            self.body.append(statement)
            self.kinds |= kinds
        else:
            self.restart()

    def fill(self, template: str, new: dict[str, str]) -> str:
        """Return a template with random parts."""
        while part := re.search(r"\{(\w)\}", template):
            key = part[1]
            if key in PARTS:
                choice = self.random.choice(PARTS[key])
                choice = f"({choice}) * 1.0" if key == "o" and self.library == "torch" else choice  # shares no memory
            elif key in new:
                choice = new[key]
            else:
                names = [name for name, kind in self.kinds.items() if kind == ("f" if key == "w" else key)]
                names = [name for name in names if key != "w" or name not in ("y", "x"[self.donates :])]
                choice = self.random.choices(names, range(2, len(names) + 2))[0]  # an IndexError if there are none
            template = template[: part.start()] + choice + template[part.end() :]
        return template


# --- comparing --------------------------------------------------------------------------------------------------------


class Skipped(Exception):
    """The function has no derivative here that differences could tell."""


def weighted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the weighted sum of all floating outputs, and the outputs."""

    def scalar(*args: Any) -> Any:
        outputs, xp = function(*args), array_namespace(*args)
        total = xp.sum(args[0]) * 0.0 + xp.sum(args[1]) * 0.0
        for number, output in enumerate(outputs):
            if is_floating(output.dtype):
                weights = np.cos(np.arange(math.prod(output.shape)) * 1.7 + number).reshape(tuple(output.shape)) + 0.3
                total = total + xp.sum(output * resolve(xp).library.asarray(weights))
        return total, outputs

    return scalar


def only_value(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: weighted(function)(*args)[0]


def difference(value: Callable[..., Any], program: Program, number: int = 0) -> float:
    """Return the derivative of a function of arguments along `directions`, by central differences."""

    def moved(step: float) -> float:
        try:
            return float(value(*program.arguments(number, step)))
        except EAGER_ERRORS:  # an index is out of range at these values
            raise Skipped from None

    estimates = [(moved(step) - moved(-step)) / (2 * step) for step in (1e-5, 5e-6, 1.3e-6)]
    if not np.allclose(estimates, estimates[0], rtol=1e-6, atol=1e-5) or abs(estimates[0]) > 1e6:
        raise Skipped  # near a kink
    return estimates[0]


def check_slope(gradients: Any, program: Program, expected: float, tolerance: float = 2e-5) -> None:
    terms = [host(g) * v for g, v in zip(gradients, directions(program), strict=True)]
    scale = 1.0 + abs(expected) + sum(float(np.sum(np.abs(term))) for term in terms)
    assert abs(sum(float(np.sum(term)) for term in terms) - expected) <= tolerance * scale, "another gradient"


def check_arrays(actual: Any, expected: Any, what: str) -> None:
    for x, y in zip(map(host, actual), map(host, expected), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype), what
        np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-10, err_msg=what)


def check(program: Program, mode: str) -> None:
    """Compare values, derivatives and what is written into arguments with the eager function, for several calls."""
    function, eager = program.build()["program"], program.build()["program"]
    kept: Any = None
    differentiate = functools.partial(xf.value_and_grad, argnums=(0, 1), has_aux=True)
    transforms: dict[str, Callable[[], Any]] = {
        "value_and_grad": lambda: differentiate(weighted(function)),
        "jit": lambda: xf.jit(function),
        "donate": lambda: xf.jit(function, donate_argnums=0),
        "grad of jit": lambda: differentiate(weighted(xf.jit(function))),
        "jit of grad": lambda: xf.jit(differentiate(weighted(function))),
        "vjp": lambda: lambda x, y, n: xf.vjp(lambda x, y: only_value(function)(x, y, n), x, y),
    }
    transformed = transforms[mode]()
    for number in (0, 1, 1) if "jit" in mode else (0, 1, 0) if mode == "donate" else (0,):
        args, eager_args = program.arguments(number), program.arguments(number)
        if mode == "donate":  # one array for all calls
            kept = kept or (args[0], eager_args[0])
            args[0], eager_args[0] = kept
        try:
            expected = eager(*eager_args)
        except EAGER_ERRORS:
            raise Skipped from None
        if not all(np.all(np.isfinite(host(value))) for value in (*expected, *eager_args)):
            raise Skipped
        result = transformed(*args)
        if mode == "vjp":
            value, pullback = result
            np.testing.assert_allclose(host(value), host(only_value(eager)(*program.arguments(number))), rtol=1e-9)
            outputs, gradients = expected, pullback(value * 0.0 + 1.0)
        else:
            outputs, gradients = (result[0][1], result[1]) if "grad" in mode else (result, None)
        check_arrays(outputs, expected, "another value")
        check_arrays(args, eager_args, "another argument")
        if "grad" in mode or mode == "vjp":
            check_slope(gradients, program, difference(only_value(eager), program, number))


def check_second_derivative(program: Program) -> None:
    """Compare the derivative of a slope with differences of slopes."""
    function, xp = program.build()["program"], resolve(program.library)
    along = [xp.asarray(v) for v in directions(program)]

    def slope(x: Any, y: Any, n: Any) -> Any:
        gradients, space = xf.grad(only_value(function), argnums=(0, 1))(x, y, n), array_namespace(x)
        return sum((space.sum(g * v) for g, v in zip(gradients, along, strict=True)), space.sum(x) * 0.0)

    gradients = xf.grad(slope, argnums=(0, 1))(*program.arguments())
    check_slope(gradients, program, difference(slope, program), 1e-4)


MODES = ("value_and_grad", "vjp", "jit", "grad of jit", "jit of grad")


def refusal(error: BaseException | None) -> XformerError | None:
    """Return an error of xformer, also if NumPy replaced it."""
    return error if error is None or isinstance(error, XformerError) else refusal(error.__cause__)


def is_refused(check: Callable[..., None], *args: Any) -> bool:
    """Check a transformation of a program; return whether one line refuses it without need."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            check(*args)
    except Skipped:
        return False
    except Exception as error:
        refused = refusal(error)
        if refused is None:
            error.add_note(f"{args[1:]} of\n{args[0].text}")
            raise
        text = str(refused)
        assert re.fullmatch(r"(?=.*(; |use |pass |copy|expected|write )).{1,400}", text), text
        return not re.search(DOCUMENTED, text)
    return False


def run(library: str, seed: int, count: int) -> float:
    """Check random programs; return the share of those that a mode refused without need."""
    refused = 0
    for number in range(count):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            writer = Writer(f"{seed}/{number}", library)
            program = writer.write()
        modes = (*MODES, *["donate"] * writer.donates)
        results = [is_refused(check, program, mode) for mode in modes]
        results.append(is_refused(check_second_derivative, program))
        refused += any(results)
    return refused / count
