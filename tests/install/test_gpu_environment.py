"""The GPUs' environment: its lock agrees with setup.py, verl and our ranges; the image is made of it and checked."""

import re
import subprocess
from collections.abc import Iterator
from importlib import metadata

import pytest
import setuptools  # noqa: F401  (brings distutils)
from composer import ROOT
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from verl_precision.base.versions import loads_adapters, require_tested

LINES = [line for line in (ROOT / "requirements" / "gpu.lock").read_text().splitlines() if not line.startswith("#")]
PINS = dict(line.split("==") for line in LINES)
PYTHON = {"python_version": "3.12", "python_full_version": "3.12.0"}
INSTALL = (ROOT / "docs" / "install.md").read_text()
DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text()
# Instructions, each with its text on one line.
WHOLE = re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", DOCKERFILE, flags=re.M))
INSTRUCTIONS = [line.split(" ", 1) for line in WHOLE.splitlines() if line]
TEXTS = {word: [text for each, text in INSTRUCTIONS if each == word] for word, _ in INSTRUCTIONS}


def _unmet(requirement: Requirement, seen: set[str]) -> Iterator[str]:
    """Yield what the lock lacks of a requirement, and of all that follows from it as far as it is installed here."""
    name = canonicalize_name(requirement.name)
    pin, asked = PINS.get(name), f"{name}{sorted(requirement.extras)}"
    if pin is None or not requirement.specifier.contains(pin, prereleases=True):
        yield f"{requirement}, locked: {pin}"
    distribution = next(iter(metadata.distributions(name=name)), None)
    ends_here = asked in seen or distribution is None or distribution.version != pin
    seen.add(asked)
    for wanted in map(Requirement, () if ends_here else distribution.requires or ()):
        environments = [default_environment() | PYTHON | {"extra": extra} for extra in ("", *requirement.extras)]
        if wanted.marker is None or any(wanted.marker.evaluate(environment) for environment in environments):
            yield from _unmet(wanted, seen)


def test_lines_are_pins_and_nothing_else():
    """No option, no address of an index, no name twice."""
    assert all(re.fullmatch(r"[a-z0-9-]+==[\w.]+", line) for line in LINES)
    assert len(PINS) == len(LINES) > 200


def test_setup_and_verl_agree_with_the_lock(monkeypatch):
    from distutils.core import run_setup

    monkeypatch.chdir(ROOT)
    setup = run_setup("setup.py", stop_after="init")  # the file itself: the installed copy may be older
    asked = [*setup.install_requires, *(text for each in ("gpu", "math", "dev") for text in setup.extras_require[each])]
    assert metadata.version("verl") == PINS["verl"], "else the pins of verl's extras cannot be read here"
    seen: set[str] = set()
    assert [problem for text in asked for problem in _unmet(Requirement(text), seen)] == []
    assert len(seen) > 100


def test_versions_are_those_we_support_and_document():
    require_tested("verl", PINS["verl"])
    assert loads_adapters(PINS["vllm"])
    table = dict(re.findall(r"^\| ([\w-]+) \| ([\d.]+) \|", INSTALL, re.M))
    assert {"verl", "vllm", "torch", "transformers", "flash-attn"} <= set(table)
    assert table == {name: PINS[name] for name in table}
    brought = f"brings vLLM {PINS['vllm']}, torch {PINS['torch']} and transformers {PINS['transformers']} to GPUs"
    assert brought in (ROOT / "docs" / "versions.md").read_text()


def test_there_is_one_cuda():
    """nvcc 13.2 refuses the headers of 13.0: "CUDA compiler and CUDA toolkit headers are incompatible"."""
    cuda = PINS["cuda-toolkit"].rpartition(".")[0]
    parts = ("nvcc", "crt", "cccl", "runtime", "nvrtc")
    assert {name: PINS[f"nvidia-cuda-{name}"].rpartition(".")[0] for name in parts} == dict.fromkeys(parts, cuda)


def test_image_is_made_from_the_lock_on_its_cuda():
    assert set(TEXTS) == {"FROM", "SHELL", "RUN", "ARG", "ENV", "COPY", "WORKDIR"}
    (base,) = TEXTS["FROM"]
    assert re.fullmatch(r"nvidia/cuda:[\w.-]+", base) and base.partition(":")[2].startswith(PINS["cuda-toolkit"])
    assert "requirements/gpu.lock /tmp/gpu.lock" in TEXTS["COPY"]
    sources = {source for text in TEXTS["COPY"] for source in text.split()[:-1]}
    assert {source for source in sources if not (ROOT / source).exists()} == set()
    assert [text for text in TEXTS["RUN"] if "/tmp/gpu.lock" in text and "uv pip install" in text]
    architectures = 'FLASH_ATTN_CUDA_ARCHS="80;90;100"'
    assert architectures in TEXTS["ARG"] and INSTALL.count(f"{architectures} MAX_JOBS=") == 1
    assert INSTRUCTIONS[-1] == ["RUN", "verl-precision check"], "it checks itself last"


@pytest.mark.parametrize("script", TEXTS["RUN"], ids=lambda text: text.split()[0])
def test_shell_of_the_image_parses(script):
    done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr


def test_image_leaves_nothing_out_that_is_tracked():
    ignored = {line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith(("#", "**/"))}
    listed = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()
    assert not ignored & {name.partition("/")[0] for name in listed}
