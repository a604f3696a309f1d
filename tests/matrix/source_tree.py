"""Read a package's Python without importing it: names, re-exports, members and parameters, from its syntax trees."""

import ast
from collections.abc import Iterator
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
        """Return what defines `module.name`, through re-exports; the last definition wins, as when it is executed.

        Args:
            module: Dotted name of the module.
            name: Dotted name in the module; `Class.method` looks in base classes too.
        """
        first, _, rest = name.partition(".")
        found, home = self._top_level(module, first)
        return found if not rest or found is None else self._member(found, home, rest)

    def _top_level(self, module: str, name: str) -> tuple[ast.AST | None, str]:
        tree = self.module(module)
        found: tuple[ast.AST | None, str] = (None, module)
        for node in [] if tree is None else executed(tree.body):
            if name in bound_names(node):
                if isinstance(node, ast.ImportFrom):
                    original = next(a.name for a in node.names if name == (a.asname or a.name))
                    found = self._top_level(self.absolute(module, node), original)
                elif not isinstance(node, ast.Import):
                    found = (node, module)
        if found[0] is None and (submodule := self.module(f"{module}.{name}")) is not None:
            found = (submodule, f"{module}.{name}")
        return found

    def _member(self, owner: ast.AST, home: str, name: str) -> ast.AST | None:
        if not isinstance(owner, ast.ClassDef):
            return None
        for node in executed(owner.body):
            if name in bound_names(node):
                return node
            if isinstance(node, FUNCTIONS) and node.name == "__init__" and name in attributes_set(node):
                return node
        for base in owner.bases:
            if isinstance(base, ast.Name):
                parent, parent_home = self._top_level(home, base.id)
                if parent is not None and (found := self._member(parent, parent_home, name)) is not None:
                    return found
        return None

    def absolute(self, module: str, node: ast.ImportFrom) -> str:
        """Return the absolute name of the module that a `from ... import` in `module` reads."""
        if not node.level:
            return node.module or ""
        path = self.path(module)
        parts = module.split(".")
        up = node.level - (path is not None and path.name == "__init__.py")
        return ".".join([*parts[: len(parts) - up], *([node.module] if node.module else [])])


def executed(body: list[ast.stmt], required: bool = False) -> Iterator[ast.stmt]:
    """Yield the statements that importing a module executes, or may: those in `if`, `try` and `with` too.

    Args:
        body: Body of a module or class.
        required: Leave out what stands in a `try` that has a handler, and may fail.
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


def attributes_set(function: ast.AST) -> set[str]:
    """Return the names x of which a method stores `self.x`."""
    attributes = (node for node in ast.walk(function) if isinstance(node, ast.Attribute))
    return {
        node.attr
        for node in attributes
        if isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name) and node.value.id == "self"
    }


def parameters(node: ast.AST) -> tuple[str, ...]:
    """Return a function's parameter names, in the order of `inspect.signature`."""
    assert isinstance(node, FUNCTIONS)
    a = node.args
    several = [*a.posonlyargs, *a.args, a.vararg, *a.kwonlyargs, a.kwarg]
    return tuple(argument.arg for argument in several if argument is not None)
