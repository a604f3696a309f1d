"""What a trap found, and the machine it was asked about."""

from dataclasses import dataclass
from typing import Literal

from verl_precision.errors import describe
from verl_precision.versions import installed_vllm

Severity = Literal["error", "warning"]


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong with a composed config.

    Attributes:
        name: stable, for machines and for searching the docs (docs/precision.md).
        severity: an error is refused before Ray starts when a preset is in use; a warning is only said.
        setting: full path of the setting.
        value: what it is.
        problem: what happens because of it.
        allowed: the values that do not.
        remedy: what to do.
    """

    name: str
    severity: Severity
    setting: str
    value: object
    problem: str
    allowed: str
    remedy: str

    def __str__(self) -> str:
        """Return one line for a log."""
        subject = f"{self.setting}={self.value}: " if self.setting else ""  # as one writes it in an override
        return f"{subject}{describe(self.problem, allowed=self.allowed, remedy=self.remedy)} [{self.name}]"


@dataclass(frozen=True)
class Environment:
    """What a trap may have to know beyond the config.

    Attributes:
        vllm: version of the installed vLLM, or None.
        gpus: names of the GPUs of this machine.
    """

    vllm: str | None = None
    gpus: tuple[str, ...] = ()

    @classmethod
    def here(cls) -> "Environment":
        """Look at this machine."""
        import torch

        gpus = tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
        return cls(vllm=installed_vllm(), gpus=gpus)

    @classmethod
    def without_gpus(cls) -> "Environment":
        """Look at what is installed; asking for GPUs would start CUDA in this process, and no error depends on them."""
        return cls(vllm=installed_vllm())
