from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from xformer.cli import main

ROOT = Path(__file__).parents[2]
HEAVY = {"array_api_compat", "jax", "matplotlib", "numpy", "sacrebleu", "safetensors", "tokenizers", "torch"}


def test_run_ends_the_process_with_the_exit_code():
    with pytest.raises(SystemExit) as ended:
        main.run(["translate", "--no-such-option"])
    assert ended.value.code == 2


def test_run_takes_the_arguments_of_the_process(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["xformer", "--version"])
    with pytest.raises(SystemExit) as ended:
        main.run()
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("xformer 0.")


@pytest.mark.parametrize("absent", ["typer", "rich"])
def test_without_the_extra_one_line_says_what_to_install(monkeypatch, capsys, absent):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == absent else find_spec(name))
    assert main.exit_code(["--help"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == f"error: xformer needs {absent}; run: pip install {absent}\n"


def test_help_loads_nothing_heavy():
    program = (
        "import json, sys\nfrom xformer.cli.main import exit_code\ncode = exit_code(['--help'])\n"
        "print(json.dumps([code, sorted(sys.modules)]), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    code, modules = json.loads(done.stderr)
    assert code == 0
    assert "typer" in modules
    assert HEAVY.intersection(modules) == set()


def test_the_package_is_a_program():
    done = subprocess.run(
        [sys.executable, "-m", "xformer", "--version"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("xformer ")


def test_a_terminal_without_our_letters_is_no_error():
    program = "from xformer.cli import main\nmain.exit_code = lambda arguments: print('zwölf →')\nmain.run()"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "zw?lf ?\n", "")


def test_a_closed_output_is_no_traceback(tmp_path):
    command = f'"{sys.executable}" -m xformer inspect "{tmp_path / "no"}" >&-'
    done = subprocess.run(
        ["sh", "-c", command], stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
