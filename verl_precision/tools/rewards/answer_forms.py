r"""An answer's form: a value, list, tuple or interval, set, matrix, equation, relation, or union of sets.

First, an answer gets one spelling of LaTeX: \dfrac1e, **\frac 1{\mathrm{e}}** and $\frac{1}{e}$ become the same text.
An answer is read completely or not at all: a text without a form stays words, which equal only the same words.
"""

import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

from verl_precision.base.files import table_of

TOKEN = re.compile(r"\\(?:[A-Za-z]+|.)|.", re.DOTALL)
NAME = re.compile(r"\(?(?:[A-Za-z]|\\[A-Za-z]+)(?:_\{[^{}]*\}|'|[A-Z]+)*(?:\([A-Za-z, ]+\))?(?:, ?[a-z])*\)?")
_OPEN, _CLOSE = ("(", "[", "{", r"\{", r"\begin", r"\langle"), (")", "]", "}", r"\}", r"\end", r"\rangle")
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_LISTED = r"\b(?:or|and)\b|[,;]"
_EQUATION = r"=|\\(?:approx|in)(?![A-Za-z])"
_RELATION = r"<|>|\\(?:le|ge|ne)(?![A-Za-z])"
_MATRIX = re.compile(r"(-?[^,;=+-]*)\\begin\{([pb]?matrix|array)\}(?:\{[lcr|]*\})?(.*)\\end\{\2\}")
_TABLES = table_of(__file__)
_SIGNS = str.maketrans(_TABLES["signs"])
_COMPUTED: dict[str, Callable[[re.Match[str]], str]] = {
    "DIGITS": lambda found: re.sub(r"\D", "", found[0]),
    "SIGN": lambda found: "+" if found[1] == found[2] else "-",
}
_SPELLINGS = [
    (re.compile(pattern.replace("FUNCTIONS", _TABLES["functions"])), _COMPUTED.get(by, by))
    for pattern, by in _TABLES["spellings"]
]
_ARGUMENTS = {r"\frac": 2, r"\binom": 2, r"\sqrt": 1, r"\overline": 1, r"\text": 1, r"\pmod": 1, "^": 1, "_": 1}


def spelled(text: str) -> str:
    """Return an answer in one spelling, without commands that only change its appearance."""
    text = text.translate(_SIGNS).strip()
    for _ in range(3):
        text = re.sub(r"(?<!\.)\. *$", "", text).strip()
        for wrapper in _TABLES["wrappers"]:
            if found := re.fullmatch(wrapper, text, re.DOTALL):
                text = found[1].strip()
    for pattern, by in _SPELLINGS:
        text = pattern.sub(by, text)
    if len(re.findall(r"(?<!\\)\$", text)) % 2 == 0:
        text = re.sub(r"(?<!\\)\$", "", text)
    tokens, spelt = TOKEN.findall(text.strip()), list[str]()
    while tokens:
        spelt.append(_next(tokens, spelt[-1] if spelt else ""))
    return re.sub(r"(?<!\.)\. *$", "", re.sub(" +", " ", "".join(spelt))).strip()


def _next(tokens: list[str], before: str = "") -> str:
    """Return the next token with its arguments in braces; other braces become brackets, or vanish around one token."""
    token = tokens.pop(0)
    if token == "{":
        inner = _group(tokens)
        if re.fullmatch(r"\\[A-Za-z]+|\{array\}", before):
            return "{" + inner + "}"
        return inner if len(TOKEN.findall(inner)) < 2 or inner.isdigit() else f"({inner})"
    if token == r"\sqrt" and "".join(tokens).lstrip().startswith("["):
        while token[-1] != "]" and tokens:
            token += tokens.pop(0)
        return token + _argument(tokens, r"\sqrt")
    return token + "".join(_argument(tokens, token) for _ in range(_ARGUMENTS.get(token, 0)))


def _argument(tokens: list[str], command: str) -> str:
    while tokens and tokens[0] == " ":
        tokens.pop(0)
    if not tokens:
        return ""
    if tokens[0] == "{":
        tokens.pop(0)
        return "{" + _group(tokens) + "}"
    if tokens[0] == "(" and command in ("^", r"\sqrt"):
        tokens.pop(0)
        return "{" + _group(tokens, "(", ")") + "}"
    taken = _next(tokens)
    if command in ("^", "_", r"\sqrt"):  # x^-12 means x^{-12}
        if taken == "-" and tokens and command != r"\sqrt":
            taken += _next(tokens)
        while tokens and taken[-1].isdigit() and tokens[0].isdigit():
            taken += tokens.pop(0)
    return "{" + taken + "}"


def _group(tokens: list[str], opening: str = "{", closing: str = "}") -> str:
    parts: list[str] = []
    while tokens and tokens[0] != closing:
        if tokens[0] == opening == "(":
            tokens.pop(0)
            parts.append("(" + _group(tokens, "(", ")") + ")")
        else:
            parts.append(_next(tokens, parts[-1] if parts else ""))
    if tokens:
        tokens.pop(0)
    return "".join(parts)


