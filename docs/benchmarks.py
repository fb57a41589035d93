"""The pages of benchmarks, as a hook of MkDocs: the marked tables of bench/results/, each with a figure.

A line `<!-- benchmarks: TOPIC | TITLE -->` marks the text from there to the next heading or comment, which contains one
table. Of several with the same topic and title, the page shows the one whose file has the last name. Columns named
"ratio..." are drawn as bars; in a table without them, the last column is drawn over the column "minutes", if any.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from textwrap import wrap
from typing import Any

from execution import TEXT_COLOR, take_figures

RESULTS = Path(__file__).parents[1] / "bench" / "results"
MARK = re.compile(r"<!-- benchmarks: (.+?)(?: \| (.+?))? -->\n")
TABLE = re.compile(r"((?:^\|.*\n?)+)", re.MULTILINE)
RATIOS = """Speed or size of xformer compared with the others, on a logarithmic axis. Bars to the right of 1 (blue):
xformer is faster or smaller. Bars to the left (orange): the other is."""


@dataclass(frozen=True)
class Measurement:
    """A marked table with the text around it, and the heading and the introduction of its file."""

    topic: str
    title: str
    text: str
    name: str
    heading: str
    introduction: str

    @property
    def rows(self) -> list[list[str]]:
        """Return the cells of the table: the names of the columns, then the rows."""
        lines = [re.sub(r"[*`]", "", line).rstrip() for line in self.text.splitlines() if line.startswith("|")]
        if [index for index, line in enumerate(lines) if line.startswith("|---")] != [1]:
            raise ValueError(f"{self.name}, {self.title}: expected one table, with |--- below the names of its columns")
        return [[cell.strip() for cell in line[1:].removesuffix("|").split("|")] for line in lines[:1] + lines[2:]]

    @property
    def ratios(self) -> list[tuple[str, str, str]]:
        """Return the workload, the peer and the ratio of each bar, as text."""
        (names, *rows), found, workload = self.rows, [], ""
        in_rows = names[1] == "implementation"  # compared with the first one of a workload
        for row in rows:
            workload = row[0] or workload
            for name, cell in zip(names, row, strict=True):
                if cell and name.startswith("ratio") and not (in_rows and row[0]):
                    peer = row[1] if in_rows else name.removeprefix("ratio").lstrip(": ")
                    found.append((workload, peer, cell.split(" (")[0]))
        return found


def number(cell: str) -> float:
    """Return the number in a cell, such as 1.25 or 5,044."""
    if not re.fullmatch(r"[\d,]+(\.\d+)?", cell):
        raise ValueError(f"a cell of bench/results/ is {cell!r}; expected a number, or a number and (a range)")
    return float(cell.replace(",", ""))


def measurements() -> list[Measurement]:
    """Return the marked tables, the newest files first."""
    found: dict[tuple[str, str], Measurement] = {}
    for path in sorted(RESULTS.glob("*.md")):
        head, *parts = re.split(r"^(?=##|<!--)", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        heading, _, introduction = head.removeprefix("# ").partition("\n")
        for part in parts:
            if match := MARK.match(part):
                key = match[1], match[2] or ""
                found[key] = Measurement(*key, part[match.end() :].strip(), path.name, heading, introduction.strip())
    return sorted(found.values(), key=lambda each: each.name, reverse=True)


def section(topic: str) -> str:
    """Return the Markdown of a topic: tables and figures, and folded, how they were measured."""
    parts = []
    for each in measurements():
        if each.topic == topic:
            source = f"From `bench/results/{each.name}`.\n\n{each.introduction}"
            summary = re.sub("`(.*?)`", r"<code>\1</code>", each.heading)
            parts += [f"### {each.title}", f"<details markdown><summary>{summary}</summary>\n\n{source}\n\n</details>"]
            before, table, after = re.split(TABLE, each.text)
            table = re.sub(r"(?<=\d) (?=(ms|s|MiB|tokens/s)\b)", "\u00a0", table)
            parts += [before, table, draw(each), after]
    if not parts:
        raise ValueError(f"bench/results/ has no table of the topic {topic!r}")
    return "\n\n".join(parts)


def draw(measurement: Measurement) -> str:
    """Return the figure of a table, with a caption, as HTML; nothing if the table has neither ratios nor minutes."""
    import matplotlib.pyplot as plt

    names, *rows = measurement.rows
    if measurement.ratios:
        draw_ratios(measurement.ratios)
        caption = RATIOS
    elif "minutes" in names:
        caption = "Each point is a validation during training; higher is better."
        axes = plt.figure(figsize=(4.4, 2.4)).subplots()
        axes.plot([number(row[names.index("minutes")]) for row in rows], [number(row[-1]) for row in rows], "o-")
        axes.set(xlabel="minutes", title=names[-1])
    else:
        return ""
    return f'<figure class="benchmark">{take_figures()}<figcaption>{caption}</figcaption></figure>'


def draw_ratios(ratios: list[tuple[str, str, str]]) -> None:
    """Draw a bar for each ratio, from 1 to the left or right on a logarithmic axis, below the name of its workload."""
    import matplotlib.pyplot as plt
    from matplotlib.transforms import blended_transform_factory

    figure, axes = plt.subplots()
    place = blended_transform_factory(figure.transFigure, axes.transData)
    values, peers, line = [number(text) for *_, text in ratios], [], 0.0
    for workload, group in groupby(ratios, key=lambda each: each[0]):
        for text in wrap(workload, 46):
            axes.text(0.01, line, text, transform=place, va="center", weight="bold", size=9).set_in_layout(False)
            line += 1
        first = line
        for _, peer, text in group:
            ratio = number(text)
            side, offset, color = ("left", 4, "#4c8dd6") if ratio >= 1 else ("right", -4, "#e0803a")
            axes.barh(line, ratio - 1, left=1, height=0.7, color=color)
            axes.annotate(text, (ratio, line), (offset, 0), textcoords="offset points", ha=side, va="center")
            peers.append((line, peer))
            line += 1
        axes.vlines(1, first - 0.5, line - 0.5, color=TEXT_COLOR, linewidth=1)
        line += 0.3
    low, high = min(0.6, *values), max(1.7, *values)
    low, high = low * (low / high) ** 0.18, high * (high / low) ** 0.18  # space for the numbers
    ticks = [tick for tick in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100) if low <= tick <= high]
    axes.set(xscale="log", xlim=(low, high), ylim=(line - 0.5, -0.7))
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_yticks(*zip(*peers, strict=True))
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    figure.set_size_inches(4.4, 0.5 + 0.21 * line)


def on_page_markdown(markdown: str, *, page: Any, **arguments: Any) -> str:
    """Fill the pages of benchmarks: a hook of MkDocs."""
    is_page = page.file.src_uri.startswith("benchmarks/")
    return MARK.sub(lambda match: section(match[1]), markdown) if is_page else markdown
