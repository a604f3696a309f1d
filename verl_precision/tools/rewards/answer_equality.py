r"""Compares two answers by mathematics: their forms part by part, and their values exactly.

A tuple has an order, a set has none, a list without brackets may be either, and an inequality is a set of numbers. One
answer may omit a name before an equals sign, a unit, a percent sign or a number's base; two different ones are unequal.
"""

import re
from collections.abc import Sequence

import sympy

from verl_precision.tools.rewards.answer_forms import NAME, Form, form_of, spelled
from verl_precision.tools.rewards.answer_text import KNOWN_UNITS, amount_of, same_unit, words_of
from verl_precision.tools.rewards.answer_values import same_value, value_of

LONGEST = 1_000  # characters of an answer that is compared
_BASE = re.compile(r"\(?(-?[0-9A-Za-z]+)\)?_\{\(?(\d+)\)?\}")
_PLAIN = re.compile(r"[+-]?(?:[\d., /]|[eE]-?\d|\\frac\{\d+\}\{\d+\})+")
_LITERALS = {
    r"\emptyset": sympy.S.EmptySet, r"\mathbb{R}": sympy.S.Reals, r"\mathbb{Z}": sympy.S.Integers,
    r"\mathbb{N}": sympy.S.Naturals, r"\mathbb{Q}": sympy.S.Rationals, r"\mathbb{C}": sympy.S.Complexes,
}  # fmt: skip
_TURNED = {">": "<", r"\ge": r"\le", "<": ">", r"\le": r"\ge"}
_RELATIONS = {"<": sympy.Lt, ">": sympy.Gt, r"\le": sympy.Le, r"\ge": sympy.Ge, r"\ne": sympy.Ne}


def same_by_mathematics(answer: str, truth: str) -> bool:
    """Return whether an answer equals the ground truth. This may take long; `math_answers` runs it in a process."""
    if max(len(answer), len(truth)) > LONGEST:
        return False
    if _words(spelled(answer)) == _words(spelled(truth)):
        return True
    choice = re.fullmatch(r"\\text\{\(([A-J])\)\} *(\S.*)", spelled(answer))  # a choice's letter and its text
    return any(_same(form_of(said), form_of(truth)) for said in (answer, *(choice.groups() if choice else ())))


def same_as_published(answer: str, truth: str) -> bool:
    """Return whether the authors' text rule accepts: the same words, numbers with units, or short expressions."""
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
    said, true = (form.parts[0] if form.kind == "set" and len(form.parts) == 1 else form for form in (said, true))
    kinds = {said.kind, true.kind}
    if "equation" in kinds:
        return _same_equation(said, true)
    if _is_set(said) or _is_set(true):
        return _same_set(said, true)
    if kinds & {"matrix", "row"}:
        return len(kinds) == 1 and _same_in_order(said.parts, true.parts)
    if kinds == {"list", "tuple"}:
        return {"(", ")", ","} >= {*said.signs, *true.signs} and _same_in_order(said.parts, true.parts)
    if kinds == {"tuple"}:
        return (said.signs == true.signs or len(said.parts) > 2) and _same_in_order(said.parts, true.parts)
    if kinds == {"value"}:
        return _same_amount(said.text, true.text)
    return kinds <= {"list", "set", "value"} and _same_items(said, true)


def _words(text: str) -> str:
    """Return a text as words; the letter of a choice loses its brackets."""
    words = words_of(text)
    choice = re.fullmatch(r"\(?([A-Ja-df-hj])[.)]?", words)
    return choice[1].upper() if choice else words


def _same_amount(said: str, true: str) -> bool:
    """Compare two numbers in a base, two times of day, or two values with their units."""
    bases = [_BASE.fullmatch(re.sub(r"\\text\{([^{}]*)\}", r"\1", text)) for text in (said, true)]
    if any(bases):
        pairs = zip(bases, (said, true), strict=True)
        digits, others = (base.groups() if base else (text, None) for base, text in pairs)
        return digits[0].upper() == others[0].upper() and (not all(bases) or digits[1] == others[1])
    (one, unit), (other, unit_of_other) = _amount(said), _amount(true)
    if not same_unit(unit, unit_of_other) or one is None or other is None:
        return False
    return one == other if isinstance(one, str) or isinstance(other, str) else same_value(one, other)


def _amount(text: str) -> tuple[sympy.Expr | str | None, frozenset[str]]:
    """Return a value (a time of day as text) and its unit; the value is None if it cannot be read."""
    of_angle = re.search(r"\\(?:arc)?(?:sin|cos|tan|cot|sec|csc)", text)
    amount, unit, count = (text, frozenset[str](), 1) if of_angle else amount_of(text)
    if re.fullmatch(r"\d\d?(:\d\d)+", amount):
        return amount, unit
    value = value_of(re.sub("^([^:]+):([^:]+)$", r"\\frac{\1}{\2}", amount))  # a ratio a:b is the quotient a/b
    if value is None or (value.free_symbols and not unit <= KNOWN_UNITS):
        return None, unit
    return value * count, unit


def _values(form: Form) -> list[sympy.Expr]:
    """Return the values of all parts of a form; an empty list if a part cannot be read."""
    values = [value for part in form.parts if (value := value_of(part.text)) is not None]
    return values if len(values) == len(form.parts) else []


