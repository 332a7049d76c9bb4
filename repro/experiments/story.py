"""The opening of a notebook: the paper's promise, our findings, one figure.

``[story]`` of ``PAPER/paper.toml`` has the sentences. Their numbers are those of the claims, and so
true of the records that are shown.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from repro import report
from repro.experiments import view
from repro.experiments.arguments import plan, value_at
from repro.experiments.design import LONG, SEEDS, Claim, Paper, claims_of, imported, paper_toml
from repro.experiments.judge import Cases, Exact, NotRun, Verdict
from repro.experiments.query import Source, devices

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from repro.plots import Effect


def story_of(paper: Paper) -> Any:
    """Return ``[story]`` of a paper's TOML: `says`, `findings`, `figure`, ... as attributes."""
    told = paper_toml(paper.key)["story"]
    defaults = {"asks": "What the paper says", "did_columns": ["paper", "here"]}
    return SimpleNamespace(**defaults | told)


_PLACE = re.compile(r"\{(?:(paper|verdict):)?(\w+)\.(\w+)(?:\[(.+?)\])?\}")


def _judged(source: Source, artefact: str, key: str) -> tuple[Claim, Verdict]:
    claim = claims_of(source.paper.key)[artefact][key]
    _, verdict, _ = view.judged(source.paper.artefacts[artefact], claim, source.look(artefact))
    return claim, verdict


def _case(claim: Claim, cases: Cases, case: str | None) -> tuple[str, Any]:
    """Return a case of a claim: its name, and an `Estimate` or an `Exact`."""
    if case is None and len(cases) > 1:
        raise ValueError(f"{claim.key} has the cases {', '.join(cases)}; name one")
    name = next(iter(cases), "") if case is None else case
    value = cases.get(name, NotRun("no records"))
    if isinstance(value, NotRun):
        raise value
    return name, value


def filled(sentence: str, source: Source) -> str:
    """Put the numbers of claims into a sentence.

    ``{ARTEFACT.CLAIM[CASE]}`` becomes our estimate, of which figures draw the interval;
    ``{paper:ARTEFACT.CLAIM[CASE]}`` the paper's effect, or the margin; ``{verdict:ARTEFACT.CLAIM}``
    the verdict's word. A claim of one case needs no ``[CASE]``. `NotRun` where records are missing.
    """

    def number(match: re.Match[str]) -> str:
        kind, artefact, key, case = match.groups()
        claim, verdict = _judged(source, artefact, key)
        if kind == "verdict":
            return verdict.word
        name, ours = _case(claim, verdict.cases, case)
        if kind == "paper":
            return _in_prose(claim.papers_number(name, ours) or report.DASH)
        if isinstance(ours, Exact):
            return ours.text
        return _in_prose(f"{ours.shown(ours.mean)} {ours.unit}".rstrip())

    return _PLACE.sub(number, sentence)


def _in_prose(number: str) -> str:
    """Return a ratio as a sentence has it, and a share without its sign."""
    number = re.sub(r"^[+](?=[\d.]+ %)", "", number)
    return f"{number[1:]} times" if number.startswith("×") else number


def findings_of(source: Source) -> list[str]:
    """Return the findings that have records, a sentence each."""
    sentences = []
    for finding in story_of(source.paper).findings:
        with suppress(NotRun):
            sentences.append(filled(finding, source))
    return sentences


def effects_of(source: Source) -> "list[tuple[str, Effect]]":
    """Return the effects of a method that have records, each after its kind; a GPU's first.

    ``gives`` and ``costs`` are ratios, ``accuracy`` is a difference in points.
    """
    effects: list[tuple[str, Effect]] = []
    for row in story_of(source.paper).effects:
        label, kind, paper = row["label"], row["kind"], row.get("paper")
        try:
            if "numbers" in row:  # not a claim's
                shown = source.look(row["artefact"])
                ours = imported(row["numbers"])(shown.gpu or shown)
            elif "claim" in row:
                claim, verdict = _judged(source, *row["claim"].split("."))
                case, ours = _case(claim, verdict.cases, row.get("case"))
                paper = row.get("paper", claim.effect_of(case))
            else:  # words alone
                effects.append((kind, (label, None, None, None)))
                continue
        except NotRun:
            continue
        if ours.log == (kind == "accuracy"):
            raise ValueError(f"{label!r} is {'a' if ours.log else 'no'} ratio")
        if row.get("inverse"):
            paper, ours = paper and 1 / paper, replace(ours, mean=-ours.mean)
        effects.append((kind, (label, paper, *ours.drawn())))
    return effects


