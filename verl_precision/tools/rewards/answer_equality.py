r"""Are two answers the same by mathematics? Their forms are compared part by part, and their values as they are.

A tuple has an order, a set has none, and a list without brackets is either; an inequality is its set; a name before an
equals sign, a unit, a percent sign and the base of a number may be left out, but two different ones are different.
"""

import re
from collections.abc import Callable, Sequence

import sympy

from verl_precision.tools.rewards.answer_forms import Form, form_of
from verl_precision.tools.rewards.answer_spelling import spelled
from verl_precision.tools.rewards.answer_text import amount_of, is_unit, same_unit, words_of
from verl_precision.tools.rewards.answer_values import same_value, value_of

LONGEST = 1_000  # characters of what is read
_SETS = ("cup", "cap", "setminus")
_NAME = re.compile(r"\(?(?:[A-Za-z]|\\[A-Za-z]+)(?:_\{[^{}]*\}|'|[A-Z]+)*(?:\([A-Za-z, ]+\))?(?:, ?[a-z])*\)?")
_BASE = re.compile(r"\(?(-?[0-9A-Za-z]+)\)?_\{\(?(\d+)\)?\}")
_PLAIN = re.compile(r"[+-]?(?:[\d., /]|[eE]-?\d|\\frac\{\d+\}\{\d+\})+")
_CHOICE = re.compile(r"\(([A-J])\) *(\S.*)")  # its letter, and its text
_LITERALS = {
    r"\emptyset": sympy.S.EmptySet, r"\mathbb{R}": sympy.S.Reals, r"\mathbb{Z}": sympy.S.Integers,
    r"\mathbb{N}": sympy.S.Naturals, r"\mathbb{Q}": sympy.S.Rationals, r"\mathbb{C}": sympy.S.Complexes,
}  # fmt: skip
_TURNED = {">": "<", r"\ge": r"\le"}
_RELATIONS = {"<": sympy.Lt, ">": sympy.Gt, r"\le": sympy.Le, r"\ge": sympy.Ge, r"\ne": sympy.Ne, "=": sympy.Eq}


def same_by_mathematics(answer: str, truth: str) -> bool:
    """Return whether an answer is the truth. It may take long: ask the process `math_judge`."""
    if max(len(answer), len(truth)) > LONGEST:
        return False
    if _words(spelled(answer)) == _words(spelled(truth)):
        return True
    said, true = form_of(answer), form_of(truth)
    choice = _CHOICE.fullmatch(re.sub(r"\\text\{([^{}]*)\}", r"\1 ", said.text))
    if choice and not _same(said, true):
        return _same(form_of(choice[1] if re.fullmatch("[A-J]", _words(true.text)) else choice[2]), true)
    return _same(said, true)


def same_as_published(answer: str, truth: str) -> bool:
    """Return whether the authors' rule of text accepts: the same words, numbers with units, or short expressions."""
    if re.search(r"\*\*|\\(?:boldsymbol|bm)(?![a-z])", answer):
        return False
    forms = form_of(answer), form_of(truth)
    if _words(forms[0].text) == _words(forms[1].text):
        return True
    plain = [bool(_PLAIN.fullmatch(amount_of(form.text)[0])) for form in forms]
    short = [len({*re.findall("[a-z]", re.sub(r"\\[a-z]+", "", form.text))}) <= 2 for form in forms]
    evaluated = plain == [False, False] and all(short) and not re.search(r"\^\{|\\binom|\\[mp][mp]", answer + truth)
    return {form.kind for form in forms} == {"value"} and (all(plain) or evaluated) and _same(*forms)


def _same(said: Form, true: Form) -> bool:
    if _words(said.text) == _words(true.text):
        return bool(_words(true.text))
    if _is_equation(said) or _is_equation(true):
        return _same_equation(said, true)
    if any(_is_set(form) for form in (said, true)):
        return _same_set(said, true)
    kinds = {said.kind, true.kind}
    if kinds == {"set", "tuple"}:  # {(1, 2)} is what (1, 2) solves
        items, point = (said, true) if said.kind == "set" else (true, said)
        return len(items.parts) == 1 and _same(items.parts[0], point)
    if kinds == {"time"}:
        return _same_time(said, true)
    if kinds <= {"ratio", "value"} and "ratio" in kinds:
        return _same_ratio(said, true)
    if kinds & {"matrix", "row"}:
        return len(kinds) == 1 and _same_in_order(said.parts, true.parts)
    if kinds == {"list", "tuple"}:
        brackets = "(" in said.signs + true.signs and ")" in said.signs + true.signs
        return brackets and not {"or", "and"} & {*said.signs, *true.signs} and _same_in_order(said.parts, true.parts)
    if kinds == {"tuple"}:
        return (said.signs == true.signs or len(said.parts) > 2) and _same_in_order(said.parts, true.parts)
    if kinds & {"list", "set"} and kinds <= {"list", "set", "value"}:
        return _same_items(said, true)
    return kinds == {"value"} and _same_amount(said.text, true.text)


