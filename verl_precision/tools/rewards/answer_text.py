r"""Reads the parts of an answer that are not mathematics, its unit and its words, and reads plain numbers.

Answers with two different units are different; an answer may omit its unit. As in the paper's code, 5\% is 5 and not
0.05. Units are not converted.
"""

import re
from fractions import Fraction

from verl_precision.base.files import table_of

_TABLES = table_of(__file__)
_UNIT_OF: dict[str, str] = {word: words.split()[0] for words in _TABLES["units"] for word in words.split()}
KNOWN_UNITS = frozenset(_UNIT_OF.values())
_PHRASES: dict[str, list[str]] = _TABLES["phrases"]
_COUNTS: dict[str, int] = _TABLES["counts"]
_NO_UNIT = frozenset(_TABLES["no_unit"].split())
_POWER = r" *(?:\^\{-?\d\} *)?"
_WORDED = re.compile(
    rf"(.*?[^ {{(,;=+*/-]) *(?:((?:\\text\{{[A-Za-z .'/-]+\}}{_POWER})+)|( [A-Za-z]{{2,}}(?:[ /]+[A-Za-z]+)*{_POWER})|"
    rf"(?<=[\d}}])([A-Za-z]{{2,}}{_POWER}))"
)
# An exponent has at most two digits, because 1e999999999 would fill the memory.
_DECIMAL = re.compile(r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d{1,200}|(?=\.\d))(?:\.\d{0,200})?(?:[eE][+-]?\d\d?)?", re.ASCII)
_FRACTION = re.compile(r"([+-]?)(?:\\[dt]?frac\{(\d{1,200})\}\{(\d{1,200})\}|(\d{1,200})/(\d{1,200}))", re.ASCII)


def plain_number(text: str) -> Fraction | None:
    r"""Return the number of a text that is only a number, as 1,234.5, 3e5 or -\frac{1}{2}; None for other texts."""
    if _DECIMAL.fullmatch(text):
        return Fraction(text.replace(",", ""))
    if not (found := _FRACTION.fullmatch(text)):
        return None
    above, below = int(found[2] or found[4]), int(found[3] or found[5])
    return Fraction(above if found[1] != "-" else -above, below) if below else None


def amount_of(text: str) -> tuple[str, frozenset[str], int]:
    r"""Return an amount, the words of its unit, and the value of its count word: 5, $, 10^6 for \$5\text{ million}.

    A word that is in no table is its own unit. If a word changes the statement, the whole text is the amount.
    """
    money = re.fullmatch(r"([+-]?) *\\?([$€£]) *(.+)", text)
    names, amount, count = ({money[2]}, money[1] + money[3], 1) if money else (set[str](), text, 1)
    if not (tail := _WORDED.fullmatch(amount)):
        return amount, frozenset(names), count
    in_text, bare, attached = tail.groups()[1:]
    words = (in_text or bare or attached).lower().replace(r"\text", "").replace("/", " per ")
    for word in re.findall(r"[a-z]+|\^\{-?\d", words):
        name = _UNIT_OF.get(word) or _UNIT_OF.get(word.removesuffix("s") if len(word) > 3 else "")
        known = name or word in _COUNTS or word in _PHRASES or word[0] == "^"
        if word in _NO_UNIT or not (in_text or known or (bare and len(word) > 3)):
            return text, frozenset(), 1
        if word in _COUNTS:
            count *= _COUNTS[word]
        else:
            names |= {*_PHRASES.get(word, [name or word.removesuffix("s")])}
    return tail[1], frozenset(names), count


def same_unit(one: frozenset[str], other: frozenset[str]) -> bool:
    """Return whether two units are equal, or one is missing; `integer` and `distinct integer` are equal."""
    return not one or not other or ((one <= other or other <= one) and not (one ^ other) & KNOWN_UNITS)


def words_of(text: str) -> str:
    """Return a text without spaces and currency signs, in small letters if it has a word."""
    text = " ".join(re.sub(r"\\text\{([^{}]*)\}|\\?\$", r"\1", text).split()).removesuffix(".")
    text, has_word = re.sub(r"(?<!\d) | (?!\d)", "", text), re.search(r"(?<![A-Za-z\\])[A-Za-z][a-z]{2}", text)
    return text.lower() if has_word else text
