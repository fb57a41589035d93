"""What errors say of packages that are not there is what pyproject.toml asks for."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from xformer.errors import how_to_install

EXTRAS = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@pytest.mark.parametrize(
    ("package", "extra"), [("cupy", "cuda"), ("cudnn", "cudnn"), ("torch", "torch"), ("jax", "jax")]
)
def test_what_to_install_is_what_the_extra_brings(package, extra):
    names = [re.split("[<>=]", requirement)[0] for requirement in EXTRAS[extra]]
    assert how_to_install(package).replace("'", "") == f"run: pip install {' '.join(names)}"
