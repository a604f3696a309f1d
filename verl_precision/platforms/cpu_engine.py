"""verl's FSDP engines for device cpu.

FSDP1 cannot broadcast CPU parameters (`sync_module_states=True` wants an accelerator), so only `fsdp2` is registered:
a run that asks for `strategy=fsdp` on a CPU is refused by name instead of failing inside FSDP.
"""

from types import ModuleType

from verl_precision.errors import ConfigurationError, RegistrationError
from verl_precision.weight_sync.manifest import send_with_manifest

KEY = ("cpu", "cpu")  # (device, vendor): a vendor key can not clash with a device-only registration


def register_engines(transformer_impl: ModuleType) -> None:
    """Register a CPU variant of each FSDP engine under (device=cpu, vendor=cpu)."""
    from verl.workers.engine.base import EngineRegistry

    for model_type, base in (
        ("language_model", transformer_impl.FSDPEngineWithLMHead),
        ("value_model", transformer_impl.FSDPEngineWithValueHead),
    ):
        owner = EngineRegistry._engines.get(model_type, {}).get("fsdp2", {}).get(KEY)
        if owner is not None and owner.__module__ != __name__:
            raise RegistrationError(
                f"verl engine {model_type}/fsdp2 for (device, vendor) {KEY} is already registered by "
                f"{owner.__module__}.{owner.__qualname__}. Uninstall one of the two packages."
            )
        if owner is None:
            engine = _cpu_variant(base)
            EngineRegistry.register(model_type=model_type, backend=["fsdp2"], device="cpu", vendor="cpu")(engine)
            EngineRegistry.register(model_type=model_type, backend=["fsdp"], device="cpu", vendor="cpu")(
                type(f"Refused{engine.__name__}", (engine,), {"__init__": _refuse_fsdp1, "__module__": __name__})
            )


def _cpu_variant(base: type) -> type:
    """Subclass a verl engine: same training, and a manifest at the end of every weight stream."""

    class CPUEngine(base):  # type: ignore[misc, valid-type]
        __doc__ = f"{base.__name__} on a CPU; see {__name__}."

        def get_per_tensor_param(self, *args, **kwargs):
            """Return verl's weight stream, closed by the manifest the rollout verifies."""
            weights, peft_config = super().get_per_tensor_param(*args, **kwargs)
            return send_with_manifest(weights), peft_config

    CPUEngine.__name__ = CPUEngine.__qualname__ = f"{base.__name__}OnCPU"
    return CPUEngine


def _refuse_fsdp1(self: object, *args: object, **kwargs: object) -> None:
    raise ConfigurationError(
        "strategy=fsdp: FSDP1 cannot wrap CPU parameters. Allowed on a CPU: fsdp2. "
        "Set actor_rollout_ref.actor.strategy=fsdp2 (and ref, critic), as scale=cpu does."
    )
