"""Random programs that write in place: eager execution and central differences are the truth for every transformation.

A program is the text of a Python function: in-place operators, assignments, aliases, views, containers, helpers that
write, and plain buffers that are used again. It is written statement by statement, each of which is first executed
eagerly. `find_faults` then compares `value_and_grad`, `vjp`, `jit` and their compositions with the eager function.
"""

from __future__ import annotations

import functools
import random
import re
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

import xformer as xf
from xformer.backends import array_namespace, is_floating, resolve
from xformer.errors import XformerError

MAX_SIZE, MAX_VALUE, MAX_INTEGER = 48, 100.0, 10**4
EAGER_ERRORS = (TypeError, ValueError, RuntimeError, IndexError)
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


# --- programs ---------------------------------------------------------------------------------------------------------


class Program(NamedTuple):
    """The text of a function of three arrays, and what it is called with.

    Attributes:
        library: "numpy", "torch" or "jax".
        kind: "ordinary"; "donated" if it writes into `x`; "error" if its last statement raises eagerly.
        inputs: `x` and `y`, of which derivatives are taken, and integers `n`.
        constants: Arrays that the function closes over, by name. It may write into those called OUT.
        body: Statements, of one or more lines.
        outputs: Expressions of the arrays that it returns.
    """

    library: str
    kind: str
    inputs: tuple[Any, Any, Any]
    constants: dict[str, Any]
    body: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def text(self) -> str:
        outside = [name for name in self.constants if name.startswith("OUT")]
        lines = [f"global {', '.join(outside)}"] * bool(outside) + ["xp = xf.array_namespace(x)"]
        lines += [*"\n".join(self.body).splitlines(), f"return [{', '.join(self.outputs)}]"]
        return "def program(x, y, n):\n" + "\n".join(f"    {line}" for line in lines) + "\n"

    def build(self, *, wide: bool = False) -> dict[str, Any]:
        """Return a new module with the function and its constants; if wide, float32 is float64."""
        xp = resolve(self.library)
        module = {"np": np, "xf": xf, "lib": xp, "F64": xp.float64, "F32": xp.float64 if wide else xp.float32}
        module |= {name: xp.asarray(value.copy()) for name, value in self.constants.items()}
        exec(HELPERS + self.text, module)
        return module

    def arguments(self, number: int = 0, step: float = 0.0) -> list[Any]:
        """Return new arrays: for a call, and moved along the direction of the derivative."""
        xp, values = resolve(self.library), list(self.inputs)
        if number:
            generator = np.random.default_rng(number)
            values[:2] = [value * generator.uniform(0.8, 1.2, value.shape) for value in values[:2]]
            values[2] = values[2][::-1]
        moved = [value + step * v for value, v in zip(values, directions(self.inputs[:2]), strict=False)]
        return [xp.asarray(np.array(value)) for value in (*moved, values[2])]


def directions(inputs: tuple[Any, ...]) -> list[Any]:
    generator = np.random.default_rng(1)
    return [generator.standard_normal(x.shape) for x in inputs]


def is_array(value: Any) -> bool:
    return hasattr(value, "dtype") and hasattr(value, "shape") and not isinstance(value, type)


def kind_of(value: Any) -> str:
    """Return "f", "i" or "b"."""
    name = str(value.dtype).removeprefix("torch.")
    return "f" if name.startswith("float") else "b" if name.startswith("bool") else "i"


def host(value: Any) -> Any:
    """Return a copy on the host."""
    return np.array(value.detach().numpy() if hasattr(value, "detach") else value)


# --- writing programs -------------------------------------------------------------------------------------------------


class Invalid(Exception):
    """A statement that cannot be part of a program."""


