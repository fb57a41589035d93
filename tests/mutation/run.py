"""Mutation testing: change one place of the source at a time, and run the tests that execute it.

    python tests/mutation/run.py [--seed N] [--count N] [--only ID ...] [--seconds N] [--out FILE]

The first call runs the fast tests of `FOLDERS` and keeps in `.cache/mutation.json` which of them execute each line;
delete this file after a change. Then each mutant is a forked process, in which the code of live functions is replaced;
one that changes what runs at import starts before the package is imported. It runs tests, those of the module and the
quick ones first, until one fails. A minute of computation or a crash also kills a mutant. No file is changed, so
processes that tests start run the unchanged code. At the end, the tests that killed mutants run on unchanged code.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import gc
import importlib.machinery
import importlib.util
import inspect
import json
import os
import random
import re
import resource
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache" / "mutation.json"
PACKAGES = ("ops", "kernels", "tracing", "generation", "training")
EXCLUDED = ("cupy", "torch.py", "checks.py")
PRELOADED = ("array_api_compat.torch", "array_api_strict", "ml_dtypes", "safetensors.numpy")
FOLDERS = [
    str(ROOT / "tests" / name)
    for name in ("ops", "tracing", "generation", "training", "layers", "models", "test_wrong_calls.py")
]
OPTIONS = ["-q", *("-p", "no:cacheprovider"), *("-p", "no:xdist"), "--hypothesis-seed=0", "-k", "not jax"]
OPTIONS += [f"--ignore={ROOT / 'tests' / 'ops' / '_cupy'}"]
KEPT_KEYWORDS = ("help", "stacklevel", "strict")  # strict=True of zip checks what cannot differ
COMPARISONS = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
COMPARISONS |= {ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In}
ARITHMETIC = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult}
ARITHMETIC |= {ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.MatMult: ast.Mult, ast.BitAnd: ast.BitOr}


class Mutant(NamedTuple):
    """One change: of node `number` of `ast.walk`, to the alternative `choice`."""

    path: str
    number: int
    choice: int
    line: int
    text: str

    @property
    def id(self) -> str:
        return f"{self.path}:{self.number}:{self.choice}"


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what may replace a node."""
    if isinstance(node, ast.Compare):
        for index, operator in enumerate(node.ops):
            yield replaced(node, "ops", index, COMPARISONS[type(operator)]())
    elif isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in ARITHMETIC:
        yield replaced(node, "op", None, ARITHMETIC[type(node.op)]())
    elif isinstance(node, ast.BoolOp):
        yield replaced(node, "op", None, ast.And() if isinstance(node.op, ast.Or) else ast.Or())
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield node.operand
    elif isinstance(node, ast.If | ast.IfExp | ast.While) and not isinstance(node.test, ast.Compare):
        yield replaced(node, "test", None, ast.UnaryOp(ast.Not(), node.test))
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield ast.Constant(node.value + 1)
        if node.value == 1:
            yield ast.Constant(0)
    elif isinstance(node, ast.Slice):
        for name in ("lower", "upper", "step"):
            if getattr(node, name) is not None:
                yield replaced(node, name, None, None)
    elif isinstance(node, ast.Return) and node.value is not None and ast.unparse(node.value) != "None":
        yield ast.Return(ast.Constant(None))
    if isinstance(node, ast.Call):
        for index, keyword in enumerate(node.keywords):
            if keyword.arg and keyword.arg not in KEPT_KEYWORDS:
                yield replaced(node, "keywords", index, None)
    if isinstance(node, ast.AugAssign | ast.Raise) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        yield ast.Pass()


def replaced(node: ast.AST, field: str, index: int | None, value: Any) -> ast.AST:
    """Return a copy of a node with another field, or another item of a list (None: without it)."""
    node = copy.copy(node)
    if index is not None:
        items = list(getattr(node, field))
        items[index : index + 1] = [] if value is None else [value]
        value = items
    setattr(node, field, value)
    return node


