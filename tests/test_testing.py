"""`check_backend` on libraries that follow the standard, and on some that lack a part of it."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import time
import types

import array_api_strict
import pytest

from tests.reference import raises_line
from xformer.backends import array_namespace, resolve, to_host
from xformer.errors import BackendError, ConfigError
from xformer.testing import check_backend

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


def test_unknown_groups_are_refused():
    with raises_line(ConfigError, "group is 'speed'; expected one of forward, gradients, training"):
        check_backend("numpy", groups=["speed"])


def test_a_check_that_takes_too_long_fails(monkeypatch):
    def wait(x):
        while True:
            with contextlib.suppress(Exception):
                time.sleep(0.01)

    monkeypatch.setattr(STRICT, "sqrt", wait)
    report = check_backend("array_api_strict", groups=["forward"], time_limit=0.1)
    assert {(check.status, check.detail) for check in report.checks} == {("fails", "not finished after 0.1 s")}
    assert report.checks[0].where.startswith("xformer/")
