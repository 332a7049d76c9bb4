"""θ-adaptive batch size (Lee et al.): experiments and claims."""

from collections.abc import Mapping
from functools import partial

from repro.experiments.adaptive import claims, figures, grids, runs, tables, worker
from repro.experiments.adaptive.captions import caption
from repro.experiments.adaptive.grids import CIFAR, DIV2K, PHANTOM, STRATEGIES, TASKS
from repro.experiments.design import Artefact, Claim, Experiment, Paper, Run

Chosen = Mapping[str, str]


def _strategies(profile: str, chosen: Chosen, task: str) -> list[Run]:
    runs_ = [grids.training(profile, task, chosen, strategy) for strategy in STRATEGIES]
    if task != CIFAR:
        return runs_
    # Section III-E's SGD; and ours, not the paper's: what is used most today.
    return runs_ + [grids.training(profile, task, chosen, name) for name in ("large", "noise")]


def _figure1(profile: str, chosen: Chosen) -> list[Run]:
    return [grids.fixed(profile, DIV2K, chosen, n) for n in grids.PAPER[DIV2K]["figure1"]]


def _figure2(profile: str, chosen: Chosen) -> list[Run]:
    sizes = grids.PAPER[CIFAR]["figure2"]
    return [
        *(grids.fixed(profile, CIFAR, chosen, n) for n in sizes),
        grids.training(profile, CIFAR, chosen, "theta"),
    ]


def _figure6(profile: str, chosen: Chosen) -> list[Run]:
    found = []
    for task in (DIV2K, PHANTOM):
        own = grids.PAPER[task]
        for name in ("best", "theta", "linear"):
            found.append(grids.fixed(profile, task, chosen, own[name]["batch"]))
        found.append(grids.training(profile, task, chosen, "theta"))
    return found


def _stable(profile: str, chosen: Chosen) -> list[Run]:
    return [grids.norms(profile, task, chosen) for task in TASKS]


def _parallel(profile: str, chosen: Chosen) -> list[Run]:
    return [grids.parallel(profile)]


def _scaling(name: str, title: str, task: str, own: tuple[Claim, ...], note: str = "") -> Artefact:
    return Artefact(
        name=name,
        title=f"Strong scaling of {title}",
        source=name.replace("figure", "Figure "),
        runs=_parallel,
        table=partial(tables.scaling, task=task),
        figure=partial(figures.scaling, task=task),
        caption=caption(f"Speed-ups over one node, by strategy.{note}", scaling=True),
        claims=own,
    )


_CURVES = "Mean over seeds (lines at the curves' ends: one standard deviation)."