def _words(text: str) -> str:
    """Return a text as words, and the letter of a choice without brackets."""
    words = words_of(text)
    choice = re.fullmatch(r"\(?([A-Ja-df-hj])[.)]?", words)
    return choice[1].upper() if choice else words


def _same_amount(said: str, true: str) -> bool:
    """Compare two numbers in a base, or two values with their units."""
    bases = [_BASE.fullmatch(re.sub(r"\\text\{([^{}]*)\}", r"\1", text)) for text in (said, true)]
    if any(bases):
        digits, others = (
            [base[1], base[2]] if base else [text, ""] for base, text in zip(bases, (said, true), strict=True)
        )
        return digits[0].upper() == others[0].upper() and (not all(bases) or digits[1] == others[1])
    (one, unit), (other, unit_of_other) = _amount(said), _amount(true)
    return one is not None and other is not None and same_unit(unit, unit_of_other) and same_value(one, other)


def _amount(text: str) -> tuple[sympy.Expr | None, frozenset[str]]:
    of_angle = re.search(r"\\(?:arc)?(?:sin|cos|tan|cot|sec|csc)", text)
    amount, unit, count = (text, frozenset[str](), 1) if of_angle else amount_of(text)
    value = value_of(amount)
    if value is None or (value.free_symbols and not is_unit(unit)):
        return None, unit
    return value * count, unit


def _values(form: Form) -> list[sympy.Expr]:
    """Return the values of all parts of a form; none if one cannot be read."""
    values = [value for part in form.parts if (value := value_of(part.text)) is not None]
    return values if len(values) == len(form.parts) else []


def _same_in_order(said: Sequence[Form], true: Sequence[Form]) -> bool:
    return len(said) == len(true) and all(map(_same, said, true))


def _same_items(said: Form, true: Form) -> bool:
    """Compare lists or sets. With dots, or of words with commas alone, they have an order; a set repeats nothing."""
    items, others = ([form] if form.kind == "value" else [*form.parts] for form in (said, true))
    if any(r"\ldots" in item.text for item in items + others) or (
        all(re.fullmatch("[A-Za-z ]{2,}", item.text) for item in items + others)
        and {"and", "or"}.isdisjoint(said.signs + true.signs)
    ):
        return _same_in_order(items, others)
    if "set" in (said.kind, true.kind):
        items, others = _distinct(items), _distinct(others)
    for item in items:
        found = next((place for place, other in enumerate(others) if _same(item, other)), None)
        if found is None:
            return False
        del others[found]
    return not others


def _distinct(items: list[Form]) -> list[Form]:
    kept: list[Form] = []
    for item in items:
        kept += [] if any(_same(item, other) for other in kept) else [item]
    return kept


def _same_time(said: Form, true: Form) -> bool:
    """Compare two times of day: 8:34 p.m. is 20:34, and 8:34 where one does not say which half of the day it is."""
    (hour, *rest), (other, *others) = ([int(part.text) for part in form.parts] for form in (said, true))
    halves = [*said.signs, *true.signs]
    hours = [h % 12 + 12 * (half == "p") if half else h for h, half in zip((hour, other), halves, strict=True)]
    return rest == others and (hours[0] == hours[1] or (halves.count("") == 1 and hour == other))


def _same_ratio(said: Form, true: Form) -> bool:
    """Compare two ratios by cross-multiplication, or a ratio of two with a quotient."""
    if "value" in (said.kind, true.kind):
        ratio, value = (said, true) if said.kind == "ratio" else (true, said)
        quotient = r"\frac{" + "}{".join(part.text for part in ratio.parts) + "}"
        return len(ratio.parts) == 2 and _same_amount(quotient, value.text)
    sides = [_values(form) for form in (said, true)]
    if len(sides[0]) != len(sides[1]) or not all(sides):
        return False
    return all(same_value(one * sides[1][0], other * sides[0][0]) for one, other in zip(*sides, strict=True))


def _is_equation(form: Form) -> bool:
    return form.kind == "relation" and {*form.signs} <= {"=", r"\approx"}


