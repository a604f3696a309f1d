r"""An answer's form: a value, a list, a tuple or an interval, a set, a matrix, a relation, a time of day, a ratio.

The whole answer is read, or none of it: what has no form stays words, which are equal to the same words alone.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from verl_precision.tools.rewards.answer_spelling import TOKEN as _TOKEN
from verl_precision.tools.rewards.answer_spelling import spelled

DEEPEST = 12  # brackets within brackets; latex2sympy takes seconds for more
_OPEN, _CLOSE = ("(", "[", "{", r"\{", r"\begin", r"\langle"), (")", "]", "}", r"\}", r"\end", r"\rangle")
_LISTED = r"\\text\{ *(?:or|and) *\}|\b(?:or|and)\b|[,;]"
_RELATION = r"<|>|=|\\(?:le|ge|ne|approx|in|notin)(?![A-Za-z])"
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_TIME = re.compile(r"(\d\d?)(?::([0-5]\d))?(?::([0-5]\d))? *(?:([ap])\.? ?m\.?)?", re.IGNORECASE)
_SIGNED = r"\\(?:pm|mp)(?![A-Za-z])"
_MATRIX = re.compile(r"(-?[^,;=+-]*)\\begin\{([pb]?matrix|array)\}(?:\{[lcr|]*\})?(.*)\\end\{\2\}")


@dataclass(frozen=True)
class Form:
    """What an answer is: its kind, its text, and its parts, which are forms."""

    kind: str  # value list set tuple matrix row relation cup cap setminus time ratio
    text: str
    parts: tuple["Form", ...] = ()
    signs: tuple[str, ...] = ()  # between the parts of a relation or a list; the brackets of a tuple; am or pm


def form_of(answer: str) -> Form:
    """Return the form of an answer as it was written."""
    text = spelled(answer)
    for found in reversed(list(_THOUSANDS.finditer(text))):
        if not _depth(text[: found.start()], "([") and not _depth(text[: found.start()], (r"\{",)):
            text = text[: found.start()] + found[0].replace(",", "") + text[found.end() :]
    return _read(text)


def deepest(text: str) -> int:
    """Return how many brackets are open at once, at most."""
    depth = most = 0
    for token in _TOKEN.findall(text):
        depth += (token in _OPEN) - (token in _CLOSE)
        most = max(most, depth)
    return most


def _depth(text: str, opening: "str | tuple[str, ...]") -> int:
    closing = [_CLOSE[_OPEN.index(token)] for token in opening]
    tokens = _TOKEN.findall(text)
    return sum(map(tokens.count, opening)) - sum(map(tokens.count, closing))


def _split(text: str, pattern: str) -> tuple[list[str], list[str]]:
    """Return what is between the separators outside all brackets, and the separators."""
    outside, depth = [], 0
    for found in _TOKEN.finditer(text):
        depth -= found[0] in _CLOSE
        outside.append(not depth)
        outside += [False] * (len(found[0]) - 1)
        depth += found[0] in _OPEN
    parts, signs, start = [], [], 0
    for found in re.finditer(pattern, text):
        if outside[found.start()] and found.start() >= start:
            parts.append(text[start : found.start()].strip())
            signs.append(re.sub(r"\\text\{ *| *\}", "", found[0]).strip())
            start = found.end()
    return [*parts, text[start:].strip()], signs


def _within(text: str) -> str | None:
    """Return what the first bracket holds, if it is closed by the last."""
    tokens, depth = _TOKEN.findall(text), 0
    if not tokens or tokens[0] not in ("(", "[", "{", r"\{", r"\langle"):
        return None
    for number, token in enumerate(tokens):
        depth += (token in _OPEN) - (token in _CLOSE)
        if depth == 0:
            return "".join(tokens[1:-1]).strip() if number == len(tokens) - 1 else None
    return None


def _read(text: str) -> Form:
    text = text.strip()
    if deepest(text) > DEEPEST:
        return Form("value", text)
    parts, signs = _split(text, _LISTED)
    if len(parts) > 1:
        kept = [
            part
            for number, part in enumerate(parts)
            if part or {"or", "and"}.isdisjoint(signs[number - 1 : number + 1])
        ]
        return Form("list", text, _items(map(_read, kept)), tuple(signs)) if all(kept) else Form("value", text)
    parts, signs = _split(text, _RELATION)
    if len(parts) == 2 and signs[0] == r"\in":
        return Form("relation", text, tuple(map(_read, parts)), ("=",))
    for kind in ("setminus", "cup", "cap"):
        parts, _ = _split(text, rf"\\{kind}(?![A-Za-z])")
        if len(parts) > 1:
            return Form(kind, text, tuple(map(_read, parts)))
    inner = _within(text)
    if inner is not None and text.startswith(r"\{"):
        parts, _ = _split(inner, r"\\mid(?![A-Za-z])|\||:")
        if len(parts) == 2:
            return _read(parts[1])
        items = _read(inner)
        return Form("set", text, (items.parts if items.kind == "list" else (items,)) if inner else ())
    if re.search(_SIGNED, text):
        return _both_signs(text)
    parts, signs = _split(text, _RELATION)
    if len(parts) > 1:
        return Form("relation", text, tuple(map(_read, parts)), tuple(signs)) if all(parts) else Form("value", text)
    if inner is not None:
        parts, _ = _split(inner, "[,;]")
        if len(parts) == 1 and text[0] in "({[":
            return _read(inner)
        brackets = text[0] + text[-1] if text[0] in "([" else "()"
        return (
            Form("tuple", text, tuple(map(_read, parts)), (brackets[0], brackets[1]))
            if all(parts)
            else Form("value", text)
        )
    if matrix := _MATRIX.fullmatch(text):
        rows = [
            [f"{matrix[1]}({cell})" for cell in _split(row, "&")[0]] for row in _split(matrix[3], r"\\\\")[0] if row
        ]
        return Form("matrix", text, tuple(Form("row", "&".join(row), tuple(map(_read, row))) for row in rows))
    time = _TIME.fullmatch(re.sub(r"\\text\{([^{}]*)\}", r" \1", text).replace("  ", " ").strip())
    if time and (time[2] or time[4]) and int(time[1]) <= 24:
        parts = [str(int(time[1])), time[2] or "00", time[3] or "00"]
        return Form("time", text, tuple(Form("value", part) for part in parts), ((time[4] or "").lower(),))
    parts, _ = _split(text, ":")
    if len(parts) > 1 and all(parts):
        return Form("ratio", text, tuple(map(_read, parts)))
    return Form("value", text)


def _both_signs(text: str) -> Form:
    r"""Return the values of a text with \pm: the signs go together with those of \mp, else each has its own."""
    upper, lower = text, text
    for sign, (one, other) in {r"\pm": ("+", "-"), r"\mp": ("-", "+")}.items():
        count = 0 if r"\mp" in text else 1
        upper = re.sub(rf"\{sign}(?![A-Za-z])", one, upper, count=count)
        lower = re.sub(rf"\{sign}(?![A-Za-z])", other, lower, count=count)
    if text.count(r"\pm") > 3 or text in (upper, lower):
        return Form("value", text)
    return Form("list", text, _items(map(_read, (upper, lower))))


def _items(forms: Iterable[Form]) -> tuple[Form, ...]:
    r"""Return the items of a list, of which one may be several: 1 \pm \sqrt5."""
    return tuple(item for form in forms for item in (form.parts if form.kind == "list" else (form,)))
