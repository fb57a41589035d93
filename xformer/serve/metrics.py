"""Counters and histograms of a server, in the text format of Prometheus."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable

_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)  # seconds
_Labels = tuple[tuple[str, str], ...]


class Metrics:
    """What a server has counted and measured; threads may share it."""

    def __init__(self) -> None:
        self._values: dict[str, dict[_Labels, float]] = defaultdict(lambda: defaultdict(float))
        self._kinds: dict[str, str] = {}
        self._lock = threading.Lock()

    def add(self, name: str, value: float = 1.0, **labels: str) -> None:
        """Increase a counter."""
        with self._lock:
            self._kinds[name] = "counter"
            self._values[name][tuple(labels.items())] += value

    def observe(self, name: str, seconds: float, **labels: str) -> None:
        """Add a duration to a histogram."""
        with self._lock:
            self._kinds[name] = "histogram"
            for bound in [*map(str, _BUCKETS), "+Inf"]:
                self._values[f"{name}_bucket"][(*labels.items(), ("le", bound))] += seconds <= float(bound)
            self._values[f"{name}_sum"][tuple(labels.items())] += seconds
            self._values[f"{name}_count"][tuple(labels.items())] += 1

    def text(self, measured: Iterable[tuple[str, str, str, float]] = ()) -> str:
        """Return all values, and those that are measured now: name, kind, model and value of each."""
        with self._lock:
            kinds, values = dict(self._kinds), {name: dict(rows) for name, rows in self._values.items()}
        for name, kind, model, value in measured:
            kinds[name] = kind
            values.setdefault(name, {})[("model", model),] = value
        lines = []
        for name, kind in kinds.items():
            lines.append(f"# TYPE {name} {kind}")
            for part in [f"{name}{end}" for end in ("_bucket", "_sum", "_count")] if kind == "histogram" else [name]:
                for labels, value in values[part].items():
                    shown = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels)
                    lines.append(f"{part}{{{shown}}} {value:.10g}")
        return "".join(f"{line}\n" for line in lines)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
