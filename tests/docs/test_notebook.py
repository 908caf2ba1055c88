"""The notebook in examples/notebook runs from top to bottom, in a kernel of Jupyter's."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tests import environments
from tests.process import clean_environment

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "notebook" / "notebook.ipynb"
RUN = """
import json, sys

import nbformat
from nbclient import NotebookClient

notebook = NotebookClient(nbformat.read(sys.argv[1], 4), timeout=60).execute()
print(json.dumps([output["text"] for cell in notebook.cells for output in cell.get("outputs", ())]))
"""


def test_the_notebook_prints_what_its_model_returns() -> None:
    python = environments.python("notebook")
    done = subprocess.run(
        [str(python), "-c", RUN, str(NOTEBOOK)],
        capture_output=True,
        text=True,
        check=False,
        env=clean_environment(),
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["[10.0, 20.0]\n", "[30.0]\n"]
