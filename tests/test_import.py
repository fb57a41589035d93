"""What a fresh interpreter imports, and the names of the package."""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import xformer

ROOT = Path(__file__).parents[1]

# Imported by the functions and commands that need them.
OPTIONAL = {
    *("array_api_strict", "cupy", "jax", "matplotlib", "mlflow", "rich", "sacrebleu", "tensorboardX", "tokenizers"),
    *("torch", "typer", "wandb", "safetensors"),
}


@pytest.mark.parametrize(
    ("statement", "loaded", "not_loaded"),
    [
        ("import xformer", "xformer", {*OPTIONAL, "numpy"}),
        ("from xformer import *", "xformer.training", OPTIONAL),
        ("from xformer.cli.main import exit_code; exit_code(['--version'])", "typer", {*OPTIONAL, "numpy"} - {"typer"}),
        ("from xformer.cli.main import exit_code; exit_code(['--help'])", "typer", {*OPTIONAL, "numpy"} - {"typer"}),
        (
            "from xformer.cli.main import exit_code; exit_code(['generate', '--help'])",
            "xformer.cli.generate",
            OPTIONAL - {"typer", "rich"} | {"xformer.cli.translate", "xformer.benchmarks"},
        ),
        (
            "from xformer.cli.main import exit_code; exit_code(['generate', '--model', '/nowhere', '--top-k', '3'])",
            "xformer.cli.generate",
            OPTIONAL - {"typer"} | {"pydantic", "rich.console"},
        ),
    ],
)
def test_a_fresh_interpreter_imports_no_more_than_it_needs(statement, loaded, not_loaded):
    program = f"{statement}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    modules = json.loads(done.stderr.splitlines()[-1])
    assert loaded in modules
    assert not_loaded.intersection(modules) == set()


def test_derivatives_and_programs_need_no_models():
    program = """
import json, sys
import numpy as np
before = {name.partition(".")[0] for name in sys.modules}
import xformer as xf
x = np.asarray([3.0, 4.0])
square = xf.jit(xf.vmap(lambda x: np.sum(x * x)))
assert np.all(xf.grad(lambda x: xf.array_namespace(x).sum(square(x)))(x) == xf.vjp(square, x)[1](np.ones(2))[0])
assert np.all(xf.jvp(np.sin, (x,), (x,))[1] == xf.jacobian(np.sin)(x) @ x)
assert xf.hessian(lambda x: x[0] ** 3)(x)[0, 0] == xf.hvp(lambda x: x[0] ** 3, (x,), (np.eye(2)[0],))[0] == 18.0
xf.Rng(0).normal((2,), 1.0)
own = [name.split(".")[1] for name in sys.modules if name.startswith("xformer.")]
print(json.dumps([own, [*{name.partition(".")[0] for name in sys.modules} - before - {*sys.stdlib_module_names}]]))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    own, packages = map(set, json.loads(done.stdout))
    few = {"backends", "environment", "errors", "hints", "html", "native", "random", "threads", "tracing", "tree"}
    assert own <= few
    packages -= {"einops", "opt_einsum"}  # which learn of traced arrays, if they are installed
    assert {name for name in packages if "cython" not in name} == {"array_api_compat", "xformer"}


def test_operations_are_imported_after_an_array_of_torch():
    pytest.importorskip("torch")
    program = """
import numpy as np
from xformer.backends import from_host, resolve
from xformer.tracing import grad
x = from_host(resolve("torch"), np.ones(2, "float32"))
print(grad(lambda x: (x * x)[0])(x).tolist())
from xformer import ops
print(ops.softmax(x).tolist())
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[2.0, 0.0]", "[0.5, 0.5]"]


def test_parts_of_numpy_that_are_not_used_are_imported_at_their_first_use():
    program = (
        "import sys\nimport numpy\nimport xformer\nxformer.array_namespace(numpy.zeros(2))\n"
        "before = 'unittest' in sys.modules, 'numpy.f2py.crackfortran' in sys.modules\n"
        "numpy.testing.assert_array_equal([1], [1])\nimport numpy.f2py\nprint(*before, numpy.f2py.run_main.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False", "run_main"]


def test_public_names_are_those_that_type_checkers_see():
    tree = ast.parse(Path(xformer.__file__).with_suffix(".pyi").read_text())
    seen = {"__version__"}
    for statement in (node for node in tree.body if isinstance(node, ast.ImportFrom)):
        for alias in statement.names:
            assert alias.asname == alias.name  # or checkers take it for a private import
            assert getattr(xformer, alias.name) is getattr(importlib.import_module(statement.module), alias.name)
            seen.add(alias.name)
    assert seen == set(xformer.__all__)
    assert seen <= set(dir(xformer))


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("Sinusoidal", "; use xformer.layers.Sinusoidal"),
        ("AutoModel", "; use xformer.load_pretrained(path)"),
        ("TransformerEncoderLayer", "; use xformer.EncoderLayer"),
        ("EarlyStopping", "; use xformer.early_stopping(patience), and keep_best=True of xformer.fit"),
        ("nothing", ""),
        ("__nothing__", ""),
    ],
)
def test_the_error_for_a_name_that_is_absent(name, hint):
    with pytest.raises(AttributeError, match=re.escape(f"module 'xformer' has no attribute {name!r}{hint}") + "$"):
        getattr(xformer, name)
