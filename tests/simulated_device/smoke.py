"""The smoke profile on the simulated device: all of it, or one run of each kind."""

from repro.experiments import PAPERS, arguments, load_paper
from repro.experiments import run as running
from repro.experiments.design import Paper, Run
from repro.records import RecordStore

# Other processes have no simulated device, and it has no times through which a line could go.
_ELSEWHERE = {
    ("engine", "ray"), ("experiment", "parallel"), ("experiment", "wall"), ("experiment", "times"),
}  # fmt: skip
_WITHOUT_A_DEVICE = {("experiment", name) for name in ("simulated", "link", "chunk_sizes")}


def runs_of(paper: Paper) -> list[Run]:
    """Return the runs of a paper's smoke profile, but those that it cannot carry out."""
    chosen = arguments.choose_datasets(paper, "smoke")
    return [
        run
        for run in arguments.plan(paper, paper.artefacts.values(), "smoke", chosen)
        if (_ELSEWHERE | _WITHOUT_A_DEVICE).isdisjoint(
            [("engine", run.config.get("engine")), ("experiment", run.experiment)]
        )
    ]


def one_of_each_kind(runs: list[Run]) -> list[Run]:
    """Return the first run of each kind, by what chooses the code that it executes."""
    first: dict[tuple[object, ...], Run] = {}
    for run in runs:
        chosen = [run.config.get(name) for name in ("mode", "strategy", "engine")]
        first.setdefault((run.experiment, *chosen, run.config.get("micro_batch") is None), run)
    return list(first.values())


def carry_out(paper: Paper, runs: list[Run], store: RecordStore, device: str) -> list[str]:
    """Compute the records of runs, and return what is wrong with them."""
    tally = running.execute(paper, runs, running.Setting("smoke", device), store, print)
    records = list(store.load(paper.key))
    wrong = [f"{each.experiment}: {each.error}" for each in records if each.status == "failed"]
    wrong += [f"{each.device}" for each in records if each.device["name"] != "Simulated Device"]
    if not tally.done == len(runs) == len(records):
        wrong.append(f"{len(runs)} runs, {tally.done} done, {len(records)} records")
    return wrong


def everything() -> int:
    """Carry out the whole profile under the race checker; return the exit code."""
    from repro import paths
    from simulated_device.checking import checked

    wrong = []
    for name in PAPERS:
        paper = load_paper(name)
        store = RecordStore(paths.results_dir() / "local" / "smoke")
        with checked():
            wrong += carry_out(paper, runs_of(paper), store, "sim:0")
    print("\n".join(wrong) or "smoke profile on the simulated device: no failure, no race")
    return bool(wrong)
