"""Our engines in verl's registry, under keys that verl's own do not have."""

from typing import Any

from verl.workers.engine.base import EngineRegistry

from verl_precision.base.errors import RegistrationError

# (device, vendor): verl prefers such a key to its own, which names the device only, and the two cannot clash.
NVIDIA, CPU = ("cuda", "nvidia"), ("cpu", "cpu")


def register_engine(engine: type, model_type: str, backend: str, key: tuple[str, str]) -> None:
    """Register an engine under a (device, vendor) key, once; refuse a key that another package owns."""
    owner = EngineRegistry._engines.get(model_type, {}).get(backend, {}).get(key)
    if owner is not None and owner.__module__ != engine.__module__:
        raise RegistrationError(
            f"verl engine {model_type}/{backend} for (device, vendor) {key} is already registered by "
            f"{owner.__module__}.{owner.__qualname__}",
            remedy="Uninstall one of the two packages.",
        )
    if owner is None:
        EngineRegistry.register(model_type=model_type, backend=backend, device=key[0], vendor=key[1])(engine)


class _ByConfig:
    config_type: type
    precise: type

    def __new__(cls, model_config: Any = None, engine_config: Any = None, *args: object, **kwargs: object) -> Any:
        ours = isinstance(engine_config, cls.config_type) and issubclass(cls.precise, cls)
        return object.__new__(cls.precise if ours else cls)


def by_config(base: type, name: str, config_type: type, ours: type, *verls: type) -> type:
    """Subclass an engine of verl, with the mixins `verls`; made with a config of our type it is one with `ours` too."""
    about = {"__module__": ours.__module__, "__doc__": f"{base.__name__}; see {ours.__module__}."}
    engine: Any = type(name, (*verls, _ByConfig, base), {**about, "config_type": config_type})
    engine.precise = type(name, (ours, engine), about)
    return engine
