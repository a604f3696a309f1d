"""verl's FSDP engines for device cpu.

FSDP1 cannot broadcast CPU parameters (`sync_module_states=True` wants an accelerator), so only `fsdp2` is registered:
a run that asks for `strategy=fsdp` on a CPU is refused by name instead of failing inside FSDP.
"""

from types import ModuleType

from verl_precision.errors import ConfigurationError

KEY = ("cpu", "cpu")  # (device, vendor): a vendor key can not clash with a device-only registration


class AlwaysManifest:
    """Weights can be loaded again on a CPU by `VerifiedWeightSyncExtension` only, which reads the manifest."""

    _sends_manifest = True


def register_engines(transformer_impl: ModuleType) -> None:
    """Register a CPU variant of each FSDP engine under (device=cpu, vendor=cpu)."""
    from verl_precision.integration.fsdp_engine import precision_variant, register_variant

    for model_type, base in (
        ("language_model", transformer_impl.FSDPEngineWithLMHead),
        ("value_model", transformer_impl.FSDPEngineWithValueHead),
    ):
        engine = precision_variant(base, f"{base.__name__}OnCPU", AlwaysManifest, module=__name__)
        refused = type(f"Refused{engine.__name__}", (engine,), {"__init__": _refuse_fsdp1, "__module__": __name__})
        register_variant(engine, model_type, "fsdp2", KEY)
        register_variant(refused, model_type, "fsdp", KEY)


def _refuse_fsdp1(self: object, *args: object, **kwargs: object) -> None:
    raise ConfigurationError(
        "FSDP1 cannot wrap CPU parameters",
        setting="strategy",
        value="fsdp",
        allowed="fsdp2 on a CPU",
        remedy="Set actor_rollout_ref.actor.strategy=fsdp2 (and ref, critic), as scale=cpu does.",
    )
