"""HTML for notebooks."""

from __future__ import annotations

import io
import math
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from xformer.html import HeatMap, curve, details, heat_maps, png, table, tag


def test_texts_are_escaped_once_and_attributes_too():
    inner = tag("b", "<i>")
    assert tag("p", inner, "a & b", title='"x"') == '<p title="&quot;x&quot;"><b>&lt;i&gt;</b>a &amp; b</p>'
    assert "&lt;script&gt;" in details("<script>", "x")
    assert table(["<th>"], [["<td>"]]) == (
        "<table><tr><th>&lt;th&gt;</th></tr><tr><td>&lt;td&gt;</td></tr></table>"
    )  # fmt: skip


def test_a_heat_map_is_an_image_with_one_pixel_for_each_value():
    image = pytest.importorskip("matplotlib.image")
    pixels = image.imread(io.BytesIO(png([[0.0, 1.0, 0.5], [1.0, 0.0, 2.0]])))
    assert pixels.shape[:2] == (2, 3)
    np.testing.assert_allclose(pixels[0, 0, :3], 1.0)
    np.testing.assert_allclose(pixels[0, 1, :3], np.asarray([8, 48, 107]) / 255, atol=1e-6)
    assert pixels[1, 2].tolist() == pixels[0, 1].tolist()
    assert 0.45 < pixels[0, 2, 0] < 0.6


def test_heat_maps_are_selected_by_style_sheets():
    maps = [HeatMap([[0.1, 0.9]], (layer, head)) for layer in "10" for head in ("mean", "0")]
    content = heat_maps(maps, ["<a>"], ["b", "c"], {"layer": "10", "head": ["mean", "0"]})
    form = ElementTree.fromstring(content)
    svg = "{http://www.w3.org/2000/svg}"
    assert [image.get("class") for image in form.iter(f"{svg}image")] == [
        f"layer-{layer} head-{head}" for layer in "10" for head in ("mean", "0")
    ]
    assert [text.text for text in form.iter(f"{svg}text")] == ["<a>", "b", "c"]
    assert 'option[value="0"]:checked) image:not(.head-0)' in form.find("style").text
    assert "<script" not in content


def test_a_curve_leaves_out_values_that_are_not_finite():
    svg = curve([1, 2, 3, 4], [4.0, math.nan, 2.0, math.inf], "loss")
    points = ElementTree.fromstring(svg).find("{http://www.w3.org/2000/svg}polyline").get("points").split()
    assert points == ["60.0,10.0", "470.0,130.0"]
    assert curve([1], [math.nan], "loss") == ""