def held(paper: str, judged: Iterable[view.Row]) -> list[str]:
    """Return a paper's promises as Markdown, each after its verdict."""
    words = {row["key"]: f"**{row['verdict']}**{report.setting(row)}" for row in judged}
    return [
        f"{words['/'.join((paper, row['claim']))]}: {report.markdown(row['text'])}"
        for row in paper_toml(paper)["promises"]
    ]


def opening(source: Source, picture: str = "") -> str:
    """Return Markdown: the paper's promise, our findings, one figure.

    `picture` is the link to the figure; empty for none.
    """
    story = story_of(source.paper)
    sentences = findings_of(source) or ["The records that would say are missing."]
    name = source.paper.artefacts[story.figure].source
    rows = [f"| {' | '.join(map(report.markdown, row))} |" for row in story.did]
    heads = [f"| | {' | '.join(story.did_columns)} |", "| :--- | :--- | :--- |"]
    lines = [
        f"**{story.asks}.** {story.says}",
        "**What we did.**",
        "\n".join([*heads, *rows]),
        f"**What we found** ({ran_on([source])}).",
        "\n".join(f"- {report.markdown(sentence)}" for sentence in sentences),
        f"**What was easy.** {story.easy}",
        f"**What was hard.** {story.hard}",
        f"**Use it for** {story.use}",
        f"**{name}.** {story.look_for}",
    ]
    if picture:
        lines.append(f"![{name}: {source.paper.artefacts[story.figure].title}]({picture})")
    return "\n\n".join(lines)


def opening_figure(source: Source) -> bytes:
    """Return the figure that opens the notebook as PNG."""
    artefact = source.paper.artefacts[story_of(source.paper).figure]
    return report.figure_png(artefact.figure(source.look(artefact.name)), dpi=85)


CHART, ALL_EFFECTS = "verdicts.png", "effects.png"


def overview(sources: Mapping[str, Source], folder: str) -> str:
    """Return Markdown of all papers on one page: idea, promises, verdicts, and two figures.

    `folder` is put before the figures' names, which are those of `overview_figures`.
    """
    # JupyterLab centres the columns of a table that says nothing of them.
    rows = [
        "| paper | idea | held up? | verdicts |",
        "| :--- | :--- | :--- | :--- |",
    ]
    claims = []
    for source in sources.values():
        paper, story = source.paper, story_of(source.paper)
        judged = view.paper_verdicts(source)
        claims += judged
        counted = view.in_words(view.counts(view.of_papers(judged) or judged))
        counted = counted.replace(", ", "<br>").replace(" ", "&nbsp;")
        link = f"**[{paper.title}]({paper.notebook}.ipynb)**"
        kept = "<br>".join(held(paper.key, judged))
        idea = f"{report.markdown(story.idea)}<br>**Use it for** {story.use}"
        rows.append(f"| {link} | {idea} | {kept} | {counted} |")
    return "\n\n".join(
        [
            "**What each gives and costs**, as ratios, and how accuracy changes, in points. "
            "Hollow: the paper's. Solid: ours, with its 95 % interval where it has one. ×1 and +0 "
            "are no effect.",
            f"![What each method gives and costs, in the paper and here]({folder}{ALL_EFFECTS})",
            f"**Did they hold up?** {view.lead_of(claims)} Measured {ran_on(sources.values())}, "
            "most of it with small networks and data that stand in for the papers'.",
            "\n".join(rows),
            "Undecided: the data allow both answers. Not seen here: it failed, but our setting is "
            "not the paper's. Not run: it needs hardware or data that we did not have.",
            f"![How many claims of each paper got each verdict]({folder}{CHART})",
        ]
    )


def ran_on(sources: Iterable[Source]) -> str:
    """Return the devices of records in a few words; of CPUs not which."""
    devices = {
        record.device["name"] if record.device["type"] != "cpu" else "CPUs"
        for source in sources
        for group in source.records.values()
        for record in group
    }
    return f"on {', '.join(sorted(devices))}" if devices else "no records yet"


def overview_figures(sources: Mapping[str, Source]) -> dict[str, bytes]:
    """Return the figures of `overview` as PNG, by name."""
    from repro import plots

    counts = {
        source.paper.title: view.counts(rows)
        for source in sources.values()
        if (rows := view.of_papers(view.paper_verdicts(source)))
    }
    drawn = {CHART: plots.verdict_counts(counts), ALL_EFFECTS: effects_figure(sources)}
    return {name: report.figure_png(figure, dpi=85) for name, figure in drawn.items()}


