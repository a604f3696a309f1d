"""The errors this package raises; each says the setting, the value got, what is allowed and what to do."""


class VerlPrecisionError(Exception):
    """Base of all errors raised by verl_precision."""


class ConfigurationError(VerlPrecisionError, ValueError):
    """A setting has a value that cannot work."""


class RegistrationError(VerlPrecisionError, RuntimeError):
    """A name or key that this package registers with verl is missing, changed or owned by someone else."""


class EnvironmentMismatchError(VerlPrecisionError, RuntimeError):
    """An installed version or this machine cannot do what was asked."""


class WeightSyncError(VerlPrecisionError, RuntimeError):
    """After a weight sync, the rollout's weights are not the trainer's."""


class LossScaleError(VerlPrecisionError, ArithmeticError):
    """Gradients stay non-finite however small the loss scale is."""


class PrecisionContradictionError(VerlPrecisionError, RuntimeError):
    """Something ran in another dtype than the config asks for."""


class PatchError(VerlPrecisionError, RuntimeError):
    """A tree cannot be patched, or not safely."""


class CheckpointStateError(VerlPrecisionError, RuntimeError):
    """State that this package keeps in a checkpoint cannot be read back."""


class MismatchAlarmError(VerlPrecisionError, RuntimeError):
    """The mismatch alarm ended a run, as `on_alarm=stop` asks."""
