"""The page's own parts: what a figure becomes when it is set into it."""

from __future__ import annotations

from eval.report import figure

SVG = (
    '<svg><path id="m1.2345" d="M 1.234567 -2.345678\nL 7 8.5" style="stroke: #000000"/>'
    '<text x="3.141592">p = 0.031234</text></svg>'
)


def test_paths_are_a_hundredth_of_a_point_fine_and_words_stay() -> None:
    page = figure(SVG, "a < b")
    assert 'd="M 1.23 -2.34\nL 7 8.5"' in page
    for kept in ('id="m1.2345"', 'x="3.141592"', "p = 0.031234", "stroke: currentColor"):
        assert kept in page
    assert page.count("a &lt; b") == 2