class Writer:
    """Writes a random program; see the top of this module.

    `paths` are the expressions of all arrays so far, with their kinds: "T" is traced; "N" comes from integers that a
    derivative does not trace; "P" is a plain array that the function made, "O" one outside that it overwrites.
    """

    def __init__(self, seed: str, library: str) -> None:
        self.random = r = random.Random(seed)
        self.library, self.xp = library, resolve(library)
        self.kind = r.choices(("ordinary", "donated"), (9, 1))[0]
        size = r.choice((3, 4))
        shapes = [(size,), (size, size), (2, size), (2, 2, size), (1, size), ()]
        generator = np.random.default_rng(r.randrange(2**32))
        first, second = r.choices(shapes, (6, 4, 4, 1, 1, 1), k=2)
        second = first if r.random() < 0.3 else second
        self.size, self.generator = size, generator
        self.inputs = (
            generator.uniform(0.3, 1.7, first), generator.uniform(0.3, 1.7, second), generator.integers(0, size, size)
        )  # fmt: skip
        self.constants: dict[str, Any] = {}
        self.body: list[str] = []
        self.paths: dict[str, str] = {}
        self.restart()

    def write(self) -> Program | None:
        """Return a program, or None if it writes nothing."""
        target = self.random.randrange(3, 14)
        for _ in range(6 * target):
            if len(self.body) >= target:
                break
            statement = self.random.choices(STATEMENTS, WEIGHTS)[0]
            start = len(self.body)
            try:
                getattr(self, statement)()
                if self.random.random() < 0.04:
                    self.repeat(start)
            except Invalid:
                pass
        if not any(re.search(r"\w+\(|[^=!<>]=", line) and is_write(line) for line in self.body):
            return None
        program = self.program(self.kind)
        if self.kind == "donated" and not writes_argument(program):
            return program._replace(kind="ordinary")
        if self.kind == "ordinary" and self.random.random() < 0.12:
            return self.with_error() or program
        return program

    def program(self, kind: str) -> Program:
        arrays = [path for path, k in self.paths.items() if k != "O" and self.exists(path)]
        outputs = [path for path in arrays if self.random.random() < 0.8] or arrays[-1:]
        return Program(self.library, kind, self.inputs, dict(self.constants), tuple(self.body), tuple(outputs))

    # --- execution -------------------------------------------------------------------------------------------------

    def restart(self) -> None:
        """Execute all statements again, in a new environment."""
        program = Program(self.library, "", self.inputs, self.constants, (), ())
        self.env = program.build()
        self.env.update(zip("xyn", program.arguments(), strict=True))
        self.fixed = [self.env[name] for name in "xyn" if name != "x" or self.kind != "donated"]
        self.fixed += [self.env[name] for name in self.constants if not name.startswith("OUT")]
        for array in self.fixed:
            if self.library == "numpy":
                array.flags.writeable = False
        self.versions = [getattr(array, "_version", 0) for array in self.fixed]
        self.env["xp"] = array_namespace(self.env["x"])
        self.paths |= {"x": "T", "y": "T", "n": "N"}
        for statement in self.body:
            exec(statement, self.env)

    def attempt(self, statement: str, **paths: str) -> None:
        """Append a statement if it is valid; `paths` are the new names with their kinds."""
        error: Exception | None = None
        try:
            exec(statement, self.env)
        except EAGER_ERRORS as exception:
            error = exception
        if error is None:
            new = {name: kind for name, kind in paths.items() if is_array(self.env.get(name))}
            versions = [getattr(array, "_version", 0) for array in self.fixed]
            if versions == self.versions and all(map(is_small, self.values({**self.paths, **new}))):
                self.body.append(statement)
                self.paths |= new
                return
        for name in paths:
            if name not in self.paths:
                self.env.pop(name, None)
        self.restart()
        raise Invalid

    def exists(self, path: str) -> bool:
        try:
            return is_array(self.value(path))
        except (NameError, LookupError, AttributeError):
            return False

    def values(self, paths: Any) -> Iterator[Any]:
        return (self.value(path) for path in paths if self.exists(path))

    def value(self, path: str) -> Any:
        return self.env[path] if path in self.env else eval(path, self.env)

    # --- choices ---------------------------------------------------------------------------------------------------

    def choose(self, *options: Any) -> Any:
        return self.random.choice(options)

    def name(self, prefix: str = "v") -> str:
        return f"{prefix}{len(self.body)}"

    def path(self, dtype: str = "f", kinds: str = "T", accept: Callable[[Any], bool] = lambda value: True) -> str:
        """Return the expression of an array that exists."""
        options = [
            path for path, kind in self.paths.items()
            if kind in kinds and self.exists(path) and kind_of(self.value(path)) in dtype and accept(self.value(path))
        ]  # fmt: skip
        if not options:
            raise Invalid
        return self.random.choices(options, range(2, len(options) + 2))[0]

    def target(self, dtype: str = "f", kinds: str = "T", **options: Any) -> str:
        """Return an array to write into: arguments only if they are donated."""
        path = self.path(dtype, kinds, **options)
        if path in ("y", "n") or (path == "x" and self.kind != "donated"):
            raise Invalid
        return path

    def constant(self, dtype: str, shape: tuple[int, ...], bound: int = 0) -> str:
        """Return the name of an array outside the function."""
        name = {"f": "W", "i": "I", "b": "M"}[dtype] + "".join(map(str, (*shape, *([bound] if dtype == "i" else []))))
        if name not in self.constants:
            values = {
                "f": lambda: np.round(self.generator.uniform(-1.5, 1.5, shape), 2),
                "i": lambda: self.generator.integers(0, bound, shape),
                "b": lambda: self.generator.integers(0, 2, shape) > 0,
            }
            self.constants[name] = values[dtype]()
            self.restart()
        return name

    def operand(self, shape: tuple[int, ...], *, kinds: str = "TTN") -> str:
        """Return an expression of floats or integers that broadcasts to a shape."""
        r = self.random
        if r.random() < 0.25:
            return self.choose(
                "0.5", "2.0", "-1.5", "3", "0.25", "np.float64(1.5)" if self.library == "numpy" else "1.5"
            )
        if r.random() < 0.12 and "T" in kinds and shape:
            return self.constant("f", shape[r.randrange(len(shape)) :])
        if r.random() < 0.03 and "T" in kinds and shape and shape[-1] == 3:
            path = self.path("f", "T", lambda value: len(value.shape) > 0)
            return f"[{path}[{'0' + ', 0' * (len(self.value(path).shape) - 1)}], 2.0, 1.0]"
        dtype = "f" if r.random() < 0.85 else "fi"
        kinds = kinds + ("PO" if r.random() < 0.3 and "T" in kinds else "")
        if r.random() < 0.7:
            path = self.path(dtype, kinds, lambda value: fits(tuple(value.shape), shape))
        else:
            path = self.reduced(self.path(dtype, kinds), shape)
        forms = ["{}"] * 5 + ["{} * 0.5", "({} + 1.0)"]
        if kinds.startswith("T"):
            forms += ["xp.sin({})", "xp.tanh({})", "{} * {}", "xp.flip({})"]
            forms += ["({}[::-1])"] * (self.library != "torch" and "(" not in path)
        return self.choose(*forms).replace("{}", path)

    def reduced(self, path: str, shape: tuple[int, ...]) -> str:
        """Return an expression of a part of an array that broadcasts to a shape."""
        forms = ["xp.mean({}, axis=0)", "xp.sum({}, axis=-1)"] * (len(self.value(path).shape) > 0)
        forms += ["xp.sum({})", "{}[0]", "{}[-1]", "{}[..., 0]", "{}[1:]"]
        forms += ["{}[0, ...]", "{}[..., :1]", "xp.max({})", "xp.reshape({}, (-1,))", "{}[:-1]", "{}[1]"]
        forms += ["{}.mT"] * (len(self.value(path).shape) > 1)
        self.random.shuffle(forms)
        for form in forms:
            expression = form.replace("{}", path)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    value = eval(expression, self.env)
            except (*EAGER_ERRORS, AttributeError, Warning):
                continue
            if fits(tuple(value.shape), shape):
                return expression
        raise Invalid

    def apart(self, target: str, operand: str) -> str:
        """Return an operand that shares no memory with the target on torch, which leaves the result open."""
        if self.library != "torch":
            return operand
        return f"({operand}) * 1.0" if shares(self.evaluate(target), self.evaluate(operand)) else operand

    def evaluate(self, expression: str) -> Any:
        try:
            return eval(expression, self.env)
        except EAGER_ERRORS:
            raise Invalid from None

    def key(self, shape: tuple[int, ...], path: str) -> str:
        """Return an index of an array."""
        if not shape:
            return self.choose("...", "()")
        size = shape[0]
        keys = ["0", "-1", "1:", ":-1", "::2", "1::2", ":2", "...", f"{size - 1}", "0:1"]
        keys += ["::-1", "::-2", "-1:0:-1", "-2::-1"] * (self.library != "torch")
        if len(shape) > 1:
            keys += ["0, 1:", ":, 0", "1:, ::2", "..., 0", ":, [0, 1]", "0, 0", "-1, :", ":, -1", "..., -1", ":, 1:"]
        if self.random.random() < 0.06:
            return self.constant("i", (self.choose(2, 3),), size)
        if self.random.random() < 0.06:
            return self.constant("b", shape)
        if self.random.random() < 0.2:
            keys = ["[0, 1]", f"[{size - 1}, 0]", "[1, 1]", f"[{', '.join(map(str, range(size)))}]"]
            keys += [f"xp.argsort({path}[..., 0])[:2]"] if len(shape) == 2 else [f"xp.argsort({path})[:2]"]
            keys += [path for path, kind in self.paths.items() if kind in "TNP" and self.dtype_of(path) == "i"]
        return self.choose(*keys)

    def dtype_of(self, path: str) -> str:
        return kind_of(self.value(path)) if self.exists(path) else ""

    # --- statements: new arrays ------------------------------------------------------------------------------------

    def new(self) -> None:
        a = self.path("f", "T")
        shape = tuple(self.value(a).shape)
        form = self.choose(*NEW, *(NEW_OF_AXES if shape else ()))
        parts = {
            "{o}": lambda: self.operand(shape),
            "{i}": self.indices,
            "{m}": lambda: self.mask(shape),
            "{w}": lambda: self.constant("f", shape[-1:] * 2),
            "{s}": lambda: str(shape),
        }
        for part, choose in parts.items():
            form = form.replace(part, choose()) if part in form else form
        name = self.name() if self.random.random() < 0.85 else self.path("f", "T")
        name = self.name() if re.search(r"\W", name) or name in "xy" else name
        self.attempt(f"{name} = {form.replace('{}', a)}", **{name: "T"})

    def indices(self) -> str:
        size = self.size
        options = [self.constant("i", (3,), size), "n"]
        options += [path for path, kind in self.paths.items() if kind in "TNP" and self.dtype_of(path) == "i"]
        return self.choose(*options)

    def mask(self, shape: tuple[int, ...]) -> str:
        options = [self.constant("b", shape)]
        options += [path for path, kind in self.paths.items() if kind in "TNP" and self.dtype_of(path) == "b"]
        return self.choose(*options)

    def scalar(self) -> None:
        a, name = self.path("f", "T"), self.name("s")
        zeros = "0" + ", 0" * max(0, len(self.value(a).shape) - 1)
        forms = [
            f"xp.sum({a})",
            f"xp.max({a})",
            f"{a}[{zeros}]",
            f"xp.mean({a})",
            "xp.asarray(0.5, dtype=F64)",
            f"{a}[()]",
        ]
        forms += [f"xp.reshape({a}[..., :1][..., 0], (-1,))[0]", f"xp.asarray(xp.sum({a}))", f"xp.sum({a})[...]"]
        forms += [f"{a}[{zeros}, ...]", f"xp.reshape({a}[0:1], ())", "xp.zeros((), dtype=F64)"]
        self.attempt(f"{name} = {self.choose(*forms)}", **{name: "T"})

    def integers(self) -> None:
        a, name = self.path("f", "T"), self.name("k")
        if self.random.random() < 0.4:
            self.attempt(f"{name} = n {self.choose('+ 1', '* 2', '% 2', '* 1')}", **{name: "N"})
        else:
            form = self.choose("xp.argsort({})", "xp.astype({} * 3.0, xp.int64)", "xp.astype(xp.sign({}), xp.int64)")
            self.attempt(f"{name} = {form.replace('{}', a)}", **{name: "T"})

    def booleans(self) -> None:
        a, name = self.path("f", "T"), self.name("m")
        self.attempt(f"{name} = {a} {self.choose('> 0.8', '< 1.1', '>= 0.6')}", **{name: "T"})

    def alias(self) -> None:
        a = self.path("fib", "TN")
        name, kind = self.name("r"), self.paths[a]
        forms = [a, a, f"xp.asarray({a})", f"xp.astype({a}, {a}.dtype, copy=False)", f"+{a}", f"xp.clip({a})"]
        self.attempt(f"{name} = {self.choose(*forms)}", **{name: kind})

    def container(self) -> None:
        a, b = self.path("f", "T"), self.path("f", "T")
        name = self.name("c")
        form, members = self.choose(
            (f"[{a}, {b}]", ("[0]", "[1]")),
            (f'{{"k": {a}, "l": {b}}}', ('["k"]', '["l"]')),
            (f"({a}, [{b}])", ("[1][0]", "[0]")),
            (f"Box({a})", (".h",)),
            (f"list({a})", ("[0]", "[-1]")),
        )
        self.attempt(f"{name} = {form}")
        for member in members:
            if self.exists(name + member) and not (member == "[0]" and form.startswith("(")):
                self.paths[name + member] = "T"

    def view(self) -> None:
        a = self.path("fib" if self.random.random() < 0.2 else "f", "TN")
        shape, name, kind = tuple(self.value(a).shape), self.name("w"), self.paths[a]
        forms = [f"{a}[{self.key(shape, a)}]" for _ in range(4)]
        forms += [f"xp.reshape({a}, {self.choose('(-1,)', (1, *shape), (*shape, 1), shape[::-1])})", f"xp.flip({a})"]
        forms += [f"xp.expand_dims({a}, axis={self.choose(0, -1)})", f"{a}[None]", f"{a}[..., None]"]
        forms += [f"xp.broadcast_to({a}, {(2, *shape)})"]
        if len(shape) > 1:
            axes = list(range(len(shape)))
            self.random.shuffle(axes)
            forms += [f"xp.permute_dims({a}, {tuple(axes)})", f"xp.matrix_transpose({a})", f"{a}.mT"] + [f"{a}.T"] * (
                len(shape) == 2
            )
            forms += [f"xp.moveaxis({a}, 0, -1)", f"xp.squeeze({a}, axis=0)", f"xp.unstack({a})[{self.choose(0, -1)}]"]
            forms += [f"xp.unstack({a}, axis=-1)[0]", f"[*{a}][1]"]
        self.attempt(f"{name} = {self.choose(*forms)}", **{name: kind})

    # --- statements: writes ----------------------------------------------------------------------------------------

    def in_place(self) -> None:
        a = self.target()
        value = self.value(a)
        if self.random.random() < 0.3 and value.shape:
            a = f"{a}[{self.key(tuple(value.shape), a)}]"
            value = self.evaluate(a)
        self.attempt(self.operation(a, value))

    def operation(self, a: str, value: Any) -> str:
        """Return an in-place operation of floats."""
        shape, operator = tuple(value.shape), self.random.choices(OPERATORS, (8, 4, 8, 4, 3, 1, 1, 2))[0]
        operand = self.operand(shape)
        if operator in ("/=", "//=", "%="):
            operand = (
                self.choose("2.0", "1.3", "0.7") if operand[0] in "0123456789-[nW" else f"({operand} * {operand} + 0.6)"
            )
        elif operator == "**=":
            positive = bool(np.all(host(value) > 0.1))
            operand = f"xp.tanh({operand})" if positive and "xp" not in operand and operand[0] in "vwrxy" else "2"
            operand = self.choose("2", "3", operand, "1.5" if positive else "2")
        elif operator == "@=":
            operand = self.constant("f", (shape[-1],) * 2) if len(shape) > 1 else self.path("f", "T")
        return f"{a} {operator} {self.apart(a, operand)}"

    def write_integers(self) -> None:
        a = self.target("i", "TN")
        operand = self.choose("1", "2", "3", "n", a) if self.random.random() < 0.7 else self.path("i", "TN")
        operator = self.choose("+=", "-=", "*=", "//=", "%=", "&=", "|=", "^=", "<<=", ">>=", "**=")
        operand = self.choose("2", "3", f"({operand} * {operand} + 1)") if operator in ("//=", "%=") else operand
        operand = self.choose("1", "2") if operator in ("<<=", ">>=", "**=") else operand
        line = f"{a} {operator} {self.apart(a, operand)}"
        if self.random.random() < 0.2:
            line = f"{a}[{self.key(tuple(self.value(a).shape), a)}] = {self.apart(a, operand)}"
        self.attempt(line)

    def write_booleans(self) -> None:
        a = self.target("b", "TN")
        value = self.path("f", "T", lambda value: fits(tuple(value.shape), tuple(self.value(a).shape)))
        operand = self.choose(f"({value} > 0.5)", "True", self.mask(tuple(self.value(a).shape)))
        self.attempt(f"{a} {self.choose('&=', '|=', '^=')} {self.apart(a, operand)}")

    def assign(self) -> None:
        a = self.target()
        shape = tuple(self.value(a).shape)
        if self.random.random() < 0.05:
            key, operand = f"{self.path('f', 'T', lambda value: tuple(value.shape) == shape)} > 0.7", "0.5"
        else:
            key = self.key(shape, a)
            part = self.evaluate(f"{a}[{key}]")
            operand = self.apart(a, self.operand(tuple(part.shape)))
        self.attempt(f"{a}[{key}] = {operand}")

    def overlap(self) -> None:
        a = self.target(accept=lambda value: len(value.shape) > 0)
        y, shape = a, tuple(self.value(a).shape)
        pairs = [("[1:]", f"{y}[:-1]"), ("[:-1]", f"{y}[1:]"), ("[...]", f"xp.flip({y})"), ("[[0, 1]]", f"{y}[[1, 0]]")]
        pairs += [("[1:]", f"{y}[:-1] * 2.0"), ("[:2]", f"{y}[-2:]"), ("[::2]", f"{y}[:1]"), ("[[0, 1]]", f"{y}[:2]")]
        if self.library != "torch":
            pairs += [("[...]", f"{y}[::-1]"), ("[::-1]", y), ("", f"{y}[::-1]"), ("[1:]", f"{y}[-2::-1]")]
        if len(shape) > 1:
            pairs += [("[:, 1:]", f"{y}[:, :-1]"), ("[0]", f"{y}[1]"), ("", f"{y}[0]"), ("", f"{y}[..., :1]")]
            pairs += [("[...]", f"xp.matrix_transpose({y})"), ("", f"{y}.mT"), ("[0]", f"{y}[:, 0]")]
        key, source = self.choose(*pairs)
        operators = ("+=", "-=", "*=") if key == "" else ("=", "=", "=", "+=", "*=")
        line = f"{y}{key} {self.choose(*operators)} {self.apart(y, source)}"
        self.attempt(line if self.random.random() < 0.85 else f"swap({y})")

    def helper(self) -> None:
        a = self.target()
        shape, name = tuple(self.value(a).shape), self.name("h")
        b = self.apart(a, self.operand(shape))
        lines = [
            *(f"add({a}, {b})", f"{name} = scale({a}, {b})", f"put({a}, {self.choose('...', '0', '-1')}, {b})"),
            *(f"{name} = halve_after({a}, {b})", f"add_to_rows({a}, {b})", f"add({a}[{self.key(shape, a)}], {b})"),
            *(f"box{name} = Box({a})\nbox{name}.add({b})", f"(lambda a: scale(a, {b}))({a})"),
            f"def {name}f(a):\n    a += {b}\n\n{name}f({a})",
            f"def {name}f():\n    {a}[...] = {a} * 0.5\n\n{name}f()",
            f"for each in [{a}, {self.target()}]:\n    each += {b}",
        ]
        self.attempt(self.choose(*lines), **{name: "T"})

    def rows(self) -> None:
        a = self.target(accept=lambda value: len(value.shape) > 0)
        shape = tuple(self.value(a).shape)
        b = self.apart(a, self.operand(shape[1:]))
        self.attempt(
            self.choose(
                f"for row in {a}:\n    row += {b}",
                f"for row in xp.unstack({a}):\n    row *= {b}",
                f"for i, row in enumerate({a}):\n    row[...] = {b}",
                f"for i in range({shape[0]}):\n    {a}[i] += {b}",
                f"for i in range(1, {shape[0]}):\n    {a}[i] = {a}[i - 1] * 0.5 + {b}",
                f"for i in range(1, {shape[0]}):\n    {a}[i] += {a}[i - 1]" + " * 1.0" * (self.library == "torch"),
            )
        )

    # --- statements: plain arrays ----------------------------------------------------------------------------------

    def plain(self) -> None:
        shape = tuple(self.value(self.path("f", "T")).shape)
        name, values = self.name("p"), np.round(self.generator.uniform(-1.5, 1.5, shape), 1).tolist()
        forms = [
            f"lib.zeros({shape}, dtype=F64)",
            f"lib.asarray({values}, dtype=F64)",
            f"lib.ones({shape}, dtype=F64)",
            f"lib.asarray({values}, dtype=F64)",
        ]
        forms += [f"lib.asarray({values}) > 0.0", f"lib.asarray({self.generator.integers(0, self.size, 3).tolist()})"]
        if self.random.random() < 0.2:
            name = f"OUT{len(shape)}_{len(self.body)}"
            self.constants[name] = np.zeros(shape)
            self.restart()
            self.attempt(f"{name}[...] = {self.choose('1.5', '-0.5')}", **{name: "O"})
            return
        self.attempt(f"{name} = {self.choose(*forms)}", **{name: "P"})

    def write_plain(self) -> None:
        a = self.path("fib", "PO")
        kind, shape = self.dtype_of(a), tuple(self.value(a).shape)
        c = self.choose("0.5", "2.0", "-1.0", self.constant_operand(shape)) if kind == "f" else "1"
        key = self.key(shape, a) if self.random.random() < 0.4 and "O" not in self.paths[a] else "..."
        forms = {
            "f": [f"{a}[{key}] = {c}", f"{a}[{key}] = {c}", f"{a} += {c}", f"{a} *= -0.5", f"add({a}, {c})"],
            "i": [f"{a}[...] = xp.flip({a})", f"{a}[0] = {c}", f"{a} ^= 1", f"{a}[...] = {a}[-1]" + " * 1"],
            "b": [f"{a}[...] = ~{a}", f"{a} ^= True", f"{a}[{key}] = True", f"{a} &= {a}"],
        }[kind]
        if self.library == "numpy" and kind == "f":
            forms += [f"{a}.fill({c})" if c[0] != "W" else f"np.copyto({a}, {c})", f"np.multiply({a}, 2.0, out={a})"]
        elif self.library == "torch" and kind == "f":
            forms += [f"{a}.mul_(0.5)", f"{a}.fill_(0.7)"]
        self.attempt(self.choose(*forms))

    def constant_operand(self, shape: tuple[int, ...]) -> str:
        """Return another plain array of the function; arrays outside would be constants of a program."""
        options = [p for p, kind in self.paths.items() if kind in "PO" and self.dtype_of(p) == "f"]
        options = [p for p in options if fits(tuple(self.value(p).shape), shape)]
        return self.choose(*options) if options else "0.25"

    def view_plain(self) -> None:
        a = self.path("f", "P", lambda value: len(value.shape) > 0)
        name = self.name("q")
        self.attempt(f"{name} = {a}{self.choose('[::2]', '[1:]', '[...]', '[:1]', '')}", **{name: "P"})

    def use_plain(self) -> None:
        p = self.path("fib", "PO")
        kind, shape, name = self.dtype_of(p), tuple(self.value(p).shape), self.name("u")

        def accept(value: Any) -> bool:
            return len(value.shape) > 0 if kind == "i" else tuple(value.shape) == shape

        if self.random.random() < 0.65:
            a, form = self.path("f", "T", accept), f"{name} = {self.choose(*USES[kind])}"
        else:
            a, form = self.target(accept=accept), self.choose(*WRITES[kind])
        b = self.apart(a, self.operand(tuple(self.value(a).shape), kinds="T")) if "{o}" in form else ""
        self.attempt(form.replace("{o}", b).replace("{p}", p).replace("{}", a), **{name: "T"})

    def loop_plain(self) -> None:
        a = self.path("f", "T", lambda value: len(value.shape) > 0)
        shape, name, p = tuple(self.value(a).shape), self.name("t"), self.name("p")
        start, fill, use = self.choose(
            (f"lib.zeros({shape}, dtype=F64)", f"{p}[...] = k + 1", f"{a} * {p}"),
            (f"lib.zeros({shape}, dtype=F64)", f"{p} += 0.5", f"{a} * {a} * {p}"),
            (f"lib.zeros({shape[-1:] * 2}, dtype=F64)", f"{p}[...] = 0.5 * k", f"xp.sum({a} @ {p})"),
            (
                f"lib.zeros({shape}, dtype=F64)",
                f"{p}[{self.choose('0', '-1', '1:')}] = k",
                f"xp.where({p} > 0.5, {a}, 0.5)",
            ),
            (
                f"lib.zeros({shape}, dtype=F64) > 1.0",
                f"{p}[{self.choose('0', '-1', '1:')}] = k > 0",
                f"xp.where({p}, {a}, 0.5)",
            ),
            ("lib.asarray([0, 0])", f"{p}[...] = k % {shape[-1]}", f"xp.sum(xp.take({a}, {p}, axis=-1))"),
            (f"lib.zeros({shape}, dtype=F64)", f"{p}[...] = k", f"xp.sum(xp.stack([{a}, {p}]) * {a})"),
        )
        add = self.choose(f"{name} = {name} + {use}", f"{name} += {use}")
        zero = self.choose("0.0", f"xp.zeros({shape}, dtype=F64)", f"{a} * 0.5", f"xp.sum({a})")
        lines = [f"{p} = {start}", f"{name} = {zero}", "for k in range(3):", f"    {fill}", f"    {add}"]
        self.attempt("\n".join(lines), **{name: "T", p: "P"})

    # --- other statements ------------------------------------------------------------------------------------------

    def repeat(self, start: int) -> None:
        """Put the last statements into a loop."""
        lines = "\n".join(self.body[start:]).splitlines()
        if not lines:
            raise Invalid
        body, self.body = self.body, self.body[:start]
        try:
            self.restart()
            self.attempt("for _ in range(2):\n" + "\n".join(f"    {line}" for line in lines))
        except (Invalid, *EAGER_ERRORS):
            self.body = body
            self.restart()

    def with_error(self) -> Program | None:
        """Return a program whose last statement is an error of the library: a cast or a shape that does not fit."""
        try:
            a = self.target("fib", "T", accept=lambda value: not isinstance(value, np.generic) and value.shape != ())
            kind, shape = self.dtype_of(a), tuple(self.value(a).shape)
            f = self.path("f", "T")
            lines = [f"{a} += xp.ones({(2, *shape)})", f"{a}[...] = xp.ones({(*shape[:-1], shape[-1] + 1)})"]
            lines += [
                f"{a} *= {self.path('f', 'T')}",
                f"{a}[0:1] -= {self.path('f', 'T')}",
                f"add({a}, xp.ones({(7,)}))",
            ]
            lines += [f"xp.broadcast_to({a}, {(2, *shape)})[...] = 1"]
            lines += [f"{a} += 0.5", f"{a} /= 2", f"{a} *= {f}", f"add({a}, {f})", f"{a} **= 0.5"] * (3 * (kind != "f"))
        except Invalid:
            return None
        line = self.choose(*lines)
        try:
            self.attempt(line)
        except Invalid:
            pass
        else:
            return None
        module = self.program("error").build()
        module.update(zip("xyn", self.program("error").arguments(), strict=True), xp=self.env["xp"])
        try:
            for statement in (*self.body, line):
                exec(statement, module)
        except EAGER_ERRORS as error:  # torch refuses arguments that overlap
            if statement is line and "memory location. Please clone" not in str(error):
                return self.program("error")._replace(body=(*self.body, line))
        return None


