"""The errors of this package; each names the setting, its value, the allowed values and the remedy."""

import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


def describe(problem: str, setting: str = "", value: object = None, allowed: str = "", remedy: str = "") -> str:
    """Return the text of an error or finding for a user; the arguments are as in `VerlPrecisionError`."""
    head = ": ".join(filter(None, (subject(setting, value), problem)))
    parts = [part for part in (head, allowed and f"Allowed: {allowed}", remedy) if part]
    return head if parts == [head] else " ".join(map(sentence, parts))


def filled(words: Mapping[str, str], **names: object) -> dict[str, str]:
    """Return the fields of an error from a table, with `names` filled into their braces."""
    return {field: text.format(**names) for field, text in words.items()}


def sentence(text: str) -> str:
    """Return a text with a full stop at its end; an empty text stays empty."""
    return text if not text or text.endswith((".", "!", "?")) else f"{text}."


def subject(setting: str, value: object) -> str:
    """Return a setting with its value, as a user writes it in Python or on the command line, or an empty text."""
    if not setting:
        return ""
    return f"{setting} {value}" if setting.startswith("--") else f"{setting}={value!r}"


class VerlPrecisionError(Exception):
    """Base of all errors raised by verl_precision.

    `problem` is the fault or its consequence. `setting` is the full path of the setting at fault, or an option of the
    command line, or empty. `value` is the setting's value, `allowed` names the values that work, and `remedy` tells the
    user what to do.
    """

    def __init__(
        self, problem: str = "", *, setting: str = "", value: object = None, allowed: str = "", remedy: str = ""
    ) -> None:
        super().__init__(problem)
        self.problem, self.setting, self.value, self.allowed, self.remedy = problem, setting, value, allowed, remedy

    def __str__(self) -> str:
        """Return the fields as sentences."""
        return describe(self.problem, self.setting, self.value, self.allowed, self.remedy)


class ConfigurationError(VerlPrecisionError, ValueError):
    """A setting has a value that cannot work."""


class RegistrationError(VerlPrecisionError, RuntimeError):
    """A name or key that this package registers with verl is missing, changed, or belongs to other code."""


class EnvironmentMismatchError(VerlPrecisionError, RuntimeError):
    """An installed version or this machine does not support the requested action."""


class WeightSyncError(VerlPrecisionError, RuntimeError):
    """After a weight sync, the rollout's weights differ from the trainer's."""


class LossScaleError(VerlPrecisionError, ArithmeticError):
    """Gradients stay non-finite even at the smallest loss scale."""


class PrecisionContradictionError(VerlPrecisionError, RuntimeError):
    """A computation ran in another dtype than the config sets."""


class PatchError(VerlPrecisionError, RuntimeError):
    """A source tree cannot be patched safely."""


class CheckpointStateError(VerlPrecisionError, RuntimeError):
    """This package's state in a checkpoint cannot be read."""


class MismatchAlarmError(VerlPrecisionError, RuntimeError):
    """The mismatch alarm ended a run, because `on_alarm=stop` is set."""


class RunFailedError(VerlPrecisionError):
    """A process that was started for a job ended with an error; the message shows the cause and names the log."""


class CheckFailedError(VerlPrecisionError, AssertionError):
    """A check failed: of the self-test, of a loss, or of a measurement against its bar."""


def error_in_one_line(error: Exception) -> str:
    """Return an error in one line; an error of another library begins with its class."""
    known = isinstance(error, VerlPrecisionError | OSError)
    return " ".join((str(error) if known else f"{type(error).__name__}: {error}").split())[:1000]


@contextmanager
def after_ctrl_c(text: str) -> Iterator[None]:
    """Show this text if Ctrl-C ends the block."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(text) from None


@contextmanager
def ending_the_process(part: str) -> Iterator[None]:
    """End this process with a message if the block raises; verl would only warn and continue without this package.

    An unexpected error shows its traceback above the message, and `part` names the part of this package that failed.
    The error becomes SystemExit, because the hosts do not catch it.
    """
    try:
        yield
    except Exception as error:
        said, remedy = str(error), "The run stops because it cannot be checked. Correct the file that the error names"
        if isinstance(error, OSError) and error.filename is not None:
            said = describe(said, remedy=remedy)
        elif not isinstance(error, VerlPrecisionError):
            traceback.print_exc()
            place = traceback.extract_tb(error.__traceback__)[-1]
            said = f"{part}: {type(error).__name__} in {place.name} ({place.filename}:{place.lineno}): {said}"
            said = describe(said, remedy=f"{remedy}; or report it, with the traceback above")
        print(f"verl_precision: {said}", file=sys.stderr, flush=True)
        raise SystemExit(1) from error


def require(condition: bool, problem: str, remedy: str = "") -> None:
    """Raise CheckFailedError with this text unless the condition is true (in the self-test)."""
    if not condition:
        raise CheckFailedError(problem, remedy=remedy)
