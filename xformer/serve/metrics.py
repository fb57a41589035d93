"""Counters and histograms of a server, in the text format of Prometheus."""

from __future__ import annotations

import json
import re
import threading
from collections import defaultdict
from collections.abc import Iterable

_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)  # seconds


class Metrics:
    """Counters and histograms of a server; threads may share them."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = defaultdict(float)
        self._lock = threading.Lock()

    def add(self, name: str, value: float = 1.0, **labels: str) -> None:
        """Increase a counter, whose name ends in _total."""
        with self._lock:
            self._values[name, tuple(labels.items())] += value

    def observe(self, name: str, seconds: float, **labels: str) -> None:
        """Add a duration to a histogram."""
        for bound in [*map(str, _BUCKETS), "+Inf"]:
            self.add(f"{name}_bucket", float(seconds <= float(bound)), **labels, le=bound)
        self.add(f"{name}_sum", seconds, **labels)
        self.add(f"{name}_count", 1.0, **labels)

    def text(self, measured: Iterable[tuple[str, str, float]] = ()) -> str:
        """Return all values, and those that are measured now: name, model and value of each."""
        with self._lock:
            values = dict(self._values)
        values |= {(name, (("model", model),)): value for name, model, value in measured}
        lines, last = list[str](), ""
        for (name, labels), value in sorted(values.items(), key=lambda item: item[0][0]):
            root = re.sub("_(bucket|sum|count)$", "", name)
            if root != last:
                kind = "histogram" if root != name else "counter" if name.endswith("_total") else "gauge"
                lines.append(f"# TYPE {root} {kind}")
                last = root
            shown = ",".join(f"{key}={json.dumps(text, ensure_ascii=False)}" for key, text in labels)
            lines.append(f"{name}{{{shown}}} {value:.10g}")
        return "\n".join([*lines, ""])