def _same_in_order(said: Sequence[Form], true: Sequence[Form]) -> bool:
    return len(said) == len(true) and all(map(_same, said, true))


def _same_items(said: Form, true: Form) -> bool:
    """Compare lists or sets. A list with dots, or of words with only commas, has an order; a set has no repeats."""
    items, others = ([form] if form.kind == "value" else [*form.parts] for form in (said, true))
    if any(r"\ldots" in item.text for item in items + others) or (
        all(re.fullmatch("[A-Za-z ]{2,}", item.text) for item in items + others)
        and {"and", "or"}.isdisjoint(said.signs + true.signs)
    ):
        return _same_in_order(items, others)
    if "set" in (said.kind, true.kind):
        items, others = (
            [item for place, item in enumerate(each) if not any(_same(item, before) for before in each[:place])]
            for each in (items, others)
        )
    for item in items:
        found = next((place for place, other in enumerate(others) if _same(item, other)), None)
        if found is None:
            return False
        del others[found]
    return not others


def _named(form: Form) -> tuple[str, Form]:
    """Return the name before (or after) an equals sign, and the value; a form without a name is its own value."""
    if form.kind != "equation":
        return "", form
    first, last = form.parts[0], form.parts[-1]
    if not NAME.fullmatch(first.text) and NAME.fullmatch(last.text):
        first, last = last, first
    return (first.text.replace(" ", "") if NAME.fullmatch(first.text) else ""), last


def _same_equation(said: Form, true: Form) -> bool:
    """Compare equations, or a value with a named value, as 5 with x = 5; two names must be the same."""
    (name, value), (name_of_true, true_value) = _named(said), _named(true)
    if true.kind != "equation":  # each side of 2 + 3 = 5 must be 5
        sides = [part for part in said.parts if (side := value_of(part.text)) is not None and not side.free_symbols]
        return _same(value, true) and all(_same(side, value) for side in sides)
    if said.kind != "equation":
        return bool(name_of_true) and _same(said, true_value)
    return _same(value, true_value) if name and name == name_of_true else _same_zeros(said, true)


def _same_zeros(said: Form, true: Form) -> bool:
    """Return whether two equations or relations differ only by a factor; a negative factor turns an inequality."""
    sides = [_values(form) for form in (said, true)]
    if [len(values) for values in sides] != [2, 2]:
        return False
    one, other = (left - right for left, right in sides)
    factor = sympy.cancel(one / other) if other != 0 else sympy.nan
    sign = _TURNED.get(said.signs[0], said.signs[0]) if factor.is_negative else said.signs[0]
    return bool(factor.is_number and factor != 0) and (said.kind == "equation" or sign == true.signs[0])


def _is_set(form: Form) -> bool:
    known = form.kind in ("relation", "cup", "cap", "setminus") or form.text in _LITERALS
    return known or (form.kind == "list" and any(map(_is_set, form.parts)))


def _same_set(said: Form, true: Form) -> bool:
    if said.kind == true.kind == "relation" and _same_zeros(said, true):
        return True
    known: list[sympy.Expr] = []
    try:
        (one, name), (other, other_name) = (_set_of(form, known) for form in (said, true))
    except Exception:  # any error: SymPy has no set for it
        return False
    if len(name | other_name) > 1:
        return False
    return bool(one == other) or one.symmetric_difference(other).is_empty is True


def _set_of(form: Form, known: list[sympy.Expr]) -> tuple[sympy.Set, set[str]]:
    """Return a form as a SymPy set, and its variable if it has one; raise some error if the form is no set.

    Equal values become one object (`known`), because SymPy does not recognise all equal values.
    """

    def point(part: Form) -> sympy.Expr:
        value = value_of(part.text)
        if value is None or value.free_symbols:
            raise ValueError("no number")
        known.append(value)
        return next(other for other in known if same_value(value, other))

    if form.text in _LITERALS:
        return _LITERALS[form.text], set()
    if form.kind == "tuple" and len(form.parts) == 2:
        return sympy.Interval(*map(point, form.parts), form.signs[0] == "(", form.signs[1] == ")"), set()
    if form.kind == "set":
        return sympy.FiniteSet(*map(point, form.parts)), set()
    if form.kind == "relation":
        sides = _values(form)
        (name,) = set[sympy.Basic]().union(*(side.free_symbols for side in sides))
        relations = [_RELATIONS[sign](*pair) for sign, *pair in zip(form.signs, sides, sides[1:], strict=False)]
        return sympy.Intersection(*(relation.as_set() for relation in relations)), {str(name)}
    if form.kind not in ("setminus", "cup", "cap", "list"):
        raise ValueError("no set")
    read = [_set_of(part, known) for part in form.parts]
    sets, names = [each for each, _ in read], set[str]().union(*(name for _, name in read))
    if form.kind == "setminus":
        return sympy.Complement(sets[0], sympy.Union(*sets[1:])), names
    both = sympy.Intersection(*sets)
    inequalities = form.kind == "list" and all(part.kind == "relation" for part in form.parts)
    together = inequalities and ("and" in form.signs or ("or" not in form.signs and both is not sympy.S.EmptySet))
    return both if form.kind == "cap" or together else sympy.Union(*sets), names
