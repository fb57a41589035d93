"""Run data-apis/array-api-tests on the differentiating namespace, and compare with the namespace below it.

    python tests/conformance/run.py [--suite DIR] [--library NAME] [--max-examples N] [-k EXPRESSION] [--out FILE]

The gate is "no failure that the base namespace does not have": what the library itself fails is its own affair. Some
tests of the suite (test_special_cases) draw one example in a process, and not the same in the next; so what fails on
ours alone is tried on the base again, several times, until that fails too. The suite is taken from --suite, or the
environment variable XFORMER_ARRAY_API_TESTS, or cloned from GitHub at the pinned commit. --out writes the outcome of
each function, for the table of the documentation. Exit code 0: passed; 1: new failures; 2: the suite cannot be had, or
did not run.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from xformer.backends import resolve

HERE = Path(__file__).resolve().parent
REPOSITORY = "https://github.com/data-apis/array-api-tests"
COMMIT = (
    "55fcc60179efa2680ddd6cd926ddf17b83530e2b"  # its array-api submodule is 5f847a3858875c682ae901aa22b0413bf24be9da
)
OURS = "exec('import difftest; xp = difftest.xp')"
API_VERSION = "2024.12"
# Fewer VJPs than this mean that the suite ran on something that tracks nothing.
LEAST_VJPS_PER_EXAMPLE = 100
ATTEMPTS = 12

# Tests that fail on the differentiating namespace alone, each with its reason.
EXPECTED: dict[str, str] = {
    "test_dlpack.test_dunder_dlpack": "a tracked array refuses to leave its trace: it would lose its gradient silently",
}


class Outcome(NamedTuple):
    passed: list[str]
    failed: dict[str, str]
    skipped: list[str]

    def __str__(self) -> str:
        return f"{len(self.passed)} passed, {len(self.failed)} failed, {len(self.skipped)} skipped"


class Unavailable(Exception):
    """The suite cannot be had, or did not run; the message is one line."""


def suite_directory(given: str | None) -> Path:
    """Find the checkout of the suite, or make one."""
    if given:
        directory = Path(given).resolve()
        if not (directory / "array_api_tests").is_dir():
            raise Unavailable(f"{given} has no array_api_tests/; expected a checkout of {REPOSITORY}")
    else:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        directory = cache / "xformer" / f"array-api-tests-{COMMIT[:7]}"
        if not directory.is_dir():
            clone(directory)
    if not (directory / "array-api" / "src").is_dir():
        raise Unavailable(f"{directory}/array-api is empty; run: git -C {directory} submodule update --init")
    return directory


def clone(directory: Path) -> None:
    """Clone the suite at the pinned commit; nothing is left behind when that fails."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent) as scratch:
        checkout = Path(scratch) / "checkout"
        for command in (
            ["git", "clone", "--quiet", "--filter=blob:none", "--no-checkout", REPOSITORY, str(checkout)],
            ["git", "-C", str(checkout), "checkout", "--quiet", COMMIT],
            ["git", "-C", str(checkout), "submodule", "update", "--quiet", "--init"],
        ):
            try:
                quiet = {**os.environ, "GIT_TERMINAL_PROMPT": "0"}
                done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=quiet)
            except (OSError, subprocess.TimeoutExpired) as error:
                raise Unavailable(f"{REPOSITORY} cannot be cloned ({error}); pass --suite DIR") from error
            if done.returncode:
                reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
                raise Unavailable(f"{REPOSITORY} cannot be cloned ({reason}); pass --suite DIR")
        checkout.rename(directory)


