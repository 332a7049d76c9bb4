"""What all figures of Micro-Batch Streaming share: a style for each way, and panel titles."""

from collections.abc import Iterable

from repro import plots
from repro.experiments.captions import panel
from repro.experiments.mbs.describing import network
from repro.records import Record

WITHOUT, WITH, SUMMED, BY_SAMPLES = "without MBS", "with MBS", "not normalised", "by samples (ours)"
STYLES = plots.styles((WITHOUT, WITH, SUMMED, BY_SAMPLES))


def whose(role: str, records: Iterable[Record]) -> str:
    """Return a panel's title: whose numbers it shows, ours of which network and data."""
    shown = [record for record in records if record.config["role"] == role]
    if not shown:
        return f"{role}: not run"
    networks = dict.fromkeys(network(role, record.config["model"]) for record in shown)
    data = dict.fromkeys(record.dataset["name"] for record in shown if record.dataset)
    return panel(role, " and ".join(networks), " and ".join(data))
