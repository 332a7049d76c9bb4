"""Summaries against numpy and scipy; the HTML report is whole, escaped and self-contained."""

import base64
import html.parser
import io
import math
import re

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from repro import report
from repro.plots import timeline
from repro.report import DASH, Summary

NAN = float("nan")


class TestSummary:
    @pytest.mark.parametrize("count", [2, 3, 10])
    def test_against_numpy(self, count):
        values = np.random.default_rng(count).normal(80, 3, count)
        summary = Summary.of(values.tolist())
        assert summary.n == count
        assert summary.mean == pytest.approx(np.mean(values))
        assert summary.std == pytest.approx(np.std(values, ddof=1))
        assert summary.text() == f"{np.mean(values):.2f} ± {np.std(values, ddof=1):.2f}"

    def test_one_none_and_a_generator(self):
        assert Summary.of([3.456]).text() == "3.46"
        assert math.isnan(Summary.of([3.456]).std)
        assert Summary.of([]).n == 0 and Summary.of([]).text() == DASH
        assert Summary.of(x for x in (1, 2)).text(1) == "1.5 ± 0.7"

    def test_the_papers_pairs(self):
        assert report.mean_std([95.48, 0.13]) == "95.48 ± 0.13"
        assert report.mean_std([95.4, 0.1], 1) == "95.4 ± 0.1"
        assert report.mean_std(None) == "Failed"


FRAME = pd.DataFrame(
    {
        "model": ["ResNet-50", "<b>U-Net</b> & co"],
        "ours (%)": ["70.00 ± 0.50", None],
        "value": [1.25, NAN],
        "n": [3, 0],
        "evidence": ["long " * 100, "μ × ≤"],
    }
)


class TestTables:
    def test_html_is_escaped_and_not_cut(self):
        text = report.to_html(FRAME)
        assert "<b>" not in text and "&lt;b&gt;U-Net&lt;/b&gt; &amp; co" in text
        assert ("long " * 100).strip() in text and "..." not in text
        assert text.count("<tr") == 3 and text.count(DASH) == 2
        assert "1.25" in text and "NaN" not in text and "None" not in text
        columns = report.to_html(pd.DataFrame({"<i>": [1]}))
        assert "<i>" not in columns

    def test_evidence_has_a_line_for_each_of_its_parts(self):
        frame = pd.DataFrame({"evidence": ["one 1 < 2; two"], "claim": ["a; b"]})
        page = report.to_html(frame)
        assert "<td>one 1 &lt; 2;<br>two</td>" in page and "<td>a; b</td>" in page
        table = report.to_rich(frame.to_dict("records"), "Title")
        assert [str(cell) for cell in table.columns[0].cells] == ["one 1 < 2;\ntwo"]

    def test_the_terminals_table(self):
        from rich.console import Console

        console = Console(width=1000, file=io.StringIO())
        console.print(report.to_rich(FRAME.to_dict("records"), "Title"))
        text = console.file.getvalue()
        assert "Title" in text and "<b>U-Net</b> & co" in text and ("long " * 100).strip() in text
        assert "nan" not in text and "None" not in text

    def test_brackets_are_no_markup_on_the_terminal(self):
        """An interval is in brackets, and so is rich's markup."""
        from rich.console import Console

        frame = pd.DataFrame({"evidence": ["+1.00 [+0.50, +1.50] [bold] [/] [red]x"]})
        console = Console(width=1000, file=io.StringIO())
        console.print(report.to_rich(frame.to_dict("records"), "Title"))
        assert "+1.00 [+0.50, +1.50] [bold] [/] [red]x" in console.file.getvalue()

    def test_the_notebooks_table(self):
        view = report.TableView(FRAME)
        assert "<table" in view._repr_html_() and "&lt;b&gt;" in view._repr_html_()
        assert view._repr_html_().startswith("<style>")
        assert ("long " * 100).strip() in repr(view) and "NaN" not in repr(view)

    def test_an_empty_table(self):
        empty = FRAME.iloc[:0]
        assert "<table" in report.to_html(empty)
        assert report.to_rich(empty.to_dict("records"), "Title").row_count == 0
        assert repr(report.TableView(empty))


class Links(html.parser.HTMLParser):
    """Collects tags that are open at the end, and everything that a page refers to."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.references: list[str] = []
        self.anchors: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        if tag not in ("meta", "img", "br", "p", "link"):
            self.open.append(tag)
        assert tag not in ("script", "iframe", "object")
        for name, value in attributes:
            if name in ("src", "href"):
                self.references.append(value)
            if name == "id":
                self.anchors.add(value)

    def handle_endtag(self, tag):
        if tag in self.open:
            assert self.open.pop() == tag


class TestPage:
    @pytest.fixture
    def page(self) -> str:
        figure = timeline([("compute", 0, 0.0, 0.01)], (0.01, 0.02), "copy")
        sections = [
            report.Section(
                "mbs-table1", "Table 1 <x>", "Caption & <y>.", FRAME, FRAME, FRAME, figure
            ),
            report.Section(
                "mbs-table2", "Table 2", "", FRAME, FRAME.iloc[:0], FRAME.iloc[:0], None
            ),
        ]
        return report.html_page("Title <t>", "Lead <l>", FRAME, [FRAME], sections, "Made by <m>")

    def test_self_contained(self, page):
        links = Links(page)
        assert links.open == []
        for reference in links.references:
            assert reference.startswith(("#", "data:image/png;base64,"))
            assert not reference.startswith("#") or reference[1:] in links.anchors
        assert {"mbs-table1", "mbs-table2"} <= links.anchors
        assert not re.search(r"https?://|url\(|@import", page)

    def test_escaped(self, page):
        for tag in "xytlm":
            assert f"<{tag}>" not in page and f"&lt;{tag}&gt;" in page
        assert "Caption &amp; &lt;y&gt;." in page

    def test_the_figure_is_a_picture(self, page):
        (encoded,) = re.findall(r"src='data:image/png;base64,([^']+)'", page)
        with Image.open(io.BytesIO(base64.b64decode(encoded))) as image:
            assert image.format == "PNG" and min(image.size) > 100
        assert "alt='Table 1 &lt;x&gt;'" in page

    def test_it_is_utf8(self, page):
        assert "charset='utf-8'" in page and "μ" in page
