"""What the ledger says of one host symbol, and the comparison of a symbol with what is said."""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType

from verl_precision.errors import RegistrationError

Form = tuple[str, ...] | type | None


@dataclass(frozen=True)
class LedgerEntry:
    """One host symbol we depend on.

    Attributes:
        module: module that holds it.
        name: dotted name inside the module.
        parameters: its form in the tested releases. Of a callable: its parameter names. Of a class, a registry or a
            constant: the type it is an instance of. None: an attribute that instances of the class get.
        kind: `patched` (wrapped; `how` says for whom anything changes), `overridden` (in a subclass of ours), `used`
            (called, read or registered with) or `relied on` (reached through another entry's symbol).
        why: what fails without it.
        how: what we do.
        upstream: issue or pull request, or why there is none.
        until: when the entry can go.
    """

    module: str
    name: str
    parameters: Form
    kind: str
    why: str
    how: str
    upstream: str
    until: str


def family(
    module: str, symbols: Mapping[str, str | type | None], kind: str, why: str, how: str, until: str, upstream: str
) -> Iterator[LedgerEntry]:
    """Yield an entry for each of several symbols of one module that are there for one reason.

    Args:
        module: module that holds them.
        symbols: name -> parameter names separated by commas, or another form as in `LedgerEntry.parameters`.
        kind: as in `LedgerEntry`; the following too.
        why: what fails without them.
        how: what we do.
        until: when the entries can go.
        upstream: issue or pull request, or why there is none.
    """
    for name, form in symbols.items():
        parameters = tuple(form.replace(",", " ").split()) if isinstance(form, str) else form
        yield LedgerEntry(module, name, parameters, kind, why, how, upstream, until)


def require_expected_signature(entry: LedgerEntry, module: ModuleType) -> None:
    """Raise unless the symbol exists and has the form it had in the tested releases.

    Args:
        entry: the ledger entry.
        module: the imported host module.

    Raises:
        RegistrationError: naming the symbol, what was found and what is expected.
    """
    *parents, last = entry.name.split(".")
    owner: object = module
    for part in parents:
        owner = getattr(owner, part, None)
    symbol = getattr(owner, last, None)
    form = entry.parameters
    if form is None:
        if not (isinstance(owner, type) and _gives_its_instances(owner, last)):
            raise _changed(entry, "does not exist in the installed version")
    elif symbol is None or (isinstance(form, tuple) and not callable(symbol)):
        raise _changed(entry, "does not exist in the installed version")
    elif isinstance(form, tuple):
        found = tuple(inspect.signature(symbol).parameters)  # type: ignore[arg-type]
        if found != form:
            raise _changed(entry, f"takes {found}; the tested releases take {form}")
    elif not isinstance(symbol, form):
        raise _changed(entry, f"is of type {type(symbol).__name__}; in the tested releases it is a {form.__name__}")


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


def _changed(entry: LedgerEntry, what: str) -> RegistrationError:
    return RegistrationError(
        f"{entry.module}.{entry.name} {what}. It is needed because {entry.why}",
        remedy="Install a tested release (`verl-precision check` lists them).",
    )
