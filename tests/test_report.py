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
from scipy import stats

from repro import report
from repro.plots import timeline
from repro.report import DASH, Summary, difference

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


class TestDifference:
    @pytest.mark.parametrize("sizes", [(3, 3), (2, 5), (10, 3)])
    def test_against_welch_by_hand(self, sizes):
        random = np.random.default_rng(sum(sizes))
        first, second = (random.normal(50, 4, n) for n in sizes)
        found = difference(first.tolist(), second.tolist())
        parts = [np.var(values, ddof=1) / len(values) for values in (first, second)]
        freedom = sum(parts) ** 2 / sum(
            part**2 / (n - 1) for part, n in zip(parts, sizes, strict=True)
        )
        half = stats.t.ppf(0.975, freedom) * math.sqrt(sum(parts))
        gap = first.mean() - second.mean()
        assert (found.mean, found.low, found.high) == pytest.approx((gap, gap - half, gap + half))
        assert found.includes_zero == (abs(gap) <= half)
        assert str(found) == f"{gap:+.2f} [{gap - half:+.2f}, {gap + half:+.2f}]"

    def test_its_sign(self):
        assert difference([2.0, 2.1], [1.0, 1.1]).mean == pytest.approx(1.0)

    def test_one_value_a_side_gives_no_interval(self):
        for first, second in (([3.0], [1.0]), ([3.0], [1.0, 1.5]), ([3.0, 3.5], [1.0])):
            found = difference(first, second)
            assert math.isnan(found.low) and found.includes_zero
        assert str(difference([3.0], [1.0])) == "+2.00"

    @pytest.mark.parametrize(
        ("first", "second", "zero"),
        [([5.0] * 3, [5.0] * 3, True), ([5.0] * 3, [4.0] * 3, False)],
    )
    def test_without_any_spread(self, first, second, zero):
        found = difference(first, second)
        assert found.low == found.high == found.mean == first[0] - second[0]
        assert found.includes_zero == zero

    def test_without_spread_on_one_side(self):
        """Three seeds at 100 % are no reason for a warning."""
        found = difference([100.0] * 3, [98.0, 99.0, 97.0])
        half = stats.t.ppf(0.975, 2) * math.sqrt(1 / 3)
        assert (found.low, found.high) == pytest.approx((2 - half, 2 + half))


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

    def test_the_terminals_table(self):
        from rich.console import Console

        console = Console(width=1000, file=io.StringIO())
        console.print(report.to_rich(FRAME, "Title"))
        text = console.file.getvalue()
        assert "Title" in text and "<b>U-Net</b> & co" in text and ("long " * 100).strip() in text
        assert "nan" not in text and "None" not in text

    def test_brackets_are_no_markup_on_the_terminal(self):
        """An interval is in brackets, and so is rich's markup."""
        from rich.console import Console

        frame = pd.DataFrame({"evidence": ["+1.00 [+0.50, +1.50] [bold] [/] [red]x"]})
        console = Console(width=1000, file=io.StringIO())
        console.print(report.to_rich(frame, "Title"))
        assert "+1.00 [+0.50, +1.50] [bold] [/] [red]x" in console.file.getvalue()

    def test_the_notebooks_table(self):
        view = report.TableView(FRAME)
        assert "<table" in view._repr_html_() and "&lt;b&gt;" in view._repr_html_()
        assert view._repr_html_().startswith("<style>")
        assert ("long " * 100).strip() in repr(view) and "NaN" not in repr(view)

    def test_an_empty_table(self):
        empty = FRAME.iloc[:0]
        assert "<table" in report.to_html(empty)
        assert report.to_rich(empty, "Title").row_count == 0
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
            report.Section("mbs-table1", "Table 1 <x>", "Caption & <y>.", FRAME, FRAME, figure),
            report.Section("mbs-table2", "Table 2", "", FRAME, FRAME.iloc[:0], None),
        ]
        return report.html_page("Title <t>", "Lead <l>", FRAME, sections, "Made by <m>")

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

    def test_it_is_utf8(self, page, tmp_path):
        path = report.write_html(tmp_path / "folder" / "report.html", page)
        assert "charset='utf-8'" in page
        assert path.read_bytes().decode("utf-8") == page

    def test_written_whole_or_not_at_all(self, page, tmp_path, monkeypatch):
        path = report.write_html(tmp_path / "report.html", "first")

        def crash(*arguments):
            raise OSError("disk full")

        monkeypatch.setattr("pathlib.Path.replace", crash)
        with pytest.raises(OSError, match="disk full"):
            report.write_html(path, page)
        assert path.read_text() == "first"
