"""Read a package's Python without importing it: names, re-exports, members and parameters, from its syntax trees."""

import ast
from collections.abc import Iterator
from importlib.util import resolve_name
from pathlib import Path

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