def excluded_nodes(tree: ast.Module) -> set[ast.AST]:
    """Return the nodes of annotations, messages, logging, decorators and code for type checkers."""
    roots: list[Any] = []
    for node in ast.walk(tree):
        roots += [getattr(node, "annotation", None), getattr(node, "returns", None)]
        roots += getattr(node, "decorator_list", [])
        if isinstance(node, ast.JoinedStr | ast.Import | ast.ImportFrom):
            roots.append(node)
        elif isinstance(node, ast.Raise):
            roots.append(node.exc)
        elif isinstance(node, ast.stmt) and ast.unparse(node).startswith(("_LOG.", "warnings.", "if TYPE_CHECKING")):
            roots.append(node)
    return {node for root in roots if root is not None for node in ast.walk(root)}


def sources() -> list[str]:
    """Return the files that are changed."""
    files = [file.relative_to(ROOT) for name in PACKAGES for file in sorted((ROOT / "xformer" / name).rglob("*.py"))]
    return [str(file) for file in files if not {*file.parts} & {*EXCLUDED}]


def module_name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def mutants_of(path: str) -> Iterator[Mutant]:
    """Yield all mutants of a file."""
    tree = ast.parse((ROOT / path).read_text())
    excluded = excluded_nodes(tree)
    for number, node in enumerate(ast.walk(tree)):
        if node not in excluded:
            for choice, change in enumerate(changes(node)):
                old, new = ast.unparse(node), ast.unparse(change)
                old, new = (" ".join(text.split()) for text in (old, new))
                yield Mutant(path, number, choice, node.lineno, f"{old[:200]}  ->  {new[:200]}")


def mutated(tree: ast.Module, mutant: Mutant) -> ast.Module:
    """Apply a mutant to the syntax tree of its file."""
    target = list(ast.walk(tree))[mutant.number]
    change = ast.copy_location(list(changes(target))[mutant.choice], target)
    for node in ast.walk(tree):
        for field, value in ast.iter_fields(node):
            if value is target:
                setattr(node, field, change)
            elif isinstance(value, list) and any(item is target for item in value):
                value[:] = [change if item is target else item for item in value]
    return ast.fix_missing_locations(tree)


class Recorder:
    """A plugin that measures tests and keeps those that fail; `loop` replaces the loop over all tests."""

    def __init__(self, coverage: Any = None, loop: Callable[[pytest.Session], None] | None = None) -> None:
        self.coverage, self.loop, self.start = coverage, loop, 0.0
        self.durations: dict[str, float] = {}
        self.failed: list[str] = []

    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if self.loop is None:
            return None
        self.loop(session)
        return True

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:  # the import of a file of tests
            self.failed.append("import")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.start = time.process_time()
        if self.coverage is not None:
            self.coverage.switch_context(nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.durations[nodeid] = round(time.process_time() - self.start, 4)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)

    def run(self, session: pytest.Session, tests: list[str]) -> str:
        """Run tests until one fails; return its name, or ""."""
        items = {item.nodeid: item for item in session.items}
        chosen = [items[test] for test in tests if test in items]
        for item, following in zip(chosen, [*chosen[1:], None], strict=True):
            if not self.failed:
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        return "".join(self.failed[:1])


def record() -> None:
    """Run the tests once, and write their durations and the tests that execute each line; "" is the import."""
    import coverage

    measured = coverage.Coverage(data_file=None, include=[str(ROOT / "xformer" / name / "*") for name in PACKAGES])
    recorder = Recorder(measured)
    measured.start()
    for path in sources():
        importlib.import_module(module_name(path))
    check_status(pytest.main([*OPTIONS, *FOLDERS], plugins=[recorder]))
    measured.stop()
    data = measured.get_data()
    lines = {
        str(Path(file).relative_to(ROOT)): {
            line: [test for test in tests if test not in recorder.failed]
            for line, tests in data.contexts_by_lineno(file).items()
        }
        for file in data.measured_files()
    }
    CACHE.parent.mkdir(exist_ok=True)
    CACHE.write_text(json.dumps({"durations": recorder.durations, "lines": lines}))


