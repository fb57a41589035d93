"""The page of benchmarks, as a hook of MkDocs: the marked tables of bench/results/, each with a figure.

A line `<!-- benchmarks: TOPIC | TITLE -->` marks the text from there to the next heading or comment, which contains one
table. Of several with the same topic and title, the page shows the one whose file has the last name. Columns whose
names begin with "ratio" are drawn as bars; otherwise the last column is drawn over the column "minutes", if there is one.
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
RATIOS = "Times 1, the line: equal. Blue bars to the right: xformer is faster or smaller. Orange bars to the left: the other is."
CURVE = "Each point is a validation during training. Higher is better."
BETTER, WORSE = "#4c8dd6", "#e0803a"


@dataclass(frozen=True)
class Measurement:
    """A marked table with the text around it, and the heading and introduction of its file."""

    topic: str
    title: str
    text: str
    name: str
    heading: str
    introduction: str

    @property
    def rows(self) -> list[list[str]]:
        """Return the cells of the table: the names of the columns, then the rows."""
        lines = [line for line in self.text.splitlines() if line.startswith("|")]
        if sum(line.startswith("|---") for line in lines) != 1:
            raise ValueError(f"{self.name}, {self.title}: expected one table, with |--- below the names of its columns")
        return [[cell.strip(" *`") for cell in line[1:].removesuffix("|").split("|")] for line in lines[:1] + lines[2:]]

    @property
    def ratios(self) -> list[tuple[str, str, float]]:
        """Return the workload, the peer and the value of each ratio."""
        (names, *rows), found, workload = self.rows, [], ""
        for row in rows:
            workload = row[0] or workload
            for name, cell in zip(names, row, strict=True):
                if not cell or not name.startswith("ratio"):
                    continue
                peer = name.removeprefix("ratio").lstrip(": ")
                if names[1] == "implementation":  # the ratio of the first one is 1
                    peer = row[1]
                    if row[0]:
                        continue
                found.append((workload, peer, number(cell)))
        return found


def number(cell: str) -> float:
    """Return the number in a cell, such as 1.25, 5,044 or 1.25 (1.09 to 1.32)."""
    match = re.fullmatch(r"([\d,]+(?:\.\d+)?)(?: \(.*\))?", cell)
    if match is None:
        raise ValueError(f"a cell of bench/results/ is {cell!r}; expected one number, and a range in parentheses")
    return float(match[1].replace(",", ""))


def measurements() -> list[Measurement]:
    """Return the marked tables, the newest files first."""
    found: dict[tuple[str, str], Measurement] = {}
    for path in sorted(RESULTS.glob("*.md")):
        head, *parts = re.split(r"^(?=##|<!--)", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        heading, _, introduction = head.removeprefix("# ").partition("\n")
        for part in parts:
            if match := MARK.match(part):
                text = part[match.end() :].strip()
                each = Measurement(match[1], match[2] or "", text, path.name, heading, introduction.strip())
                found[each.topic, each.title] = each
    return sorted(found.values(), key=lambda each: each.name, reverse=True)


def section(topic: str) -> str:
    """Return the Markdown of a topic: tables and figures, and folded, how they were measured."""
    parts = []
    for each in measurements():
        if each.topic == topic:
            summary = re.sub("`(.*?)`", r"<code>\1</code>", each.heading)
            source = f"From `bench/results/{each.name}`."
            details = f"{source}\n\n{each.introduction}"
            parts += [f"### {each.title}", f"<details markdown><summary>{summary}</summary>\n\n{details}\n\n</details>"]
            parts += [each.text, draw(each)]
    if not parts:
        raise ValueError(f"bench/results/ has no table of the topic {topic!r}")
    return "\n\n".join(parts)


def draw(measurement: Measurement) -> str:
    """Return the figure of a table, with a caption, as HTML; nothing if the table has neither ratios nor minutes."""
    names, *rows = measurement.rows
    if measurement.ratios:
        draw_ratios(measurement.ratios)
    elif "minutes" in names:
        draw_curve([(number(row[names.index("minutes")]), number(row[-1])) for row in rows], names[-1])
    else:
        return ""
    caption = RATIOS if measurement.ratios else CURVE
    return f"<figure>{take_figures()}<figcaption>{caption}</figcaption></figure>"


def draw_ratios(ratios: list[tuple[str, str, float]]) -> None:
    """Draw a bar for each ratio, from 1 to the left or right on a logarithmic axis, below the name of its workload."""
    import matplotlib.pyplot as plt
    from matplotlib.transforms import blended_transform_factory

    figure, axes = plt.subplots()
    peers, line = [], 0
    for workload, group in groupby(ratios, key=lambda each: each[0]):
        for text in wrap(workload, 56):
            place = blended_transform_factory(figure.transFigure, axes.transData)
            axes.text(0.01, line, text, transform=place, va="center", fontweight="bold").set_in_layout(False)
            line += 1
        for _, peer, ratio in group:
            side, color = ("left", BETTER) if ratio >= 1 else ("right", WORSE)
            axes.barh(line, ratio - 1, left=1, height=0.7, color=color)
            axes.annotate(f"{ratio:g}", (ratio, line), (4 if ratio >= 1 else -4, 0), textcoords="offset points", ha=side, va="center")
            peers.append((line, peer))
            line += 1
    values = [ratio for *_, ratio in ratios]
    low, high = min(0.6, *values), max(1.7, *values)
    margin = (high / low) ** 0.18
    axes.set(xscale="log", xlim=(low / margin, high * margin), ylim=(line - 0.3, -0.7))
    axes.set_yticks(*zip(*peers, strict=True))
    axes.tick_params(axis="y", length=0)
    ticks = [tick for tick in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100) if low / margin <= tick <= high * margin]
    axes.set_xticks(ticks, [f"× {tick:g}" for tick in ticks], minor=False)
    axes.xaxis.minorticks_off()
    axes.axvline(1, color=TEXT_COLOR, linewidth=1)
    axes.spines["left"].set_visible(False)
    figure.set_size_inches(4.4, 0.5 + 0.21 * line)


def draw_curve(points: list[tuple[float, float]], name: str) -> None:
    """Draw a result over the minutes of training."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(4.4, 2.4))
    axes.plot(*zip(*points, strict=True), marker="o", markersize=4)
    axes.set(xlabel="minutes", title=name)


def on_page_markdown(markdown: str, *, page: Any, **arguments: Any) -> str:
    """Fill the page of benchmarks: a hook of MkDocs."""
    if page.file.src_uri != "benchmarks.md":
        return markdown
    return MARK.sub(lambda match: section(match[1]), markdown)
