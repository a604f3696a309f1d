r"""Reads the exact value of LaTeX mathematics, and compares two values.

latex2sympy reads the expressions. Numbers are passed to it as symbols, because it reads 3(4) as 3 + 4, decimals as
floats and 5/3\pi as 5/(3\pi). Texts with parts that latex2sympy would drop are not passed to it.
"""

import re
from fractions import Fraction
from functools import lru_cache

import sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy

from verl_precision.tools.rewards.answer_text import plain_number

LARGEST = 200_000  # bits of a number: a power tower has more, and would fill the memory
_CONFIG = ConversionConfig(interpret_as_mixed_fractions=False, lowercase_symbols=False)
# latex2sympy drops or misreads words, dots, primes, number bases, remainders, 4.5.6 and two numbers side by side.
_UNREADABLE = re.compile(
    r"\\text|\\ldots|['\"%&:$#@]|\\[pb]mod|\\(?:gcd|lcm|det)|\\\\|\d_|\.\d*\.|\d \d(?!\d*/)|_ *$|^ *$|^[A-Za-z]{4,}$"
)
_TRIGONOMETRIC = r"\\(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?"
_DECIMAL = r"\d+(?:\.\d*)?|\.\d+"
_NUMBER = re.compile(
    rf"(?P<kept>(?<!\\log)_\{{[^{{}}]*\}}|{_TRIGONOMETRIC}\^\{{-1\}})"
    r"|(?P<start>\d*)\.(?P<once>\d*)\\overline\{(?P<again>\d+)\}"
    r"|(?<![\d^_.}/)])(?P<whole>\d+) ?"
    r"(?:\\frac\{(?P<above>\d+)\}\{(?P<below>\d+)\}|(?<= )(?P<over>\d+)/(?P<under>\d+))(?![\d.^])"
    rf"|/ ?(?P<divisor>{_DECIMAL})(?![\d.]| ?[\^!])|(?P<plain>{_DECIMAL})"
)


@lru_cache(1000)
def value_of(text: str) -> sympy.Expr | None:
    """Return the value of an expression in one spelling; None if a part cannot be read or it has no value."""
    if (number := plain_number(text)) is not None:
        return sympy.Rational(number)
    if re.search(_TRIGONOMETRIC, text):
        text = re.sub(rf"({_DECIMAL}) *\\text\{{degree\}}", r"{\\frac{\1\\pi}{180}}", text)
    numbers: dict[sympy.Symbol, sympy.Rational] = {}

    def symbol(found: re.Match[str]) -> str:
        if found["kept"]:
            return found[0]
        name = f"q{len(numbers)}"
        numbers[sympy.Symbol(f"math{{{name}}}", real=True)] = sympy.Rational(_number(found))
        return (r"\cdot " if found["divisor"] else "") + rf"\mathit{{{name}}} "

    if _UNREADABLE.search(text):
        return None
    try:
        text = re.sub(r"(\\mathit\{q\d+\} |(?<![\\A-Za-z/])[A-Za-z]+) ?\(", r"\1\\cdot (", _NUMBER.sub(symbol, text))
        tree = latex2sympy(text, is_real=True, normalization_config=None, conversion_config=_CONFIG)
        if not isinstance(tree, sympy.Expr) or tree.has(sympy.Derivative) or _bits(tree, numbers) > LARGEST:
            return None
        if not tree.has(sympy.Sum, sympy.Product):
            numbers[sympy.Symbol("i", real=True)] = sympy.I
        value = tree.xreplace(numbers).doit()
    except Exception:  # any error: of the grammar, of SymPy's conversions, of a division by zero
        return None
    value = value.replace(lambda e: e.is_Pow and e.base.is_negative and e.exp.is_Rational and e.exp.q % 2, _real_root)
    return None if value.has(sympy.nan, sympy.zoo) else value


def _number(found: re.Match[str]) -> Fraction:
    """Return the value of a match: a repeating decimal, a mixed number, one over a divisor, or a number."""
    if found["again"]:
        start, again = (found["start"] or "0") + found["once"], found["again"]
        return Fraction(int(start + again) - int(start), 10 ** len(found["once"]) * (10 ** len(again) - 1))
    if found["whole"]:
        part = Fraction(int(found["above"] or found["over"]), int(found["below"] or found["under"]))
        if found["over"] and part >= 1:
            raise ValueError("3 3/2 is a product, or a slip")
        return int(found["whole"]) + part if part < 1 else int(found["whole"]) * part
    return 1 / Fraction(found["divisor"]) if found["divisor"] else Fraction(found["plain"])


def _real_root(power: sympy.Pow) -> sympy.Expr:
    return sympy.Integer(-1) ** power.exp.p * (-power.base) ** power.exp


def _bits(tree: sympy.Basic, numbers: dict[sympy.Symbol, sympy.Rational]) -> int:
    """Return an upper bound on the bits of every number that the evaluation of a tree makes."""
    if tree in numbers:
        return max(int(numbers[tree].p).bit_length(), int(numbers[tree].q).bit_length())
    bits = [_bits(part, numbers) for part in tree.args] or [2]
    if isinstance(tree, sympy.Pow | sympy.exp | sympy.factorial | sympy.binomial | sympy.gamma):
        return min(bits[0], LARGEST) << min(bits[-1], 20)
    return sum(bits)


def same_value(one: sympy.Expr, other: sympy.Expr) -> bool:
    """Return whether two expressions have the same value for all values of their variables."""
    if one == other:
        return True
    if one.is_infinite or other.is_infinite:
        return False
    difference = one - other
    at = {name: sympy.Rational(3 * place + 5, 7) for place, name in enumerate(sorted(difference.free_symbols, key=str))}
    rest = difference.xreplace(at).evalf()
    if any(part.is_comparable and part != 0 for part in rest.as_real_imag()):  # at one point: faster than `equals`
        return False
    sympy.core.random.seed(0)  # `equals` tests random points; the seed makes its verdict repeatable
    return difference.equals(0) is True