NEW = (
    *(f"xp.{name}({{}})" for name in ("sin", "tanh", "cos", "square", "abs", "atan", "negative", "zeros_like")),
    *("{} * {o}", "{} + {o}", "{} - {o}", "{o} * {}", "{o} - {}", "xp.multiply({}, {o})", "xp.maximum({}, {o})"),
    *("xp.where({} > 0.9, {}, {o})", "{} / ({} * {} + 0.5)", "{} ** 2", "xp.sqrt(xp.square({}) + 1.0)"),
    *(
        "xp.stack([{}, {}])",
        "xp.asarray({}, copy=True)",
        "xp.zeros({s}, dtype=F64)",
        "xp.ones({s}, dtype=F64)",
        "xp.full({s}, 0.5, dtype=F64)",
    ),
    *(
        "xp.astype({}, F32)",
        "xp.astype({} * 0.5, F32)",
        "xp.astype({o} * {}, F32)",
        "xp.where({m}, {}, {o})",
        "xp.clip({}, 0.2, 1.3)",
        "xp.exp(xp.tanh({}))",
    ),
)
NEW_OF_AXES = (
    *("xp.sort({})", "{} @ {}", "xp.sum({}, axis=0)", "xp.mean({}, axis=-1)", "xp.cumulative_sum({}, axis=-1)"),
    *("xp.concat([{}, {}])", "xp.roll({}, 1)", "xp.tile({}, (2,))", "xp.repeat({}, 2)", "xp.diff({})"),
    *("xp.take({}, {i}, axis=-1)", "xp.take({}, {i}, axis=-1)", "{} @ {w}"),
)
# What is done with a plain array of floats, integers or booleans.
USES = {
    "f": (
        *("{} * {p}", "{p} * {}", "{p} - {}", "xp.multiply({}, {p})", "{} / ({p} * {p} + 1.0)", "{} @ {p}", "{p} @ {}"),
        *("xp.where({} > {p}, {}, {p})", "xp.stack([{}, {p}])", "xp.maximum({}, {p})", "xp.concat([{}, {p}])"),
        *("xp.sum({} * {p})", "xp.asarray({p}, copy=True)"),
    ),
    "i": ("xp.take({}, {p}, axis=-1)", "{}[{p}]", "xp.take({}, {p} * 1, axis=0)", "{}[..., {p}]", "xp.sum({}) * {p}"),
    "b": ("xp.where({p}, {}, {o})", "xp.where(~{p}, {}, {o})", "{}[{p}]", "{} * {p}"),
}
WRITES = {
    "f": ("{} += {p}", "{} *= {p}", "{}[...] = {p}", "{} -= {p}", "{}[0] = {p}[0]"),
    "i": ("{}[{p}] = 0.5", "{}[{p}] += 1.0", "{}[{p}] *= 2.0"),
    "b": ("{}[{p}] = 0.5", "{}[{p}] *= 2.0", "{}[...] = xp.where({p}, {}, {o})"),
}
OPERATORS = ("+=", "-=", "*=", "/=", "**=", "//=", "%=", "@=")
CHOICES = {
    # New arrays, aliases and views.
    "booleans": 2,
    **dict.fromkeys(("scalar", "integers"), 3),
    **dict.fromkeys(("new", "view"), 14),
    "alias": 6,
    "container": 4,
    # Writes.
    "in_place": 22,
    "assign": 14,
    "overlap": 8,
    "helper": 8,
    "write_integers": 6,
    "rows": 5,
    "write_booleans": 4,
    # Plain arrays.
    "plain": 5,
    "write_plain": 8,
    "view_plain": 2,
    "use_plain": 9,
    "loop_plain": 3,
}
STATEMENTS, WEIGHTS = list(CHOICES), list(CHOICES.values())


