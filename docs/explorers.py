"""Compute the notebooks' widgets beforehand, for the site: ``python docs/explorers.py``.

Writes a folder of pictures for each, and the HTML that shows them, beside the report's files.
"""

import os
from importlib import import_module
from pathlib import Path

from repro.experiments import PAPERS, load_paper
from repro.experiments.explorer import Explorer
from repro.experiments.processes import Workers
from repro.experiments.query import find_source

FOLDER = Path(__file__).parents[1] / "build" / "report" / "explorers"


def write(key: str) -> list[str]:
    """Write the widgets of a paper, by its reference records, and return their names."""
    module = import_module(f"repro.experiments.{key}.widget")
    explorers: list[Explorer] = module.explorers(find_source(load_paper(key), local=False).look)
    for explorer in explorers:
        page = explorer.write(FOLDER / explorer.name, f"../explorers/{explorer.name}")
        FOLDER.joinpath(f"{explorer.name}.html").write_text(page, encoding="utf-8")
    return [explorer.name for explorer in explorers]


if __name__ == "__main__":
    with Workers(max(2, os.cpu_count() or 1)) as workers:
        for _, names in workers.map(write, [key for key in PAPERS if key != "together"]):
            print(f"widgets: {', '.join(names)}", flush=True)