_ARTEFACTS = (
    Artefact(
        name="figure1",
        title="Learning curves by batch size",
        source="Figure 1",
        runs=_figure1,
        table=partial(tables.fixed_batches, task=DIV2K),
        figure=figures.figure1,
        caption=caption(
            f"EDSR for super-resolution with fixed batch sizes, rates in proportion. {_CURVES} The "
            "largest has linear scaling's warm-up."
        ),
        claims=claims.FIGURE1,
    ),
    Artefact(
        name="figure2",
        title="Cost and θ by batch size",
        source="Figure 2",
        runs=_figure2,
        table=partial(tables.fixed_batches, task=CIFAR),
        figure=figures.figure2,
        caption=caption(
            f"θ = (F(w_0) - F(w)) / ‖w_0 - w‖ after each epoch. {_CURVES} The peak is looked for "
            "before the first decay of the rate. Section III-D has θ of 128 peak in epoch 5, "
            "section VI-C that of 256."
        ),
        claims=claims.FIGURE2,
    ),
    Artefact(
        name="figure3",
        title="θ after the decay of the rate",
        source="Figure 3",
        runs=partial(_strategies, task=CIFAR),
        table=tables.after_decay,
        figure=figures.figure3,
        caption=caption(f"θ by strategy. {_CURVES}"),
        claims=claims.FIGURE3,
    ),
    Artefact(
        name="stable",
        title="Maximum stable batch size",
        source="Section III-D",
        runs=_stable,
        table=tables.stable,
        figure=figures.stable,
        caption=caption(
            "Norms of the averaged gradient, in float32, at w_0 and after some epochs with the "
            "best fixed batch; B_s is the largest size up to which they lie within 10 % of that of "
            "the smallest (how similar they have to be, and when, the paper leaves open). The "
            "figure shows seed 0, with standard errors."
        ),
        claims=claims.STABLE,
    ),
    Artefact(
        name="figure4",
        title="Super-resolution: four strategies",
        source="Table I, Figure 4",
        runs=partial(_strategies, task=DIV2K),
        table=partial(tables.strategies, task=DIV2K),
        figure=partial(figures.learning, task=DIV2K),
        caption=caption(
            f"{_CURVES} Differences in dB with Welch's 95 % interval. Table I prints rates that "
            "grow for the third method, the text a fixed one, which is what was run."
        ),
        claims=claims.FIGURE4,
    ),
    Artefact(
        name="figure5",
        title="Phantom restoration: four strategies",
        source="Table II, Figure 5",
        runs=partial(_strategies, task=PHANTOM),
        table=partial(tables.strategies, task=PHANTOM),
        figure=partial(figures.learning, task=PHANTOM),
        caption=caption(
            f"{_CURVES} Differences in dB with Welch's 95 % interval. The third method has a fixed "
            "rate, as in figure4."
        ),
        claims=claims.FIGURE5,
    ),
    Artefact(
        name="figure6",
        title="θ of EDSR by batch size",
        source="Figure 6",
        runs=_figure6,
        table=partial(tables.theta_curves, tasks=(DIV2K, PHANTOM)),
        figure=figures.figure6,
        caption=caption(f"{_CURVES} The peak is looked for from the end of a warm-up on."),
        claims=claims.FIGURE6,
    ),
    _scaling("figure7", "EDSR on DIV2K", DIV2K, claims.FIGURE7),
    _scaling("figure8", "EDSR on Phantom", PHANTOM, claims.FIGURE8),
    Artefact(
        name="figure9",
        title="Where the time of a step goes",
        source="Figure 9, section IV-B",
        runs=_parallel,
        table=tables.breakdown,
        figure=figures.figure9,
        caption=caption(
            "Communication is the time in which gradients were under way, blocked the part in "
            "which nothing was computed meanwhile. all_to_all is the paper's averaging."
        ),
        claims=claims.FIGURE9,
    ),
    Artefact(
        name="breakdown",
        title="Where the time goes on many nodes",
        source="Figure 9",
        runs=_parallel,
        table=tables.projected,
        figure=figures.projected,
        caption=caption(
            "The paper's θ-adaptive training of EDSR on DIV2K. Times are over the computation on "
            "one node; the last column is the share of all time before the batch is B_m.",
            scaling=True,
        ),
        claims=claims.BREAKDOWN,
    ),
    Artefact(
        name="figure10",
        title="CIFAR-10: loss and accuracy of four strategies",
        source="Table III, Figure 10",
        runs=partial(_strategies, task=CIFAR),
        table=partial(tables.strategies, task=CIFAR),
        figure=figures.figure10,
        caption=caption(
            f"{_CURVES} Differences in points with Welch's 95 % interval. Table III prints rates "
            "that grow for the third method; the text fixes it at 0.2 and doubles the batch every "
            '30 epochs, which is what was run, without decays. "SGD, large batch" is section '
            "III-E's, whose rate is ASSUMED to be the best batch's. The noise scale is no method "
            "of the paper's: its batch follows tr(Σ) / |G|²."
        ),
        claims=claims.FIGURE10,
    ),
    _scaling(
        "figure11",
        "ResNet-20 on CIFAR-10",
        CIFAR,
        claims.FIGURE11,
        " The paper does not say on how many nodes the best fixed batch reaches 3.49.",
    ),
)

PAPER = Paper(
    key="adaptive",
    title="θ-adaptive batch size",
    citation="Lee, Kang, Madireddy, Balaprakash, Agrawal, Choudhary, Archibald, Liao: Improving "
    "Scalability of Parallel CNN Training by Adjusting Mini-Batch Size at Run-Time",
    notebook="03_adaptive",
    experiments={
        "train": Experiment("train", runs.train, runs.modules, measures=False),
        "norms": Experiment("norms", runs.norms, runs.modules, measures=False),
        "parallel": Experiment("parallel", worker.parallel, runs.modules),
    },
    artefacts={artefact.name: artefact for artefact in _ARTEFACTS},
    datasets=grids.DATASETS,
)
