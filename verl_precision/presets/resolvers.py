"""`${verl_precision.tiny_model:...}` in a config: the folder of a tiny model, built when first asked for."""

from types import ModuleType

TINY_MODEL = "verl_precision.tiny_model"


def register_resolvers(omegaconf: ModuleType) -> None:
    """Register this package's resolvers with OmegaConf, once."""
    if not omegaconf.OmegaConf.has_resolver(TINY_MODEL):
        omegaconf.OmegaConf.register_new_resolver(TINY_MODEL, _tiny_model)


def _tiny_model(architecture: str) -> str:
    from verl_precision.tiny_model import cached_tiny_model

    return str(cached_tiny_model(architecture))
