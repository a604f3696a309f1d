"""Put the preset groups on Hydra's search path, so that `+precision=fp16` works with any config."""

from types import ModuleType

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin


class VerlPrecisionSearchPath(SearchPathPlugin):
    """Appends this package's presets, after the user's own directories."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append the presets."""
        search_path.append(provider="verl_precision", path="pkg://verl_precision.presets")


def register_search_path(hydra_main: ModuleType) -> None:
    """Register the search path with Hydra, once."""
    plugins = Plugins.instance()
    if VerlPrecisionSearchPath not in plugins.discover(SearchPathPlugin):
        plugins.register(VerlPrecisionSearchPath)
