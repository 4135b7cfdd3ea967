"""The table of the versions that attnzoo requires, and of those that its tests pass with."""

from __future__ import annotations

import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from commandline.table import markdown

ROOT = Path(__file__).resolve().parent.parent
NAMES = {
    "python": "Python", "torch": "PyTorch", "triton": "Triton", "transformers": "transformers",
    "numpy": "numpy",
}  # fmt: skip
CONSTRAINTS = ("constraints.txt", "constraints-oldest.txt")


def versions_table(root: Path = ROOT) -> str:
    """A Markdown table. The required versions are those of pyproject.toml; the tested ones are
    those of the files of constraints and, for Python, the classifiers of pyproject.toml."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    required = {"python": project["requires-python"].removeprefix(">=")}
    for entry in [*project["dependencies"], *(entry for extra in extras for entry in extra)]:
        package = Requirement(entry)
        for bound in package.specifier:
            required[package.name] = bound.version
    pythons = [entry.split(" :: ")[-1] for entry in project["classifiers"] if "Python ::" in entry]
    tested = {"python": [version for version in pythons if "." in version]}
    for line in "".join((root / file).read_text() for file in CONSTRAINTS).splitlines():
        if line and not line.startswith("#"):
            package = Requirement(line)
            tested.setdefault(package.name, []).extend(x.version for x in package.specifier)
    rows = [("package", "required", "oldest tested", "newest tested")]
    for name, shown in NAMES.items():
        versions = sorted(tested[name], key=Version)
        lower = f"{required[name]} or later" if name in required else "any"
        rows.append((shown, lower, versions[0], versions[-1]))
    return markdown(rows)