def effects_figure(sources: Mapping[str, Source]) -> "Figure":
    """Draw what each method gives and costs, signed by the devices and profiles of ours."""
    from repro import plots

    groups = {s.paper.title: effects for s in sources.values() if (effects := effects_of(s))}
    figure = plots.gains_and_costs(groups)
    for axis in figure.axes[:2]:
        axis.set_xlabel("ratio (logarithmic)")
    plots.sign(
        figure,
        f"Ours: {ran_on(sources.values())}; mostly small networks and data that stand in for the "
        "papers'. SIMULATED: by a model of a machine, or within a limit that the machine does not "
        "have.",
    )
    return figure


def setup(source: Source) -> list[str]:
    """Return sentences that hold for all artefacts of a paper, said once."""
    every = [source.look(name) for name in source.paper.artefacts]
    records = [record for results in every for record in results.records]
    records += [record for results in every if results.gpu for record in results.gpu.records]
    if not records:
        return ["Nothing has been run yet."]
    profiles = sorted({results.profile for results in every if results.records})
    versions = sorted({record.versions["torch"] for record in records})
    sentences = [
        f"Ours: {devices(records)}, profile {', '.join(profiles)}, torch {', '.join(versions)} "
        f"({source.label})."
    ]
    if "quick" in profiles:
        sentences.append(
            "The profile quick checks that everything runs: small networks, few images and epochs. "
            "What such trainings cannot decide is undecided here."
        )
    data = {record.dataset["name"]: record.dataset for record in records if record.dataset}
    for name, facts in sorted(data.items()):
        kind = "SYNTHETIC, " * (facts["kind"] == "synthetic")
        origin = facts["provenance"].rstrip(".").replace("stand-in", "STAND-IN")
        sentences.append(f"Data: {kind}{name}: {origin}.")
    return [
        *sentences,
        *story_of(source.paper).setup,
        "Tables give the mean ± the standard deviation over n seeds (or repeats); [a, b] is a "
        "95 % interval. Figures draw the paper's values hollow, ours solid, and bars or bands for "
        "intervals or deviations, as each says. "
        "SIMULATED: by a model of a machine, or within a limit that the machine does not have. "
        "STAND-IN: other data or another network takes the place of the paper's. SYNTHETIC: "
        "generated data.",
    ]


_RECIPES = {"paper profile": "paper", "gpu": "gpu", "long": LONG, "quick": "quick"}  # by column


def recipe(paper: Paper) -> list[dict[str, str]]:
    """Return a row for every item: the paper's value, those of planned runs, why they differ.

    An item names keys of a configuration (``ours``), and which of the planned runs has it
    (``where``); with ``every`` all their values are listed. ``same`` is a text for all profiles.
    """
    plans = {}
    for column, profile in _RECIPES.items():
        chosen = {task: names[0] for task, names in paper.datasets[profile].items()}
        planned = plan(paper, paper.artefacts.values(), profile, chosen)
        plans[column] = [{"experiment": run.experiment, **run.config} for run in planned]
    compared = []
    for row in paper_toml(paper.key)["recipe"]:
        ours = {name: _value(row, plans[name], _RECIPES[name]) for name in plans}
        why = "" if all(value == row["paper"] for value in ours.values()) else row["why"]
        compared.append(
            {"item": row["item"], "paper": row["paper"], **ours, "why they differ": why}
        )
    return compared


def _value(row: Mapping[str, Any], configs: Sequence[Mapping[str, Any]], profile: str) -> str:
    if "same" in row:
        return str(row["same"])
    if row["ours"] == "seeds":
        return str(len(SEEDS[profile]))
    keys = [row["ours"]] if isinstance(row["ours"], str) else row["ours"]
    values = [
        ", ".join(_text(value_at(config, key)) for key in keys if value_at(config, key) is not ...)
        for config in configs
        if all(value_at(config, key) == value for key, value in row["where"].items())
    ]
    shown = values if row.get("every") else values[:1]
    return ", ".join(dict.fromkeys(value or report.DASH for value in shown)) or "not run"


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        parts = [str(value["name"])] if "name" in value else []
        parts += [f"{name} {_text(one)}" for name, one in value.items() if name != "name"]
        return ", ".join(parts)
    if isinstance(value, list | tuple):
        return " ".join(map(_text, value))
    if value is None:
        return "all"
    return f"{value:g}" if isinstance(value, float) else str(value)
