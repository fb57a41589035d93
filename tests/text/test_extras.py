import sys

import pytest

from xformer.errors import BackendError
from xformer.text import extras


def test_require_returns_the_package():
    assert extras.require("json").loads("[1]") == [1]


def test_require_says_how_to_install_a_missing_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(
        BackendError, match=r"'tokenizers' cannot be imported .*pip install \"array-transformers\[chat\]\""
    ):
        extras.require("tokenizers")


def test_require_explains_a_broken_package(monkeypatch, tmp_path):
    (tmp_path / "broken_package.py").write_text("raise ImportError('libbroken.so: no such file')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BackendError, match=r"libbroken\.so: no such file"):
        extras.require("broken_package")