class Form(NamedTuple):
    """The form of an answer: its kind, its text, and its parts, which are forms, too."""

    kind: str  # value list set tuple matrix row equation relation cup cap setminus
    text: str
    parts: tuple["Form", ...] = ()
    signs: tuple[str, ...] = ()  # between the parts of an equation, a relation or a list; the brackets of a tuple


def form_of(answer: str) -> Form:
    """Return the form of an answer as it was written."""
    text = spelled(answer)
    for found in reversed([*_THOUSANDS.finditer(_masked(text, braces=False))]):
        text = text[: found.start()] + found[0].replace(",", "") + text[found.end() :]
    return _read(text)


def _masked(text: str, braces: bool = True) -> str:
    r"""Return a text with \0 in place of each character within brackets; without `braces`, LaTeX braces are none."""
    masked, depth = "", 0
    for token in TOKEN.findall(text):
        depth -= token in _CLOSE and (braces or token != "}")
        masked += "\0" * len(token) if depth else token
        depth += token in _OPEN and (braces or token != "{")
    return masked


def _split(text: str, pattern: str) -> tuple[list[str], list[str]]:
    """Return the parts between the separators that are outside all brackets, and these separators."""
    parts, signs, start = [], [], 0
    for found in re.finditer(pattern, _masked(text)):
        parts.append(text[start : found.start()].strip())
        signs.append(found[0])
        start = found.end()
    return [*parts, text[start:].strip()], signs


def _read(text: str) -> Form:
    text = text.strip()
    for kind, pattern in (("list", _LISTED), ("equation", _EQUATION)):
        parts, signs = _split(text, pattern)
        if not all(parts):
            return Form("value", text)
        if signs and signs[-1] == r"\approx" and (len(signs) > 1 or not NAME.fullmatch(parts[0])):
            return _read(text[: text.rindex(signs[-1])])
        if signs:
            read = tuple(map(_read, parts))
            return Form(kind, text, _items(read) if kind == "list" else read, tuple(signs))
    for kind in ("setminus", "cup", "cap"):
        parts, signs = _split(text, rf"\\{kind}(?![A-Za-z])")
        if signs:
            return Form(kind, text, tuple(map(_read, parts)))
    masked, tokens = _masked(text), TOKEN.findall(text)
    enclosed = len(tokens) > 1 and tokens[0] in _OPEN and masked.strip("\0") == masked
    enclosed = enclosed and masked.replace("\0", "") == tokens[0] + tokens[-1]
    inner = "".join(tokens[1:-1]).strip()
    if enclosed and tokens[0] == r"\{":
        parts, _ = _split(inner, r"\\mid(?![A-Za-z])|\||:")
        if len(parts) == 2:  # {x | x > 0}
            return _read(parts[1])
        items = _read(inner)
        return Form("set", text, (items.parts if items.kind == "list" else (items,)) if inner else ())
    if re.search(r"\\(?:pm|mp)(?![A-Za-z])", text):
        return _both_signs(text)
    parts, signs = _split(text, _RELATION)
    if signs:
        return Form("relation", text, tuple(map(_read, parts)), tuple(signs)) if all(parts) else Form("value", text)
    if enclosed and tokens[0] != r"\begin":
        parts, signs = _split(inner, "[,;]")
        if not signs and text[0] in "({[":
            return _read(inner)
        brackets = (text[0], text[-1]) if text[0] in "([" else ("(", ")")
        return Form("tuple", text, tuple(map(_read, parts)), brackets) if all(parts) else Form("value", text)
    if matrix := _MATRIX.fullmatch(text):
        cells = [_split(row, "&")[0] for row in _split(matrix[3], r"\\\\")[0] if row]
        rows = [tuple(_read(f"{matrix[1]}({cell})") for cell in row) for row in cells]
        return Form("matrix", text, tuple(Form("row", "&".join(cell.text for cell in row), row) for row in rows))
    return Form("value", text)


def _both_signs(text: str) -> Form:
    r"""Return the values of a text with \pm: with \mp in it, all signs change together, otherwise each on its own."""
    count = 0 if r"\mp" in text else 1
    upper, lower = (
        re.sub(r"\\mp(?![A-Za-z])", other, re.sub(r"\\pm(?![A-Za-z])", one, text, count=count))
        for one, other in ("+-", "-+")
    )
    return Form("list", text, _items(map(_read, (upper, lower)))) if text.count(r"\pm") < 4 else Form("value", text)


def _items(forms: Iterable[Form]) -> tuple[Form, ...]:
    r"""Return the items of a list; one item may stand for several, as 1 \pm \sqrt5 does."""
    return tuple(item for form in forms for item in (form.parts if form.kind == "list" else (form,)))
