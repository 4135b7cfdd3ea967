"""Runs pyright in strict mode on the text of a user script."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def pyright(folder: Path, text: str) -> list[Any]:
    """Return pyright's diagnostics for a script, which is written to `folder`."""
    (folder / "user.py").write_text(text)
    settings = {"typeCheckingMode": "strict", "extraPaths": [str(ROOT)], "include": ["user.py"]}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    words = ["-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "-p", str(folder)]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=folder)
    report = json.loads(done.stdout)
    assert report["summary"]["filesAnalyzed"] == 1, done.stderr
    return report["generalDiagnostics"]


def wrong_lines(folder: Path, text: str) -> set[int]:
    """Return the numbers (from 0) of the lines in which pyright finds an error."""
    return {diagnostic["range"]["start"]["line"] for diagnostic in pyright(folder, text)}
