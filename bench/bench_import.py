"""What `import xformer` costs, and how large the wheel is.

    pytest bench/bench_import.py --benchmark-only -s            # or, for the table alone:
    python bench/bench_import.py [--turns N]

The time is that of a fresh interpreter that imports xformer, less that of one that does nothing, in turns; the budget
is 100 ms. The wheel is built without network access, so hatchling must be installed; its budget is 300 kB.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import race

TURNS = 15


def interpreter_seconds(program: str) -> float:
    """How long a fresh interpreter takes to run a program, from start to exit."""
    # With bytecode, as an installed package has it, also where the environment forbids to write any.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", program], cwd=race.ROOT, env=environment, check=True)
    return time.perf_counter() - start


def import_seconds() -> float:
    """Seconds that importing xformer adds to Python's own start."""
    return interpreter_seconds("import xformer") - interpreter_seconds("pass")


def wheel_bytes() -> int:
    """Size of the wheel of this checkout."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
        subprocess.run([*command, "--wheel-dir", folder, str(race.ROOT)], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        return wheel.stat().st_size


def test_import(benchmark: Any) -> None:
    found = []
    benchmark.pedantic(lambda: found.append(import_seconds()), rounds=TURNS, warmup_rounds=1)
    benchmark.extra_info["import_ms"] = 1e3 * statistics.median(found)
    print(f"\n{race.machine()}\nimport xformer: {benchmark.extra_info['import_ms']:.0f} ms")


def test_wheel(benchmark: Any) -> None:
    if importlib.util.find_spec("hatchling") is None:
        pytest.skip("building the wheel needs hatchling")
    size = benchmark.pedantic(wheel_bytes, rounds=1)
    benchmark.extra_info["wheel_bytes"] = size
    print(f"\nwheel: {size} bytes")


def main() -> None:
    turns = race.turns(__doc__, TURNS)
    import_seconds()
    times = sorted(1e3 * import_seconds() for _ in range(turns))
    print(race.machine())
    spread = f"{times[0]:.0f} to {times[-1]:.0f} in {turns} turns"
    print(f"import xformer, beyond Python's start: {statistics.median(times):.0f} ms ({spread})")
    print(f"wheel: {wheel_bytes() / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