def is_write(statement: str) -> bool:
    """Return whether a statement writes into an array."""
    calls = r"\b(add|scale|put|add_to_rows|halve_after|swap)\(|\.(add|fill|fill_|mul_)\(|out=|copyto"
    return re.search(rf"[-+*/%@&|^<>]= |\] = |{calls}", statement) is not None


def fits(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Return whether an array broadcasts to a shape."""
    pairs = zip(shape[::-1], target[::-1], strict=False)
    return len(shape) <= len(target) and all(a in (1, b) for a, b in pairs)


def shares(a: Any, b: Any) -> bool:
    """Return whether two tensors share memory."""
    return all(hasattr(x, "untyped_storage") for x in (a, b)) and (
        a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    )


def is_small(value: Any) -> bool:
    values = np.asarray(value.detach().numpy() if hasattr(value, "detach") else value)
    if values.dtype.kind not in "fib" or not 0 < values.size <= MAX_SIZE or values.ndim > 4:
        return False
    limit = MAX_INTEGER if values.dtype.kind == "i" else MAX_VALUE
    return values.dtype.kind == "b" or bool(np.all(np.abs(values) < limit))


def write_program(seed: str, library: str) -> Program | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Writer(seed, library).write()


# --- comparing --------------------------------------------------------------------------------------------------------


class Fault(AssertionError):
    """A transformation differs from the function; `kind` names the way."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Skipped(Exception):
    """The function has no derivative here that differences could tell."""


def eagerly(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function; raise Skipped if its indices are out of range at these values."""
    try:
        return function(*args)
    except EAGER_ERRORS:
        raise Skipped from None


def weighted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the weighted sum of all floating outputs, and the outputs."""

    def scalar(*args: Any) -> Any:
        outputs = function(*args)
        xp = array_namespace(*args)
        total = xp.sum(args[0]) * 0.0 + xp.sum(args[1]) * 0.0
        for number, output in enumerate(outputs):
            if is_floating(output.dtype):
                total = total + xp.sum(output * weights(xp, number, tuple(output.shape)))
        return total, outputs

    return scalar


def weights(xp: Any, number: int, shape: tuple[int, ...]) -> Any:
    values = np.cos(np.arange(np.prod(shape, dtype=int)) * 1.7 + number).reshape(shape) + 0.3
    return resolve(xp).library.asarray(values)


def only_value(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: weighted(function)(*args)[0]


class Truth:
    """What the eager function returns, and its slopes by central differences."""

    def __init__(self, program: Program) -> None:
        self.program, self._slopes = program, {}
        self.has_float32 = "F32" in program.text

    def outputs(self, number: int = 0, module: dict[str, Any] | None = None) -> list[Any]:
        module = module or self.program.build()
        return [host(output) for output in eagerly(module["program"], *self.program.arguments(number))]

    def slope(self, number: int = 0, changes: int = 0) -> float:
        """Return the derivative along the directions."""
        if (number, changes) not in self._slopes:
            self._slopes[number, changes] = self._difference(number, changes)
        return self._slopes[number, changes]

    def _difference(self, number: int, changes: int) -> float:
        def value(step: float, *, wide: bool = True) -> float:
            module = self.program.build(wide=wide)
            for _ in range(changes):
                change_constants(self.program, module)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return float(eagerly(only_value(module["program"]), *self.program.arguments(number, step)))

        estimates = [(value(step) - value(-step)) / (2 * step) for step in (1e-5, 5e-6, 1.3e-6)]
        if not np.allclose(estimates, estimates[0], rtol=1e-6, atol=1e-5) or abs(estimates[0]) > 1e6:
            raise Skipped  # near a kink
        if self.has_float32 and not np.isclose(value(0.0), value(0.0, wide=False), rtol=1e-4, atol=1e-4):
            raise Skipped  # another branch
        return estimates[0]

    def check_slope(self, gradients: Any, number: int = 0, changes: int = 0) -> None:
        expected = self.slope(number, changes)
        terms = [host(g) * v for g, v in zip(gradients, directions(self.program.inputs[:2]), strict=True)]
        actual, scale = (sum(float(np.sum(f(term))) for term in terms) for f in (np.positive, np.abs))
        tolerance = (2e-3 if self.has_float32 else 2e-5) * (1.0 + abs(expected) + scale)
        if not abs(actual - expected) <= tolerance:
            shown = ", ".join(str(host(g).tolist()) for g in gradients)
            raise Fault("gradient", f"gradient {shown}: slope {actual}, expected {expected}")

    def check_outputs(self, actual: Any, expected: list[Any], names: tuple[str, ...] = ()) -> None:
        names = names or self.program.outputs
        if len(actual) != len(expected):
            raise Fault("value", f"{len(actual)} outputs, expected {len(expected)}")
        for name, x, y in zip(names, map(host, actual), expected, strict=True):
            if (x.shape, x.dtype) != (y.shape, y.dtype):
                raise Fault("dtype", f"{name} is {x.dtype}{x.shape}, expected {y.dtype}{y.shape}")
            tolerance = 1e-4 if x.dtype == np.float32 else 1e-10
            if not np.allclose(x, y, rtol=tolerance, atol=tolerance, equal_nan=True):
                raise Fault("value", f"{name} is {x.tolist()}, expected {y.tolist()}")


def change_constants(program: Program, module: dict[str, Any]) -> None:
    """Write new values into the arrays outside the function."""
    for name in program.constants:
        array = module[name]
        if name[0] == "W":
            array[...] = array * -0.5 + 0.3
        elif name[0] == "M":
            array[...] = resolve(program.library).flip(array)  # with as many True
        elif name[0] == "I":
            array[...] = (array + 1) % (int(name[-1]))


def try_to_change(program: Program, module: dict[str, Any]) -> bool:
    """Change the constants, unless a trace has made them read-only; those of JAX are immutable.

    No trace sees what is computed from plain arrays only, such as a product of a constant and `xp.asarray(0.5)`.
    """
    if program.library == "jax" or re.search(
        r"xp\.asarray\(([pq]\d|OUT|0\.)|(?m:^ *[pq]\d+\b.*\b[WMI]\d)", program.text
    ):
        return False
    try:
        change_constants(program, module)
    except ValueError as error:
        if "read-only" not in str(error):
            raise
        return False
    return True


def by_value_and_grad(program: Program, truth: Truth, wrap: Callable[[Any], Any] = lambda f: f) -> None:
    module, args = program.build(), program.arguments()
    function = wrap(module["program"])
    (value, outputs), gradients = xf.value_and_grad(weighted(function), argnums=(0, 1), has_aux=True)(*args)
    truth.check_outputs(outputs, truth.outputs())
    check_unchanged(program, module, args)
    check_value(value, program)
    truth.check_slope(gradients)


def check_value(value: Any, program: Program) -> None:
    expected = float(only_value(program.build()["program"])(*program.arguments()))
    if not np.isclose(float(value), expected, rtol=1e-5, atol=1e-5, equal_nan=True):
        raise Fault("value", f"value {float(value)}, expected {expected}")


def check_unchanged(program: Program, module: dict[str, Any], args: list[Any]) -> None:
    """Check that arguments and constants keep their values and stay writable."""
    arrays = {name: (module[name], program.constants[name]) for name in program.constants if not name.startswith("OUT")}
    arrays |= {name: (arg, host(x)) for name, arg, x in zip("xyn", args, program.arguments(), strict=True)}
    for name, (array, expected) in arrays.items():
        if not np.array_equal(host(array), expected):
            raise Fault("argument", f"{name} was changed to {host(array).tolist()}")
        if isinstance(array, np.ndarray) and not array.flags.writeable:
            raise Fault("argument", f"{name} was left read-only")


def by_vjp(program: Program, truth: Truth, *, change: bool = False) -> None:
    module, args = program.build(), program.arguments()
    value, pullback = xf.vjp(lambda x, y: only_value(module["program"])(x, y, args[2]), *args[:2])
    check_value(value, program)
    if change:
        try_to_change(program, module)
    truth.check_slope(pullback(value * 0.0 + 1.0))


def by_jit(program: Program, truth: Truth, *, differentiates: bool = False) -> None:
    """Call a jitted function, or the jitted derivative, with other values, and after its constants have changed."""
    module, eager, changes = program.build(), program.build(), 0
    function = module["program"]
    if differentiates:
        function = xf.value_and_grad(weighted(function), argnums=(0, 1), has_aux=True)
    jitted = xf.jit(function)
    for number in (0, 0, 1, 0, 2):
        args, expected = program.arguments(number), truth.outputs(number, eager)
        try:
            outputs = jitted(*args)
        except XformerError:
            if changes:
                return  # refused, since its constants have changed
            raise
        try:
            if differentiates:
                (_, outputs), gradients = outputs
                truth.check_slope(gradients, number, changes)
            truth.check_outputs(outputs, expected)
        except Fault as fault:
            kind = f"{fault.kind} {'after a change outside' if changes else 'of another call' * (number > 0)}".strip()
            raise Fault(kind, f"call {number}: {fault}") from None
        for name, arg, original in zip("xyn", args, program.arguments(number), strict=True):
            if not np.array_equal(host(arg), host(original)):
                raise Fault("argument", f"{name} was changed to {host(arg).tolist()}")
        if number == 1:
            if not try_to_change(program, module):
                return
            changes += 1
            change_constants(program, eager)


def by_jit_of_one_array(program: Program, truth: Truth) -> None:
    """Pass the same array twice."""
    if program.inputs[0].shape != program.inputs[1].shape:
        raise Skipped
    module, eager = program.build(), program.build()
    jitted = xf.jit(module["program"])
    for number in (0, 1, 0):
        x, _, n = program.arguments(number)
        expected = [host(output) for output in eagerly(eager["program"], x, x, n)]
        truth.check_outputs(jitted(x, x, n), expected)


def by_grad_of_jit(program: Program, truth: Truth) -> None:
    by_value_and_grad(program, truth, xf.jit)


def by_grad_of_grad(program: Program, truth: Truth) -> None:
    """Compare the derivative of a slope with differences of slopes."""
    if truth.has_float32:
        raise Skipped
    module, xp = program.build(), resolve(program.library)
    along = [xp.asarray(v) for v in directions(program.inputs[:2])]

    def slope(x: Any, y: Any, n: Any) -> Any:
        gradients = xf.grad(only_value(module["program"]), argnums=(0, 1))(x, y, n)
        space = array_namespace(x)
        return sum((space.sum(g * v) for g, v in zip(gradients, along, strict=True)), space.sum(x) * 0.0)

    def value(step: float) -> float:
        return float(slope(*program.arguments(0, step)))

    truth.check_slope(xf.grad(only_value(module["program"]), argnums=(0, 1))(*program.arguments()))
    estimates = [(value(step) - value(-step)) / (2 * step) for step in (1e-5, 5e-6)]
    if not np.allclose(estimates, estimates[0], rtol=1e-5, atol=1e-5):
        raise Skipped
    gradients = xf.grad(slope, argnums=(0, 1))(*program.arguments())
    terms = [host(g) * v for g, v in zip(gradients, directions(program.inputs[:2]), strict=True)]
    actual, scale = (sum(float(np.sum(f(term))) for term in terms) for f in (np.positive, np.abs))
    if not abs(actual - estimates[0]) <= 1e-4 * (1.0 + abs(estimates[0]) + scale):
        raise Fault("gradient", f"second slope {actual}, expected {estimates[0]}")


def by_donation(program: Program, truth: Truth, *, is_same: bool = False) -> None:
    """Call a function that writes into its first argument with one array several times; it may also be the second."""
    if is_same and program.inputs[0].shape != program.inputs[1].shape:
        raise Skipped
    module, eager = program.build(), program.build()
    jitted, (x, _, _), (a, _, _) = xf.jit(module["program"], donate_argnums=0), program.arguments(), program.arguments()
    for number in range(2 if is_same else 3):
        (_, y, n), (_, b, m) = (program.arguments(max(number - 1, 0)) for _ in range(2))
        expected = [host(output) for output in eagerly(eager["program"], a, a if is_same else b, m)]
        if not all(np.all(np.isfinite(value)) for value in (*expected, host(a))):
            return
        truth.check_outputs(jitted(x, x if is_same else y, n), expected)
        if not np.allclose(host(x), host(a), rtol=1e-10, atol=1e-10):
            raise Fault("argument", f"call {number}: x is {host(x).tolist()}, expected {host(a).tolist()}")


def by_argument(program: Program, truth: Truth) -> None:
    """Write into an argument that is not donated: it has the same values as without a transformation."""
    module, eager = program.build(), program.arguments()
    eagerly(program.build()["program"], *eager)
    functions = {
        "value_and_grad": xf.value_and_grad(only_value(module["program"]), argnums=(0, 1)),
        "vjp": lambda x, y, n: xf.vjp(lambda x, y: only_value(module["program"])(x, y, n), x, y),
        "jit": xf.jit(module["program"]),
    }
    for name, function in functions.items():
        args = program.arguments()
        result = function(*args)
        if name == "value_and_grad":
            check_value(result[0], program)
            truth.check_slope(result[1])
        elif name == "vjp":
            truth.check_slope(result[1](result[0] * 0.0 + 1.0))
        else:
            truth.check_outputs(result, truth.outputs())
        for argument, given, expected in zip("xyn", args, eager, strict=True):
            if not np.allclose(host(given), host(expected), rtol=1e-10, atol=1e-10):
                raise Fault("argument", f"{name}: {argument} is {host(given)}, expected {host(expected)}")


def by_errors(program: Program, truth: Truth) -> None:
    """Expect an error where eager execution raises one."""
    for name, transform in {
        "value_and_grad": lambda f: xf.value_and_grad(only_value(f), argnums=(0, 1)),
        "jit": xf.jit,
        "jit of grad": lambda f: xf.jit(xf.value_and_grad(only_value(f), argnums=(0, 1))),
    }.items():
        try:
            transform(program.build()["program"])(*program.arguments())
        except Exception:  # noqa: BLE001
            continue
        raise Fault("accepted", f"{name} accepted a statement that raises eagerly: {program.body[-1]}")


MODES: dict[str, Callable[[Program, Truth], None]] = {
    "value_and_grad": by_value_and_grad,
    "vjp": by_vjp,
    "jit": by_jit,
    "jit of one array twice": by_jit_of_one_array,
    "grad of jit": by_grad_of_jit,
    "jit of grad": functools.partial(by_jit, differentiates=True),
    "grad of grad": by_grad_of_grad,
    "vjp, constants written before the pullback": functools.partial(by_vjp, change=True),
}
MODES_OF = {
    "ordinary": tuple(MODES.items()),
    "donated": (
        ("donate", by_donation),
        ("donate twice", functools.partial(by_donation, is_same=True)),
        ("not donated", by_argument),
    ),
    "error": (("errors", by_errors),),
}


class Report(NamedTuple):
    """What `find_faults` found, by mode."""

    faults: dict[str, Fault]
    refusals: dict[str, XformerError]


def refusal(error: BaseException | None) -> XformerError | None:
    """Return an error of xformer, also if NumPy replaced it."""
    return error if error is None or isinstance(error, XformerError) else refusal(error.__cause__)


def check_message(error: XformerError | None) -> None:
    text = str(error.args[0]) if error is not None and error.args else ""
    if "\n" in text or len(text) > 400 or not re.search(r"; |use |pass |copy|expected|write ", text):
        raise Fault("message", f"the refusal is not one line that says what to do: {text!r}")


def find_faults(program: Program) -> Report:
    """Run a program in all modes."""
    truth, report = Truth(program), Report({}, {})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, run in MODES_OF[program.kind]:
            try:
                run(program, truth)
            except Skipped:
                continue
            except Fault as fault:
                report.faults[name] = fault
            except Exception as error:  # noqa: BLE001
                refused = refusal(error)
                try:
                    if refused is None:
                        place = traceback.extract_tb(error.__traceback__)[-1]
                        where = f"{place.filename.rsplit('xformer/', 1)[-1]}:{place.lineno}"
                        raise Fault("crash", f"{type(error).__name__}: {error} ({where})")
                    check_message(refused)
                    report.refusals[name] = refused
                except Fault as fault:
                    report.faults[name] = fault
    return report


def writes_argument(program: Program) -> bool:
    """Return whether the function writes into `x`."""
    args = program.arguments()
    if program.library == "numpy":
        args[0].flags.writeable = False
    try:
        program.build()["program"](*args)
    except EAGER_ERRORS:
        return True
    return getattr(args[0], "_version", 0) > 0


# --- running ----------------------------------------------------------------------------------------------------------


def run(library: str, seed: int, count: int) -> float:
    """Check random programs; return the share of ordinary ones that a mode refused without need."""
    number, ordinary, refused = 0, 0, 0
    while count:
        program = write_program(f"{seed}/{number}", library)
        number += 1
        if program is None:
            continue
        count -= 1
        report = find_faults(program)
        assert not report.faults, f"program {number - 1} of seed {seed}:\n{program.text}\n{report.faults}"
        ordinary += program.kind == "ordinary"
        errors = [str(error) for error in report.refusals.values() if not re.search(DOCUMENTED, str(error))]
        refused += program.kind == "ordinary" and bool(errors)
    return refused / max(1, ordinary)
