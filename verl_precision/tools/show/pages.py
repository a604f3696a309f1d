"""HTML pages: one file each, which loads nothing and works without a network."""

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from verl_precision import __version__


def render(template: str, verb: str, **content: Any) -> str:
    """Return the page that a verb writes, from its template (a path below `tools`), which extends `show/base.html`."""
    loader = PackageLoader("verl_precision.tools", "")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    return environment.get_template(template).render(mark=Markup(mark_of(verb)), version=__version__, **content)


def mark_of(verb: str) -> str:
    """Return the line by which an earlier page of a verb is known."""
    return f'<meta name="generator" content="verl-precision {verb}">'
