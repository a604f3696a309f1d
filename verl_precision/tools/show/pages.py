"""HTML pages: one file each, which loads nothing and works without a network."""

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from verl_precision import __version__
from verl_precision.tools.show.tables import number_text


def render(template: str, verb: str, **content: Any) -> str:
    """Return a page.

    Args:
        template: Its template, which extends `show/base.html`, as a path below `tools`.
        verb: The verb of the command line that writes it.
        **content: What the template shows.
    """
    environment = Environment(
        loader=PackageLoader("verl_precision.tools", ""), autoescape=True, undefined=StrictUndefined
    )
    environment.filters["number"] = number_text
    page = environment.get_template(template)
    return page.render(mark=Markup(mark_of(verb)), version=__version__, **content)


def mark_of(verb: str) -> str:
    """Return the line by which an earlier page of a verb is known."""
    return f'<meta name="generator" content="verl-precision {verb}">'
