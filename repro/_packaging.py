"""Files that a build adds to the package: the reference records, the notebooks, the commit.

In a checkout they lie beside the package, where an editable install finds them; a wheel has them in
``repro/shipped``. A source distribution has the project's other folders (MANIFEST.in), so that a
wheel made from it is the same. pyproject.toml names the commands; no module imports this one.
"""

import json
import runpy
import shutil
from collections.abc import Iterator
from pathlib import Path

from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

# Relative to the project's folder, the working directory of every build.
PACKAGE = Path("repro")
SHIPPED = {
    "notebooks": ("notebooks", "[0-9]*.ipynb"),
    "reference": ("results/reference", "**/*.jsonl.gz"),
}


def shipped() -> Iterator[tuple[Path, Path]]:
    """Yield the files that a wheel adds to the package's own, and their places in it."""
    for name, (folder, pattern) in SHIPPED.items():
        for file in sorted(Path(folder).glob(pattern)):
            parts = file.relative_to(folder).parts
            if not any(part.startswith(".") for part in parts):  # left by a killed writer
                yield file, PACKAGE / "shipped" / name / file.relative_to(folder)


def write_state(package: Path) -> None:
    """Write the built commit, of the checkout or else of the source distribution."""
    namespace = runpy.run_path(str(PACKAGE / "paths.py"))
    state = namespace["checkout_state"]()
    commit, dirty = state if state[0] else namespace["built_from"]()
    target = package / "build.json"
    target.unlink(missing_ok=True)  # it may be a hard link to the source's file
    target.write_text(json.dumps({"commit": commit, "dirty": dirty}) + "\n", encoding="utf-8")


class BuildPy(build_py):
    """Build the package with these files; an editable install finds them in the checkout."""

    def run(self) -> None:
        """Copy the files into the folder that becomes the wheel."""
        if self.editable_mode:
            super().run()
            return
        built = Path(self.build_lib)
        # Else modules and records deleted since an earlier build would be in the wheel.
        shutil.rmtree(built / PACKAGE, ignore_errors=True)
        super().run()
        for file, target in shipped():
            (built / target).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, built / target)
        write_state(built / PACKAGE)


class SDist(sdist):
    """Make a source distribution with its commit."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        """Lay out the folder that becomes the archive."""
        super().make_release_tree(base_dir, files)
        write_state(Path(base_dir) / PACKAGE)
