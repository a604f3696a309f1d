r"""One spelling of LaTeX, before anything is read: \dfrac1e, **\frac 1{\mathrm{e}}** and $\frac{1}{e}$ are one text."""

import re

TOKEN = re.compile(r"\\(?:[A-Za-z]+|.)|.", re.DOTALL)
_LOOKS = (
    r"− - – - × \times · \cdot ÷ / ± \pm ∓ \mp √ \sqrt ∞ \infty ≤ \le ≥ \ge ≠ \ne ∪ \cup ∩ \cap ∈ \in ∅ \emptyset π \pi"
).split()
_UNICODE = {
    ord(sign): f"{latex} " if latex[1:] else latex for sign, latex in zip(_LOOKS[::2], _LOOKS[1::2], strict=True)
}
_UNICODE |= {ord("…"): r"\ldots ", ord("°"): r"^\circ ", ord("²"): "^2", ord("³"): "^3", ord("’"): "'", ord("′"): "'"}
_FUNCTIONS = "arc(?:sin|cos|tan|cot|sec|csc)|(?:sin|cos|tan)h?|cot|sec|csc|ln|log|exp"
_SPELLINGS = tuple((re.compile(pattern, re.IGNORECASE if pattern[0] == "^" else 0), by) for pattern, by in (
    (r"\\(?:left|right|middle|[bB]igg?[lrm]?|(?:display|text)style|limits|bf|rm|it|[lL]arge|huge)(?![A-Za-z])", ""),
    (r"\\(?:mathbf|boldsymbol|bm|pmb|mathit|mathsf|mathtt|underline|fbox|boxed)(?![A-Za-z])", ""),
    (r"\\(?:text)?color *\{\w+\}", ""),
    (r"\\(?:mathrm|text(?:rm|normal|it|bf|sf|tt|up)|[mh]box|operatorname\*?) *(?=\{)", r"\\text"),
    (r"(?<![\d.,])\d{1,3}(?:(?:\{,\}|,? ?\\!,?|~| |(?<!,)\\[,;: ]) ?\d{3})+(?!\d)", lambda m: re.sub(r"\D", "", m[0])),
    (r"(?<!\\)\\!", ""),
    (r"\\(?:q?quad(?![A-Za-z])|[hv]space\*?\{[^{}]*\})|(?<!\\)\\[:>;,\s]|\s|~", " "),
    (r"\^ *(?:\{ *\\circ *\}|\\circ)|\\degree(?![A-Za-z])", r"\\text{degree}"),
    (r"\\text\{degree\} *(?:\\text ?\{)? *[CF]\b *\}?$", r"\\text{celsius}"),
    (r"\\?%", r"\\text{percent}"),
    (rf"\\text *\{{ *({_FUNCTIONS}) *\}}", r"\\\1 "),
    (r"\\text *\{ *([ei]) *\}", r"\1"),
    (r"^(?:\\text *\{)? *(?:(?:the |final |correct )*answer(?: is|:)|option|choice|either) *\}? *(?=\S)", ""),
    (r"(?:\\text *\{)? *all real(?:s| numbers) *\}?", r"\\mathbb{R}"),
    (r"\\text *\{ *\}", ""),
    (r"(?<=\d) *(?:\\text *\{)? *([apAP])\.? ?[mM]\b\.? *\}?", lambda m: rf"\text{{{m[1].lower()}m}}"),
    (r"^0(?=\d:)", ""),
    (r",? *(?:\\text *\{ *(or|and) *\}|\b(or|and)\b)", lambda m: f" {m[1] or m[2]} "),
    (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
    (r"\{([^{}]*)\\choose(?![A-Za-z])([^{}]*)\}", r"\\binom{\1}{\2}"),
    (r"\\[dt]binom(?![A-Za-z])", r"\\binom"),
    (r"\\(?:leq(?:slant)?|le)(?![A-Za-z])|<=", r"\\le "),
    (r"\\(?:geq(?:slant)?|ge)(?![A-Za-z])|>=", r"\\ge "),
    (r"\\(?:neq|ne)(?![A-Za-z])", r"\\ne "),
    (r"\\lt(?![A-Za-z])", "<"),
    (r"\\gt(?![A-Za-z])", ">"),
    (r"\\(?:varnothing|O)(?![A-Za-z])", r"\\emptyset"),
    (r"\\(?:c|l)?dots[cbmio]?(?![A-Za-z])|\.\.\.", r"\\ldots "),
    (r" *(?:\{ *: *\}|\\colon(?![A-Za-z])|:) *", ":"),
    (rf"(?<![\\A-Za-z])(sqrt|pi|infty|{_FUNCTIONS})(?![A-Za-z])", r"\\\1 "),
    (r"([+-]) *([+-])", lambda m: "+" if m[1] == m[2] else "-"),
))  # fmt: skip
_WRAPPERS = (
    r"\*\*(.+)\*\*",
    r"__(.+)__",
    r"\$\$?([^$]+)\$\$?",
    r"\\\((.+)\\\)",
    r"\\\[(.+)\\\]",
    r"\\text *\{((?!\w\w+\})[^{}]*)\}",
)
_ARGUMENTS = {r"\frac": 2, r"\binom": 2, r"\sqrt": 1, r"\overline": 1, r"\text": 1, r"\pmod": 1, "^": 1, "_": 1}


def spelled(text: str) -> str:
    """Return an answer in one spelling, without what only changes its looks."""
    text = text.translate(_UNICODE).strip()
    for _ in range(3):
        text = re.sub(r"(?<!\.)\. *$", "", text).strip()
        for wrapper in _WRAPPERS:
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
    """Return the next token with its arguments in braces; other braces are brackets, or nothing around one token."""
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
    if command in ("^", "_", r"\sqrt"):  # x^-12 is meant as x^{-12}
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
