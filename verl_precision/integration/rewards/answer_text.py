r"""A short answer as a number with a unit, or as words: \$32{,}348, 32,348 dollars and 3.2348e4 are one number.

The text part of the authors' rules, written anew and stricter: two different units are different answers, and numbers
are exact. As with the authors, 5\% is 5 and not 0.05. No expression is evaluated, so no answer costs time or memory.
"""

import re
from fractions import Fraction

LONGEST = 200  # characters of what is read: the patterns take the square of them
UNITS = (
    "percent percentage pct|dollar usd|cent|degree deg|square sq|cubic cu|per|millimeter mm millimetre|"
    "centimeter cm centimetre|meter m metre|kilometer km kilometre|inch in inches|foot ft feet|yard yd|mile mi|"
    "second s sec|minute min|hour h hr hrs|day|week|month|year yr yrs|gram g|kilogram kg|pound lb lbs|ounce oz|"
    "liter l litre|milliliter ml|gallon gal|mph|kph kmh|unit|point|way|integer|student|person people|man men|"
    "child children|woman women|apple|coin|cup|ticket|tile|marble"
)
_UNIT_OF = {word: line.split()[0] for line in UNITS.split("|") for word in line.split()}
_TEXT = r"\\(?:text|mathrm|textrm|textnormal|textit|textbf|mbox)\s*\{"
_WRAPPED = re.compile(rf"\$((?:[^$\\]|\\.)*)\$|{_TEXT}([^{{}}]*)\}}")
_REWRITES = (
    (_TEXT, r"\\text{"),
    (r"\{([,:])\}", r"\1"),
    (r",\\!|(?<=\d)(?:\\[,;: ]|~)(?=\d{3}(?!\d))", ","),  # between thousands
    (r"(?<!\\)\\[!,;: ]|~|\\q?quad(?![a-z])|\s+", " "),
    (r"\^\s*\{?\\circ\}?|°", r"\\text{degree}"),
    (r"\\?%", r"\\text{percent}"),
    (r"\\varnothing", r"\\emptyset"),
    (r"(?<!\.)\. *$", ""),  # as a sentence ends
)
_MONEY = re.compile(r"([+-]?)\s*\\?\$\s*(\d.*|\.\d.*)")
_TAIL = re.compile(r"(.+?)(?: *\\text\{([A-Za-z ]+)\}| +([A-Za-z]+(?: +[A-Za-z]+)*)) *(?:\^ *\{?([23])\}?)?")
# An exponent of two digits: 1e999999999 would fill the memory.
_DECIMAL = re.compile(r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d+|(?=\.\d))(?:\.\d*)?(?:[eE][+-]?\d\d?)?", re.ASCII)
_FRAC = re.compile(r"\\[dt]?frac\s*(?:\{(\d+)\}\{(\d+)\}|(\d)\s*(\d))", re.ASCII)
_FRACTION = re.compile(r"([+-]?) *(?:(\d+) +)?(\d+) */ *(\d+)", re.ASCII)


def same_text(answer: str, truth: str) -> bool:
    r"""Return whether two short answers are one number, in no unit or in the same, or the same words.

    `\text{No solution}` and `no solution` are the same words: spaces do not matter, nor capitals where there is a word.
    3\frac12 is 7/2; 3\frac32 is no number. Answers longer than `LONGEST` are not compared.
    """
    if max(len(answer), len(truth)) > LONGEST:
        return False
    (value, unit), (other, unit_of_other) = _reading(answer), _reading(truth)
    return value != "" and value == other and (unit == unit_of_other or not (unit and unit_of_other))


def _reading(text: str) -> tuple[Fraction | str, str]:
    if wrapped := _WRAPPED.fullmatch(text.strip()):
        text = wrapped[1] or wrapped[2] or ""
    for pattern, by in _REWRITES:
        text = re.sub(pattern, by, text)
    amount, units = text.strip(), set[str]()
    if money := _MONEY.fullmatch(amount):
        amount = money[1] + money[2]
        units.add("dollar")
    if (tail := _TAIL.fullmatch(amount)) and (unit := _unit(*tail.groups()[1:])):
        amount = tail[1]
        units.add(unit)
    number = _number(_FRAC.sub(r" \1\3/\2\4 ", amount).strip())
    return (_words(text), "") if number is None else (number, " ".join(sorted(units)))


def _unit(in_text: str | None, bare: str | None, power: str | None) -> str:
    """Return a unit in one spelling; empty if a word is none. A bare letter is a variable."""
    words = (in_text or bare or "").lower().split()
    names = [_UNIT_OF.get(word) or _UNIT_OF.get(word.removesuffix("s") if len(word) > 3 else "") for word in words]
    if not words or None in names or (bare and min(map(len, words)) == 1):
        return ""
    return " ".join([{"2": "square", "3": "cubic"}.get(power or "", ""), *map(str, names)]).strip()


def _number(text: str) -> Fraction | None:
    if _DECIMAL.fullmatch(text):
        return Fraction(text.replace(",", ""))
    if not (found := _FRACTION.fullmatch(text)):
        return None
    whole, above, below = (int(part or 0) for part in found.groups()[1:])
    if below == 0 or (found[2] and above >= below):  # 3 3/2 is a product, or a slip
        return None
    return (whole + Fraction(above, below)) * (-1 if found[1] == "-" else 1)


def _words(text: str) -> str:
    text = " ".join(re.sub(r"\\text\{([^{}]*)\}|\\?\$", r"\1", text).split()).removesuffix(".")
    text, has_word = re.sub(r"(?<!\d) | (?!\d)", "", text), re.search(r"(?<![A-Za-z\\])[A-Za-z][a-z]{2}", text)
    return text.lower() if has_word else text
