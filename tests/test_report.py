"""Summaries against numpy and scipy; tables and figures show every text as it is."""

import math

import matplotlib.text
import numpy as np
import pytest
from test_cli import Tags

from repro import report
from repro.experiments.judge import WORDS
from repro.plots import legend_below, new_axes
from repro.report import DASH, summary


class TestSummary:
    @pytest.mark.parametrize("count", [2, 3, 10])
    def test_against_numpy(self, count):
        values = np.random.default_rng(count).normal(80, 3, count)
        expected = f"{np.mean(values):.2f} ± {np.std(values, ddof=1):.2f}"
        assert summary(values.tolist()) == expected

    def test_one_none_and_a_generator(self):
        assert summary([3.456]) == "3.46" and summary([]) == DASH
        assert summary((x for x in (1, 2)), 1) == "1.5 ± 0.7"


ROWS = [
    {"model": "ResNet-50", "ours (%)": "70.00 ± 0.50", "value": 1.25, "evidence": "long " * 100},
    {"model": "<b>U-Net</b> & co", "ours (%)": None, "value": math.nan, "evidence": "μ × ≤"},
]


class TestTables:
    def test_html_is_escaped_and_not_cut(self):
        text = report.shown_table(ROWS).page
        assert "<b>" not in text and "&lt;b&gt;U-Net&lt;/b&gt; &amp; co" in text
        assert ("long " * 100).strip() in text and "..." not in text
        assert text.count("<tr") == 3 and text.count(DASH) == 2
        assert "1.25" in text and "NaN" not in text and "None" not in text
        assert "<i>" not in report.shown_table([{"<i>": 1}]).page

    def test_markdown_has_a_line_for_each_row(self):
        table = [{"a|b": "<i>", "evidence": "one 1 < 2; two\n"}, {"evidence": "x|y"}]
        head, rule, *rows = report.markdown_table(table).splitlines()
        assert head == "|a&#124;b|evidence|" and rule == "|---|---|"
        assert rows == ["|&#60;i&#62;|one 1 &#60; 2; two|", f"|{DASH}|x&#124;y|"]

    def test_verdicts_are_badges(self):
        row = {"setting": "smaller"}
        rows = [row | {"verdict": word, "claim": f"{word} costs 5 $ <b>"} for word in WORDS]
        page = report.shown_verdicts(rows).page
        table = report.shown_table(rows).page
        for word in WORDS:
            background, ink = report.VERDICT_COLOURS[word]
            mark = f"background-color: {background}; color: {ink}"
            assert page.count(mark) == table.count(mark) == 1
        assert "<b>" not in page and "$ <" not in page
        said = repr(report.shown_verdicts(rows[:1]))
        assert said == "[reproduced] reproduced costs 5 $ <b> (smaller)"


class TestTextsAreShownAsTheyAre:
    def test_control_characters_are_written_out(self):
        assert report.printable("μ × ≤ – \u2028a\u00a0b\n\tc") == "μ × ≤ – \\u2028a\u00a0b\n\tc"
        for number in (*range(32), *range(127, 160), 0x202E, 0x200B, 0xDCFF, 0xFEFF):
            text = report.printable(f"a{chr(number)}b")
            assert text == f"a{chr(number)}b" if chr(number) in "\n\t" else "\\" in text
            assert text.encode()

    def test_markdown_is_read_back_as_the_text(self):
        filters = pytest.importorskip("nbconvert.filters")
        for text in ("<b>a</b> & b", "a_b_c *d* **e**", "`x` [y](z) ![i](j)", "# no heading",
                     "$\\frac{1}{2}$ \\(x\\) a\\_b", "1 | 2 ~~3~~ &lt; &#36;"):  # fmt: skip
            page = filters.markdown2html(f"Shown: {report.markdown(text)}.")
            assert "".join(Tags(page).texts).strip() == f"Shown: {text}."

    @pytest.mark.slow
    @pytest.mark.parametrize("text", ["$x$", "$\\frac{1$", "a $ b", "$$", r"\$5$", "\x1b[2J", "μ"])
    def test_figures(self, text):
        """In every place that a text has in one."""
        figure, axes = new_axes(1, 1, 3, 3)
        axis = axes[0, 0]
        # The names of ticks are the formatter's: matplotlib draws a box for what has no glyph.
        axis.bar([text if text.isprintable() else "x", "other"], [1, 1000], label=text)
        axis.set(title=text, xlabel=text, ylabel=text, yscale="log")
        axis.text(0, 1, text)
        figure.suptitle(text)
        legend_below(figure, 1)
        assert report.figure_png(figure).startswith(b"\x89PNG")
        shown = [artist.get_text() for artist in figure.findobj(match=matplotlib.text.Text)]
        assert shown.count(report.printable(text)) >= 6 - (not text.isprintable())
        parsed = {label.get_text() for label in axis.get_yticklabels() if label.get_parse_math()}
        assert "$\\mathdefault{10^{2}}$" in parsed  # the powers of ten are formulas still
