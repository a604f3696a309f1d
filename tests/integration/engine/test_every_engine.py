"""The table of engines in docs/architecture.md is what each engine did here; UPDATE_DOCS=1 writes it anew."""

import json
import os
from pathlib import Path

import forked

PAGE = Path(__file__).parents[3] / "docs/architecture.md"
START, END = "<!-- engines: made by tests/integration/engine/test_every_engine.py -->\n", "<!-- engines: end -->\n"
FOLDERS = (Path(__file__).parent, Path(__file__).parents[2])
OTHERS = "VeOmni, TorchTitan"  # need GPUs, and packages that are not here
NEVER = ("an FP16 overflow", "digests", "FP32 log-probs")  # what they have not, by their code


def table(cells: dict[str, dict[str, str]]) -> str:
    """Return the table in Markdown."""
    engines = [*next(iter(cells.values())), OTHERS]
    lines = ["| | " + " | ".join(engines) + " |", "|---" * (len(engines) + 1) + "|"]
    for what, row in cells.items():
        other = "no" if what.startswith(NEVER) else "not run"
        lines.append("| " + " | ".join([what, *row.values(), other]) + " |")
    return "\n".join(lines) + "\n"


def test_the_table_of_engines_is_what_they_did(tmp_path):
    paths = f"import sys\nsys.path[:0] = {[str(folder) for folder in FOLDERS]!r}\n"
    done = forked.run(f"{paths}import runpy\nrunpy.run_module('every_engine', run_name='__main__')", tmp_path)
    assert done.returncode == 0, done.stderr[-6000:]
    made = table(json.loads(done.stdout.splitlines()[-1]))
    head, _, rest = PAGE.read_text().partition(START)
    stands, _, tail = rest.partition(END)
    if os.environ.get("UPDATE_DOCS") == "1":
        PAGE.write_text(head + START + made + END + tail)
    else:
        assert stands == made, "make it anew: UPDATE_DOCS=1"
