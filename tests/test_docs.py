"""README and the pages of docs: what they quote is measured, what they show runs, links lead on."""

import re
import runpy
from functools import cache
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

from repro import paths
from repro.datasets import TensorLoader
from repro.experiments import PAPERS, load_paper
from repro.experiments.design import SETTINGS
from repro.experiments.judge import WORDS
from repro.experiments.query import find_source, results_of
from repro.experiments.together import limit
from repro.experiments.view import of_papers, verdicts
from repro.report import shown_table

REFRESH = runpy.run_path(str(paths.ROOT / "docs" / "refresh.py"))
FILES = {str(path.relative_to(paths.ROOT)): path for path in REFRESH["pages"]()}
PAGES = {name: path.read_text(encoding="utf-8") for name, path in FILES.items()}
METHODS = [f"docs/{paper}.md" for paper in PAPERS if paper != "together"]
OTHERS = ("CONTRIBUTING.md", "data/README.md")  # pages of the site, too
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
_ARTEFACT = re.compile(rf"`(?:python -m repro show )?((?:{'|'.join(PAPERS)})/\w+)`")


def tables(page: str) -> list[tuple[str, list[list[str]]]]:
    """Return each table's rows of cells, the head first, and the paragraph above it."""
    parsed, paragraphs = [], PAGES[page].split("\n\n")
    for before, text in zip(["", *paragraphs], paragraphs, strict=False):
        lines = text.splitlines()
        if len(lines) > 1 and re.fullmatch(r"[|: -]+", lines[1]):
            rows = [line for number, line in enumerate(lines) if number != 1]
            parsed.append((before, [re.split(r"\s*(?<!\\)\|\s*", row)[1:-1] for row in rows]))
    return parsed


def table_with(page: str, *columns: str) -> list[list[str]]:
    """Return the rows of the page's table whose head begins with these columns."""
    (rows,) = (rows for _, rows in tables(page) if rows[0][: len(columns)] == list(columns))
    return rows[1:]


@pytest.fixture(scope="module")
def records():
    """The checkout's reference records, whatever folder other tests write to."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REPRO_RESULTS", str(paths.ROOT / "results"))
        yield


def value(number: str) -> float:
    return float(number.replace(",", ""))


@cache
def numbers_of(name: str) -> frozenset[float]:
    """Return all numbers of an artefact's table and evidence by the reference records."""
    paper, _, artefact_name = name.partition("/")
    source = find_source(load_paper(paper), local=False)
    artefact = source.paper.artefacts[artefact_name]
    results = results_of(artefact, source)
    shown = filter(None, (results, results.gpu))
    texts = [shown_table(list(artefact.rows(of))).said for of in shown]
    texts += [row["evidence"] for row in verdicts(source.paper, artefact, results)]
    return frozenset(value(number) for text in texts for number in _NUMBER.findall(text))


@pytest.fixture(scope="module")
def judged(records):
    return REFRESH["judged"]()


@pytest.mark.slow
class TestNumbers:
    @pytest.mark.parametrize("page", PAGES)
    def test_verdicts_and_counts_are_those_of_the_reference_records(self, judged, page):
        assert REFRESH["refreshed"](PAGES[page], judged) == PAGES[page], "run docs/refresh.py"

    def test_a_planted_verdict_is_seen(self, judged):
        page = PAGES["docs/combining.md"]
        planted = re.sub(r"(advice\.time` .*?)\*\*not seen here\*\*", r"\1**reproduced**", page)
        assert planted != page == REFRESH["refreshed"](planted, judged)

    def test_every_paper_is_counted(self, judged):
        words = "paper", "promises", "claims", "checks", "our questions", *WORDS
        (rows,) = (rows for _, rows in tables("docs/verdicts.md") if tuple(rows[0]) == words)
        titles = [load_paper(key).title for key in PAPERS]
        assert [row[0] for row in rows[1:]] == [*titles, "All papers"]
        papers = sum(len(of_papers(rows)) for rows in judged.values())
        assert f"{papers} claims: " in PAGES["README.md"]

    def test_the_chart_is_of_these_verdicts(self, judged):
        chart = REFRESH["CHART"].read_text(encoding="utf-8")
        assert REFRESH["description"](judged) in chart, "run docs/refresh.py"

    @pytest.mark.parametrize("page", PAGES)
    def test_what_a_table_quotes_is_in_its_artefact(self, records, page):
        """That is, every number below a ``python -m repro show``, or beside an artefact's name."""
        checked = 0
        for above, (head, *rows) in tables(page):
            shown = re.findall(r"`python -m repro show (\w+/\w+)[^`]*`, an\s+excerpt", above)
            if page == "README.md" and head[0].startswith("method"):
                quoting = [(_ARTEFACT.findall(row[2]), row[2]) for row in rows]
            elif head[0].startswith("table or figure, and"):
                quoting = [(_ARTEFACT.findall(row[0]), " ".join(row[1:])) for row in rows]
            else:
                text = "\n".join(" ".join(row) for row in rows).replace("(baseline)", "")
                quoting = [(shown, text)] if shown else []
            for names, text in quoting:
                known = frozenset().union(*map(numbers_of, names))
                text = re.sub(r"`[^`]*`|\(paper[^)]*\)|\w+-\d+\b|H\d00|\d+ [GM]iB", "", text)
                numbers = {number.removesuffix(",") for number in _NUMBER.findall(text)}
                unknown = {number for number in numbers if value(number) not in known}
                assert not unknown, f"{page} quotes {sorted(unknown)} of {names}"
                checked += len(numbers)
        assert checked > 10 or page not in ("README.md", *METHODS)

    def test_the_shares_of_times_that_advise_predicts(self, records):
        source = find_source(load_paper("together"), local=False)
        cells = limit.cells(results_of(source.paper.artefacts["advice"], source))
        right = cells["time"].dropna().abs() <= limit.WITHIN
        plain = cells["mode"].isin(["undivided", "accumulation", "mbs"])[right.index]
        groups = (right[plain], right[~plain], right)
        shares = [f"{part.sum()} of {len(part)} cases" for part in groups]
        assert [row[1] for row in table_with("docs/combining.md", "predicted time of")] == shares


