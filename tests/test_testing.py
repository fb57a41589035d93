"""`check_backend` on libraries that follow the standard, and on some that lack a part of it."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import time
import types
from pathlib import Path

import array_api_strict
import pytest

from tests.reference import raises_line
from xformer.backends import array_namespace, resolve, to_host
from xformer.errors import BackendError, ConfigError
from xformer.testing import GROUPS, check_backend

STRICT = resolve("array_api_strict")
LIBRARIES = {"torch": "torch", "array_api_strict": "array_api_strict", "mlx": "mlx.core"}


@pytest.mark.parametrize("library", LIBRARIES)
def test_all_checks_pass(library):
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    report = check_backend(LIBRARIES[library])
    assert report.passed, str(report)
    assert report.library == library
    assert len(report.checks) == 32
    assert json.loads(report.to_json())["passed"] is True


def test_the_version_is_that_of_the_library():
    dask = pytest.importorskip("dask")
    report = check_backend("dask.array", groups=["other"])
    assert (report.library, report.version) == ("dask.array", dask.__version__)


def library_without(*names):
    """Return a module with the functions of array_api_strict except some."""
    module = types.ModuleType("incomplete")
    members = {name: getattr(array_api_strict, name) for name in dir(array_api_strict) if not name.startswith("__")}
    module.__dict__.update({name: member for name, member in members.items() if name not in names})
    return module


def test_a_library_that_lacks_what_nothing_can_replace_is_refused():
    with raises_line(BackendError, r"another module that follows the Array API standard; it lacks matmul, take; "):
        check_backend(library_without("matmul", "take"))


def test_a_failure_names_the_function_and_the_line(monkeypatch):
    for module in (array_api_strict, STRICT):
        monkeypatch.delattr(module, "tanh")
    report = check_backend("array_api_strict", groups=["gradients"])
    failures = [check for check in report.checks if check.status == "fails"]
    assert "second derivative" in [check.name for check in failures]
    assert all("has no attribute 'tanh'" in check.detail for check in failures)
    assert failures[0].where.startswith("xformer/")
    assert "tanh" in report.missing
    assert not report.passed


def test_a_wrong_result_is_found(monkeypatch):
    sqrt = array_api_strict.sqrt
    monkeypatch.setattr(STRICT, "sqrt", lambda x: sqrt(x) * 1.001)
    report = check_backend("array_api_strict", groups=["forward"])
    assert {check.status for check in report.checks} == {"differs"}
    assert "from NumPy, expected at most 1e-05" in str(report)


def test_take_along_axis_is_composed():
    xp = resolve(library_without("take_along_axis"))
    x = array_api_strict.reshape(array_api_strict.arange(24), (2, 3, 4))
    for axis, indices in ((-1, [[[3], [0], [-1]], [[1], [2], [3]]]), (1, [[[2, 0, 1, -1]], [[0, 0, -3, 1]]])):
        indices = array_api_strict.asarray(indices)
        expected = array_api_strict.take_along_axis(x, indices, axis=axis)
        assert to_host(xp.take_along_axis(x, indices, axis=axis)).tolist() == to_host(expected).tolist()
    assert array_namespace(x) is STRICT


@pytest.mark.parametrize(
    ("xp", "options", "message"),
    [
        ("numpy", {"groups": ["speed"]}, "group is 'speed'; expected one of forward, gradients, training"),
        ("numpy", {"groups": "speed"}, "group is 'speed'; expected one of forward, gradients, training"),
        ("numpy", {"groups": []}, "group is None; expected one of forward, gradients, training"),
        ("numpy", {"skip_dtypes": ["half"]}, "skipped dtype is 'half'; expected one of float16, bfloat16, float64"),
        ("numpy", {"time_limit": -1.0}, "time_limit is -1.0; expected a number above 0"),
        ("numpy.linalg", {}, "xp is the module numpy.linalg; expected numpy"),
    ],
)
def test_what_cannot_be_checked_is_refused(xp, options, message):
    with pytest.raises((ConfigError, BackendError), match=message):
        check_backend(xp, **options)


def test_a_check_that_takes_too_long_fails(monkeypatch):
    def wait(x):
        while True:
            with contextlib.suppress(Exception):
                time.sleep(0.01)

    monkeypatch.setattr(STRICT, "sqrt", wait)
    report = check_backend("array_api_strict", groups=["forward"], time_limit=0.1)
    assert {(check.status, check.detail) for check in report.checks} == {("fails", "not finished after 0.1 s")}
    assert report.checks[0].where.startswith("xformer/")
    assert not any("_TimeLimit" in check.where for check in report.checks)


def test_every_call_and_part_passes_on_the_strict_library_and_can_be_repeated():
    report = check_backend("array_api_strict", groups=["functions", "derivatives", "parts"])
    failed = [check.name for check in report.checks if check.status != "ok"]
    assert failed in ([], ["xp.isin(i, i, invert=True)"]), str(report)  # which 2.6.1 ignores
    assert (len(report.checks), report.missing) == (181, ())
    for check in report.checks:
        if check.group != "parts":
            exec(check.reproduction.removeprefix('python -c "').removesuffix('"'), {})
    assert report.to_markdown().count("\n| ") == 17


def test_dtypes_can_be_skipped():
    report = check_backend("array_api_strict", groups=["dtypes"], skip_dtypes=["float64", "float16"])
    assert [check.name for check in report.checks] == ["bfloat16", "fit(precision='bfloat16')"]


LIBRARY = """
from array_api_strict import *
import array_api_strict as _strict