def check_status(status: int) -> None:
    """Exit unless pytest could collect and run the tests, even if some failed."""
    if status > pytest.ExitCode.TESTS_FAILED:
        sys.exit(f"pytest ended with status {status}; expected tests that can be collected")


def plan(mutant: Mutant, recorded: dict[str, Any], seconds: float) -> tuple[list[str], bool]:
    """Return the tests to run, and whether the line is executed by imports."""
    lines, durations = recorded["lines"].get(mutant.path, {}), recorded["durations"]
    tests = set(lines.get(str(mutant.line), ()))
    for node in ast.walk(ast.parse((ROOT / mutant.path).read_text())):  # a part of a statement may have no line
        if not tests and isinstance(node, ast.stmt) and not hasattr(node, "body"):
            span = range(node.lineno, (node.end_lineno or 0) + 1)
            tests = {test for line in span for test in lines.get(str(line), ()) if mutant.line in span}
    by_import = "" in tests
    if not tests - {""}:
        tests = {test for each in lines.values() for test in each}
    parts = set(re.findall(r"\w+", mutant.path))

    def order(test: str) -> tuple[int, float, str]:
        names = re.findall(r"\w+", test.split("::")[0].replace("test_", ""))
        return -len(parts.intersection(names)), durations.get(test, 0), test

    chosen = []
    for test in sorted(tests - {""}, key=order):
        seconds -= durations.get(test, 0)
        if seconds > 0:
            chosen.append(test)
    return chosen, by_import


def identity(code: CodeType) -> tuple[Any, ...]:
    """Return what the code of two different functions does not share."""
    return code.co_filename, code.co_qualname, code.co_firstlineno, code.co_code, code.co_linetable