def test_the_words_are_defined_as_the_code_has_them():
    for column, meanings in (("verdict", WORDS), ("setting", SETTINGS)):
        rows = dict(table_with("docs/verdicts.md", column, "means"))
        assert {word.strip("*"): text for word, text in rows.items()} == dict(meanings)


def test_commands_exist():
    from typer.main import get_command

    from repro.__main__ import app

    text = "\n".join(PAGES.values())
    named = set(re.findall(r"python -m repro ([a-z-]+)", text))
    assert {"run", "show", "report"} < named <= set(get_command(app).commands)
    makefile = (paths.ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"(?:`|^)make ([a-z-]+)", text, re.MULTILINE))
    papers = {f"reproduce-{paper}" for paper in PAPERS}
    assert "test" in targets  # which .ci/run calls
    assert targets <= papers | set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    modules = set(re.findall(r"python -m benchmarks\.(\w+)", text))
    assert modules <= {path.stem for path in (paths.ROOT / "benchmarks").glob("*.py")}


def anchors(text: str) -> set[str]:
    """Return what headings are called, as code-hosting sites and the built site call them."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)|[`*]", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in plain}


def broken_links(page: str, text: str) -> list[str]:
    """Return the relative links of a page that lead to no file, or to no heading of it."""
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (paths.ROOT / page).parent / name if name else paths.ROOT / page
        known = anchors(target.read_text(encoding="utf-8")) if target.is_file() else None
        if known is None or (anchor and anchor not in known):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", [*PAGES, *OTHERS])
def test_links_lead_somewhere(page):
    assert not broken_links(page, (paths.ROOT / page).read_text(encoding="utf-8"))


def test_broken_links_are_seen():
    text = "[a](docs/mbs.md) [b](docs/no.md) [c](docs/mbs.md#when-not) [d](docs/mbs.md#no) [e](#f)"
    assert broken_links("README.md", text) == ["docs/no.md", "docs/mbs.md#no", "#f"]


def test_readme_is_one_page_and_every_other_page_is_in_the_site():
    assert len(PAGES["README.md"].splitlines()) <= 90
    site = (paths.ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for page in PAGES:
        assert page == "README.md" or f" {page.removeprefix('docs/')}\n" in site, page
        assert page == "README.md" or page.removeprefix("docs/") in "".join(PAGES.values())


@pytest.mark.parametrize("page", METHODS)
class TestMethods:
    def test_a_page_is_short(self, page):
        """A reader sees neither comments nor the targets of links."""
        text = re.sub(r"<!--.*?-->|\]\([^)]*\)", "", PAGES[page], flags=re.DOTALL)
        assert len([word for word in text.split() if re.search(r"\w", word)]) <= 900

    def test_a_diagram_with_a_text_shows_the_method(self, page):
        ((text, name),) = re.findall(r"^!\[([^]]*)\]\((\S+)\)$", PAGES[page], re.MULTILINE)
        assert len(text.split()) > 20  # what it shows, for those who do not see it
        assert name == f"diagrams/{page.removeprefix('docs/').removesuffix('.md')}.svg"
        svg = ElementTree.parse(paths.ROOT / "docs" / name).getroot()
        assert float(svg.get("width")) <= 400  # so that its text can be read on a phone
        assert "http" not in "".join(svg.itertext())  # nothing is fetched


def surroundings() -> dict[str, object]:
    """Return what the blocks of the pages take for given: a tiny training."""
    torch.manual_seed(0)
    labels = torch.randint(4, (600,))
    pictures = torch.randint(100, (600, 3, 32, 32), dtype=torch.uint8)
    pictures[:, 0] += (100 * (labels % 2)).to(torch.uint8)[:, None, None]  # can be learned
    pictures[:, 1] += (100 * (labels // 2)).to(torch.uint8)[:, None, None]
    images = pictures / 255

    def make_model() -> nn.Module:
        # At any image size, and as fast at all of them.
        pool = nn.AdaptiveAvgPool2d(4)
        return nn.Sequential(pool, nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 4))

    model, loss_fn = make_model(), nn.CrossEntropyLoss()
    loader = TensorLoader(pictures[:32], labels[:32], 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_one_epoch() -> float:
        total = 0.0
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = loss_fn(model(inputs), targets)
            loss.backward()
            optimizer.step()
            total += loss.item()
        return total / len(loader)

    inputs, targets = images[:32], labels[:32]
    return {**locals(), "sample_input": inputs}


def blocks() -> dict[str, list[str]]:
    """Return the Python blocks of every page; those of recipes are run by test_recipes."""
    code = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
    by_page = {p: code.findall(text) for p, text in PAGES.items() if p != "docs/recipes.md"}
    return {page: snippets for page, snippets in by_page.items() if snippets}


def test_every_method_has_a_block():
    assert set(blocks()) >= {*METHODS, "README.md", "docs/combining.md"}


@pytest.mark.slow
@pytest.mark.parametrize("page", blocks())
def test_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = surroundings()
    for block in blocks()[page]:
        exec(compile(block, page, "exec"), names)