def _named(form: Form) -> tuple[str, Form]:
    """Return the name before (or after) an equals sign, and the value; a form without a name is its own value."""
    if not _is_equation(form):
        return "", form
    first, last = form.parts[0], form.parts[-1]
    if form.signs[-1] == r"\approx" and (len(form.parts) > 2 or not _NAME.fullmatch(first.text)):
        last = form.parts[-2]
    if not _NAME.fullmatch(first.text) and _NAME.fullmatch(last.text):
        first, last = last, first
    return (first.text.replace(" ", "") if _NAME.fullmatch(first.text) else ""), last


def _same_equation(said: Form, true: Form) -> bool:
    """Compare equations, or a value with one that has a name: x = 5 and 5; of two names, both must be the same."""
    (name, value), (name_of_true, true_value) = _named(said), _named(true)
    if not _is_equation(true):
        sides = [part for part in said.parts if (side := value_of(part.text)) is not None and not side.free_symbols]
        return _same(value, true) and all(
            _same(side, value) for side in sides if "=" in said.signs[:1] and len(set(said.signs)) == 1
        )
    if not _is_equation(said):
        return bool(name_of_true) and _same(said, true_value)
    if name and name == name_of_true:
        return _same(value, true_value)
    return _same_zeros(said, true)


def _same_zeros(said: Form, true: Form) -> bool:
    """Return whether two relations of two sides are one up to a factor, which is positive in inequalities."""
    sides = [_values(form) for form in (said, true)]
    if [len(side) for side in sides] != [2, 2] or len(
        {_TURNED.get(form.signs[0], form.signs[0]) for form in (said, true)}
    ) > 1:
        return False
    one, other = (
        (a - b) * (-1 if form.signs[0] in _TURNED else 1) for form, (a, b) in zip((said, true), sides, strict=True)
    )
    factor = sympy.cancel(one / other) if other != 0 else sympy.nan
    return bool(factor.is_number and factor != 0) and (_is_equation(true) or bool(factor.is_positive))


def _is_set(form: Form) -> bool:
    """Return whether a form is a set of another kind than a list of values."""
    inequality = form.kind == "relation" and not _is_equation(form)
    return (
        inequality
        or form.kind in _SETS
        or form.text in _LITERALS
        or (form.kind == "list" and any(map(_is_set, form.parts)))
    )


def _same_set(said: Form, true: Form) -> bool:
    known: list[sympy.Expr] = []

    def point(text: str) -> sympy.Expr:
        """Return a value as the same object wherever it is the same: SymPy does not see it of all."""
        value = value_of(text)
        if value is None or value.free_symbols:
            raise ValueError("no number")
        known.append(value)
        return next(other for other in known if same_value(value, other))

    if said.kind == true.kind == "relation" and _same_zeros(said, true):
        return True
    try:
        names = [{str(name) for name in _names(form)} for form in (said, true)]
        one, other = _set_of(said, point), _set_of(true, point)
    except Exception:  # of any kind: SymPy has no set for it
        return False
    if all(names) and names[0] != names[1]:
        return False
    return bool(one == other) or one.symmetric_difference(other).is_empty is True


def _names(form: Form) -> set[sympy.Basic]:
    if form.kind != "relation":
        return {name for part in form.parts for name in _names(part)} if form.kind in (*_SETS, "list") else set()
    return {name for part in form.parts if (value := value_of(part.text)) is not None for name in value.free_symbols}


def _set_of(form: Form, point: Callable[[str], sympy.Expr]) -> sympy.Set:
    """Return a form as a set of SymPy; an error of some kind if it is none."""
    if form.text in _LITERALS:
        return _LITERALS[form.text]
    if form.kind == "tuple" and len(form.parts) == 2:
        left, right = (point(part.text) for part in form.parts)
        return sympy.Interval(left, right, form.signs[0] == "(", form.signs[1] == ")")
    if form.kind == "set":
        return sympy.FiniteSet(*(point(part.text) for part in form.parts))
    if form.kind == "relation":
        sides = _values(form)
        if not sides or len(_names(form)) != 1:
            raise ValueError("no set of numbers")
        pairs = zip(form.signs, sides, sides[1:], strict=False)
        sets = [_RELATIONS[sign](one, other).as_set() for sign, one, other in pairs]
        return sympy.Intersection(*sets)
    sets = [_set_of(part, point) for part in form.parts]
    if form.kind == "setminus":
        return sympy.Complement(sets[0], sympy.Union(*sets[1:]))
    of_inequalities = all(part.kind == "relation" for part in form.parts) and "or" not in form.signs
    both = sympy.Intersection(*sets)
    if form.kind == "cap" or (
        form.kind == "list" and of_inequalities and ("and" in form.signs or both is not sympy.S.EmptySet)
    ):
        return both
    if form.kind in ("cup", "list"):
        return sympy.Union(*sets)
    raise ValueError("no set")
