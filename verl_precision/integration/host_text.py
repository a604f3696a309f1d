"""A host module's text: what it defines, without the seconds and the side effects of an import."""

import ast
import functools
import importlib.util
from pathlib import Path
from typing import Any

FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


def reads_as_tested(module: str, name: str, parameters: tuple[str, ...] | type | None) -> bool:
    """Return whether a module's text defines a symbol, and a function with these parameters; fields of the ledger."""
    node = _in_text(module, name)
    if not isinstance(parameters, tuple) or not isinstance(node, FUNCTIONS):
        return node is not None
    names = [each.arg for each in ast.iter_child_nodes(node.args) if isinstance(each, ast.arg)]
    of_class = any(ast.unparse(each) == "classmethod" for each in node.decorator_list)
    return parameters == tuple(names[of_class:])


@functools.cache
def _in_text(module: str, name: str) -> ast.AST | None:
    """Return what defines a name in a module's text; None for what is inherited, or bound in an `if` or a `try`."""
    spec = importlib.util.find_spec(module.partition(".")[0])
    if spec is None or spec.origin is None:
        return None
    place = Path(spec.origin).parents[1].joinpath(*module.split("."))
    file = next((each for each in (place / "__init__.py", place.with_suffix(".py")) if each.is_file()), None)
    first, *inner = name.split(".")
    body = [] if file is None else _parsed(file).body
    found: Any = next((node for node in body if _binds(node, first)), None)
    if isinstance(found, ast.ImportFrom):
        package = module if place.is_dir() else module.rpartition(".")[0]
        (original,) = (each.name for each in found.names if first == (each.asname or each.name))
        origin = importlib.util.resolve_name("." * found.level + (found.module or ""), package)
        return None if origin == module else _in_text(origin, ".".join((original, *inner)))
    for part in inner:
        body = getattr(found, "body", [])
        found = next((node for does in (_binds, _stores) for node in body if does(node, part)), None)
    return found  # type: ignore[no-any-return]


@functools.cache
def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _binds(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.ClassDef | FUNCTIONS):
        return node.name == name
    if isinstance(node, ast.Import | ast.ImportFrom):
        return name in (each.asname or each.name for each in node.names)
    return any(isinstance(each, ast.Name) and each.id == name for each in ast.walk(node))


def _stores(node: ast.AST, attribute: str) -> bool:
    found = (each for each in ast.walk(node) if isinstance(each, ast.Attribute) and each.attr == attribute)
    return any(isinstance(each.ctx, ast.Store) for each in found)