del tanh

def sqrt(x):
    return _strict.sqrt(x) * 1.01

def ceil(x):
    return _strict.astype(_strict.ceil(x), _strict.float64)

def meshgrid(*arrays):
    return list(_strict.meshgrid(*arrays))

def take(x, indices, axis):
    raise RuntimeError("out of memory")
"""
REPORT = """\
### Missing functions (1)

- AttributeError: module 'mylibrary' has no attribute 'tanh': `xp.tanh(x)` (functions)
  `python -c "import mylibrary as xp; x = xp.asarray([[0.5, -1.5, 2.0], [1.0, 0.25, -0.75]], dtype=xp.float32); \
print(xp.tanh(x))"`

### Exceptions (1)

- RuntimeError: out of memory: `xp.take(x, i, axis=1)` (functions)
  `python -c "import mylibrary as xp; x = xp.asarray([[0.5, -1.5, 2.0], [1.0, 0.25, -0.75]], dtype=xp.float32); \
i = xp.asarray([1, 0]); print(xp.take(x, i, axis=1))"`

### Wrong dtypes (1)

- dtype float64, expected float32: `xp.ceil(x)` (functions)
  `python -c "import mylibrary as xp; x = xp.asarray([[0.5, -1.5, 2.0], [1.0, 0.25, -0.75]], dtype=xp.float32); \
print(xp.ceil(x))"`

### Wrong values (3)

- 0.01 from NumPy, expected at most 1e-05: `xp.sqrt(y)` (functions)
  `python -c "import mylibrary as xp; y = xp.asarray([[2.0, 0.5, 1.5], [0.25, 3.0, 1.0]], dtype=xp.float32); \
print(xp.sqrt(y))"`
- 1 from NumPy, expected at most 1e-05: `xp.isin(i, i, invert=True)` (functions)
  `python -c "import mylibrary as xp; i = xp.asarray([1, 0]); print(xp.isin(i, i, invert=True))"`
- returns a list, expected a tuple: `xp.meshgrid(i, i)` (functions)
  `python -c "import mylibrary as xp; i = xp.asarray([1, 0]); print(xp.meshgrid(i, i))"`
"""


def run_pytest(folder, *arguments):
    """Run pytest in a folder; return the exit code and the output."""
    (folder / "mylibrary.py").write_text(LIBRARY)
    (folder / "test_own.py").write_text("def test_own():\n    pass\n")
    command = [sys.executable, "-m", "pytest", "-p", "xformer.pytest_plugin", "-p", "no:cacheprovider", *arguments]
    path = os.pathsep.join([str(folder), str(Path(__file__).parents[1])])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_the_plugin_reports_failures_by_cause(tmp_path):
    code, output = run_pytest(
        tmp_path, "--xformer-library", "mylibrary", "-k", "functions or norm", "--xformer-report", "r.md"
    )
    assert code == 1
    assert "6 failed, 98 passed" in output
    assert "FAILED xformer::mylibrary functions: xp.tanh(x)" in output
    report = (tmp_path / "r.md").read_text()
    assert report in output
    assert report.startswith("## mylibrary\n")
    assert REPORT in report
    assert [line.split(" |")[0] for line in report.splitlines() if line.startswith("| norm")] == [
        "| norm",
        "| norm, backward",
    ]


def test_the_plugin_adds_checks_to_paths_and_does_nothing_without_a_library(tmp_path):
    options = "--xformer-library", "numpy", "--xformer-skip-dtype", "float16", "--collect-only", "-q"
    assert "\n211 tests collected" in run_pytest(tmp_path, *options)[1]
    assert "\n212 tests collected" in run_pytest(tmp_path, *options, "test_own.py")[1]
    assert "\n1 test collected" in run_pytest(tmp_path, "--collect-only", "-q")[1]
    code, output = run_pytest(tmp_path, "--xformer-library", "math")
    assert code == 2
    assert "it lacks abs, arange" in output
    assert "Traceback" not in output


def test_the_plugin_refuses_a_report_that_cannot_be_written(tmp_path):
    done = run_pytest(tmp_path, "--xformer-library", "array_api_strict", "--xformer-report", "none/r.md")
    assert "--xformer-report is none/r.md; expected a file in a directory that exists" in done[1]


def test_the_plugin_imports_no_array_library():
    code = "import sys, xformer.pytest_plugin; print({'numpy', 'xformer.testing'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_groups_by_default_are_whole_models():
    assert GROUPS[-3:] == ("functions", "derivatives", "parts")
    with raises_line(ConfigError, "expected one of forward, gradients, .*, derivatives, parts"):
        check_backend("numpy", groups=["x"])