def codes(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of functions, and what is defined in them."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from codes(constant)


def changed_functions(mutant: Mutant) -> dict[tuple[Any, ...], CodeType]:
    """Return the new code of functions that a mutant changes; none if it changes what runs at import."""
    file = str(ROOT / mutant.path)
    source = Path(file).read_text()
    old, new = compile(source, file, "exec"), compile(mutated(ast.parse(source), mutant), file, "exec")
    pairs = list(zip(codes(old), codes(new), strict=False))
    same = [a.co_qualname for a, _ in pairs] == [b.co_qualname for b in codes(new)]
    changed = {identity(a): b for a, b in pairs if a != b and a.co_flags & inspect.CO_OPTIMIZED}
    is_free = all(a.co_freevars == b.co_freevars for a, b in pairs)
    return changed if same and is_free and old.co_code == new.co_code else {}


class Finder:
    """Import one module from a changed syntax tree."""

    def __init__(self, mutant: Mutant) -> None:
        self.mutant, self.name = mutant, module_name(mutant.path)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self.name:
            return None
        file = str(ROOT / self.mutant.path)
        loader = importlib.machinery.SourceFileLoader(name, file)
        code = compile(mutated(ast.parse(Path(file).read_text()), self.mutant), file, "exec")
        loader.get_code = lambda fullname: code  # type: ignore[method-assign]
        return importlib.util.spec_from_file_location(name, file, loader=loader)


def outcome(kill: Callable[[], str]) -> str:
    """Call `kill` in a forked process; return the test that fails, "timeout or crash", or "" if the mutant survives."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (60, 65))
        silent = os.open(os.devnull, os.O_RDWR)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        failed = "error"
        try:
            failed = kill()
        finally:
            os.write(write, failed.encode())
            os._exit(0)
    os.close(write)
    deadline = time.monotonic() + 900  # waiting takes no computation
    ended = status = 0
    while not ended and time.monotonic() < deadline:
        time.sleep(0.02)
        ended, status = os.waitpid(child, os.WNOHANG)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if not ended:
        os.waitpid(child, 0)
    result = os.read(read, 1000).decode()
    os.close(read)
    return result if ended and not status else "timeout or crash"


def kill_at_import(mutant: Mutant, tests: list[str]) -> str:
    """Import the changed module, and run the tests; only those of the first files, since collecting takes time."""
    sys.meta_path.insert(0, Finder(mutant))  # type: ignore[arg-type]
    files = list(dict.fromkeys(test.split("::")[0] for test in tests))[:8]
    loaded = []
    recorder = Recorder(loop=lambda session: loaded.append(recorder.run(session, tests)))
    pytest.main([*OPTIONS, *files], plugins=[recorder])
    return loaded[0] if loaded else "import"


def main() -> None:
    """Choose mutants, run them, and print those that survive."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--only", nargs="*", help="ids of mutants, instead of random ones")
    parser.add_argument("--seconds", type=float, default=20, help="of the tests of a mutant")
    parser.add_argument(
        "--out", type=Path, default=CACHE.with_name("mutants.jsonl"), help="a JSON line for each mutant"
    )
    arguments = parser.parse_args()
    arguments.out.unlink(missing_ok=True)
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    if not CACHE.exists():
        in_process(record)
    recorded = json.loads(CACHE.read_text())
    everything = [mutant for path in sources() for mutant in mutants_of(path)]
    if arguments.only is None:
        chosen = random.Random(arguments.seed).sample(everything, arguments.count)
    else:
        chosen = [mutant for mutant in everything if mutant.id in arguments.only]
    print(f"{len(chosen)} of {len(everything)} mutants", flush=True)
    for name in PRELOADED:
        if importlib.util.find_spec(name.split(".")[0]):
            importlib.import_module(name)
    plans = {mutant: plan(mutant, recorded, arguments.seconds) for mutant in chosen}
    functions = {mutant: {} if plans[mutant][1] else changed_functions(mutant) for mutant in chosen}

    def report(mutant: Mutant, kill: Callable[[], str]) -> str:
        failed = outcome(kill) if plans[mutant][0] else ""
        with arguments.out.open("a") as file:
            print(json.dumps(mutant._asdict() | {"failed": failed}), file=file)
        if not failed:
            print(f"survived {mutant.id} line {mutant.line}, {len(plans[mutant][0])} tests: {mutant.text}", flush=True)
        return failed

    def loop(session: pytest.Session) -> None:
        for path in sources():  # kernels are imported at their first use
            importlib.import_module(module_name(path))
        live: dict[tuple[Any, ...], list[Any]] = defaultdict(list)
        for each in gc.get_objects():
            if type(each) is FunctionType:
                live[identity(each.__code__)].append(each)
        gc.freeze()

        def kill(mutant: Mutant) -> str:
            for old, new in functions[mutant].items():
                for function in live[old]:
                    function.__code__ = new
            return recorder.run(session, plans[mutant][0])

        killers = [report(mutant, partial(kill, mutant)) for mutant in chosen if functions[mutant]]
        for killer in sorted({*killers} - {""}):
            if failed := outcome(partial(recorder.run, session, [killer])):
                print(f"{failed} also fails on unchanged code")

    recorder = Recorder(loop=loop)
    files = sorted({test.split("::")[0] for mutant in chosen if functions[mutant] for test in plans[mutant][0]})
    if files:
        in_process(lambda: check_status(pytest.main([*OPTIONS, "-s", *files], plugins=[recorder])))
    for mutant in chosen:
        if not functions[mutant]:
            report(mutant, partial(kill_at_import, mutant, plans[mutant][0]))
    results = [json.loads(line)["failed"] for line in arguments.out.read_text().splitlines()]
    counts = Counter("survived" if not failed else "killed" if "::" in failed else failed for failed in results)
    print(", ".join(f"{number} {name}" for name, number in counts.items()))


def in_process(function: Callable[[], Any]) -> None:
    """Call a function in a forked process, since this one imports nothing of xformer."""
    child = os.fork()
    if not child:
        function()
        sys.stdout.flush()
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(1)


if __name__ == "__main__":
    main()