def run_suite(
    suite: Path,
    module: str,
    options: argparse.Namespace,
    scratch: Path,
    tests: Sequence[str] = (),
    seed: int | None = None,
) -> tuple[Outcome, int]:
    """Run the suite, or some of its tests, on one namespace; return the outcome and the number of VJPs executed."""
    report, count = scratch / "report.xml", scratch / "count"
    count.write_text("0", encoding="utf-8")
    report.unlink(missing_ok=True)
    environment = {
        **os.environ,
        "ARRAY_API_TESTS_MODULE": module,
        "ARRAY_API_TESTS_VERSION": API_VERSION,
        "JAX_ENABLE_X64": "1",
        "HYPOTHESIS_STORAGE_DIRECTORY": str(scratch / "hypothesis"),
        "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]),
        "XFORMER_CONFORMANCE_COUNT": str(count),
        "XFORMER_CONFORMANCE_LIBRARY": options.library,
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=line", f"--junitxml={report}"]
    command += ["--disable-extension", "linalg", "fft", "--disable-deadline"]
    command += ["--derandomize"] if seed is None else ["--hypothesis-seed", str(seed)]
    command += ["--max-examples", str(options.max_examples), *(["-k", options.k] if options.k else [])]
    done = subprocess.run(
        [*command, *(tests or ["array_api_tests"])], cwd=suite, env=environment, capture_output=True, text=True
    )
    if not report.is_file() or done.returncode not in (0, 1):
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        raise Unavailable(f"the suite did not run on {module}: {' '.join(last)}")
    return read_report(report), int(count.read_text(encoding="utf-8"))


def failing_too(suite: Path, names: Sequence[str], options: argparse.Namespace, scratch: Path) -> list[str]:
    """Return the tests that also fail on the base namespace in one of several attempts."""
    passing = list(names)
    for seed in range(ATTEMPTS):
        if passing:
            outcome, _ = run_suite(
                suite, base_module(options), options, scratch, [node(name) for name in passing], seed
            )
            passing = [name for name in passing if name not in outcome.failed]
    return [name for name in names if name not in passing]


def node(name: str) -> str:
    """Return the pytest node id of a test of a report: "array_api_tests/test_module.py::test_name[parameters]"."""
    module, _, test = name.partition(".")
    return f"array_api_tests/{module}.py::{test}"


def read_report(path: Path) -> Outcome:
    """Read pytest's JUnit report: names are "test_module.test_name[parameters]"."""
    passed, failed, skipped = [], {}, []
    for case in ElementTree.parse(path).iter("testcase"):
        name = f"{case.get('classname', '').removeprefix('array_api_tests.')}.{case.get('name')}"
        trouble = [child for child in case if child.tag in ("failure", "error")]
        if trouble:
            failed[name] = (trouble[0].get("message") or "").splitlines()[0]
        elif case.find("skipped") is not None:
            skipped.append(name)
        else:
            passed.append(name)
    return Outcome(passed, failed, skipped)


def base_module(options: argparse.Namespace) -> str:
    """Return the module of the library below the differentiating namespace."""
    return str(resolve(options.library).__name__)


def outcome_of_functions(base: Outcome, ours: Outcome) -> dict[str, str]:
    """Return for each tested function "passes", "library fails" (without derivatives too), "fails" or "skipped"."""
    outcomes: dict[str, str] = {}
    numpy = resolve("numpy")  # has all functions of the standard; other tests are about dtypes, signatures and such
    for name in (*ours.skipped, *ours.passed, *ours.failed):
        function = re.sub(r"^test_\w+\.(?:Test\w+\.)?test_(\w+?)(?:\[.*)?$", r"\1", name, flags=re.DOTALL)
        worse = "skipped" if name in ours.skipped else "passes" if name in ours.passed else "library fails"
        worse = "fails" if worse == "library fails" and name not in base.failed else worse
        order = ("skipped", "passes", "library fails", "fails")
        outcomes[function] = max(outcomes.get(function, "skipped"), worse, key=order.index)
    return {name: outcome for name, outcome in sorted(outcomes.items()) if callable(getattr(numpy, name, None))}


def write_outcomes(path: Path, options: argparse.Namespace, base: Outcome, ours: Outcome) -> None:
    """Write the outcome of each function as JSON."""
    library = options.library.split(".")[0]
    report: dict[str, Any] = {"library": options.library, "version": importlib.metadata.version(library)}
    report |= {"max_examples": options.max_examples, "functions": outcome_of_functions(base, ours)}
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Run the Array API conformance suite on the differentiating namespace."
    )
    parser.add_argument("--suite", default=os.environ.get("XFORMER_ARRAY_API_TESTS"), help="a checkout of the suite")
    parser.add_argument("--max-examples", type=int, default=40, help="examples for each test (default 40)")
    parser.add_argument("--library", default="numpy", help="the library below the namespace (default numpy)")
    parser.add_argument("--out", type=Path, help="JSON file for the outcome of each function")
    parser.add_argument("-k", help="run only the tests that match, as in pytest")
    options = parser.parse_args()
    try:
        suite = suite_directory(options.suite)
        with tempfile.TemporaryDirectory() as scratch:
            base, _ = run_suite(suite, base_module(options), options, Path(scratch))
            ours, vjps = run_suite(suite, OURS, options, Path(scratch))
            new = sorted(ours.failed.keys() - base.failed.keys() - EXPECTED.keys())
            shared = failing_too(suite, new, options, Path(scratch))
            base.failed.update({name: ours.failed[name] for name in shared})
            if options.out is not None:
                write_outcomes(options.out, options, base, ours)
    except Unavailable as unavailable:
        print(f"error: {unavailable}", file=sys.stderr)
        return 2
    print(f"{base_module(options)}: {base}")
    print(f"differentiating namespace over it: {ours}, {vjps} VJPs executed")
    for name, reason in EXPECTED.items():
        print(f"{'expected failure' if name in ours.failed else 'did not fail'}: {name}: {reason}")
    for name in shared:
        print(f"fails on the base too, by chance: {name}")
    new = [name for name in new if name not in shared]
    for name in new:
        print(f"new failure: {name}: {ours.failed[name]}")
    if not options.k and vjps < LEAST_VJPS_PER_EXAMPLE * options.max_examples:
        print(f"only {vjps} VJPs were executed; expected {LEAST_VJPS_PER_EXAMPLE} for each of --max-examples")
        return 1
    print(
        f"{len(new)} failures that the base namespace does not have"
        if new
        else "no failure that the base does not have"
    )
    return 1 if new else 0


if __name__ == "__main__":
    sys.exit(main())
