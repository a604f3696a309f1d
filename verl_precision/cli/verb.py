"""The base of every verb: the command, its two consoles, quiet libraries, the one handler of errors and Ctrl-C."""

import errno
import inspect
import logging
import os
import pkgutil
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from typing import Annotated, Any

from rich.console import Console
from typer import Context, Exit, Option, Typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from verl_precision import __version__
from verl_precision.base.errors import VerlPrecisionError, after_ctrl_c, sentence
from verl_precision.base.signals import ended_by_signals
from verl_precision.base.terminal import paragraph

GROUP = "verl_precision.verbs"  # of entry points
SECTIONS = ("Before a run", "A run", "Models and data", "Set-up")  # of --help, in this order
_HELP = {"help_option_names": ["-h", "--help"]}
# How --help names a value: by the option's name, or by its type, or otherwise the option's name in capitals.
_VALUES = {"overrides": "KEY=VALUE", "config": "RECIPE", "cluster": "ADDRESS", "only": "CHECK", "model": "MODEL"}
_VALUES |= {"rollout_model": "MODEL", "output": "FOLDER", "folder": "FOLDER", "tree": "TREE", "device": "cuda|cpu"}
_VALUES |= {"checkpoint": "CHECKPOINT", "prompts": "FILE", "data": "FILE", "source": "FILE", "prompt_field": "COLUMN"}
_VALUES |= {"precision": "PRESET", "estimator": "PRESET", "dtype": "fp16|bf16|fp32", "reward": "FILE.py:FUNCTION"}
_TYPES = {"int": "N", "float": "NUMBER", "Path": "PATH"}


class _Verbs(TyperGroup):
    """The installed verbs, each imported when it is used.

    Their option --help has the default False: without a default Typer imports pydantic, which takes 0.1 s.
    """

    commands: dict[str, metadata.EntryPoint]  # type: ignore[assignment]

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.commands = {}
        with suppress(metadata.PackageNotFoundError):
            points = metadata.distribution("verl-precision").entry_points
            self.commands = {point.name: point for point in points.select(group=GROUP)}

    def get_command(self, context: Any, name: str) -> TyperCommand | None:
        return self.commands[name].load().command(name) if name in self.commands else None

    def format_commands(self, context: Any, formatter: Any) -> None:
        """Write each verb's first line only, because its options may take long to import."""
        verbs = {name: point.load() for name, point in self.commands.items()}
        for section in dict.fromkeys((*SECTIONS, *(each.section for each in verbs.values()))):
            if lines := [(name, each.paragraphs[0]) for name, each in verbs.items() if each.section == section]:
                with formatter.section(section):
                    formatter.write_dl(lines)

    def get_help_option(self, *args: Any) -> Any:
        if (option := super().get_help_option(*args)) is not None:
            option.default = False
        return option

    def main(self, *args: Any, **settings: Any) -> Any:
        """Run the typed command; an error of a disk or stream ends it with a message."""
        if not self.commands:
            say("error: this copy is not installed, or is of another version. In a clone: pip install .", errors, "red")
            sys.exit(1)
        try:
            try:
                return super().main(*args, **settings)
            finally:
                sys.stdout.flush()
        except OSError as error:
            if error.errno != errno.EPIPE:  # EPIPE: the reader has ended
                with suppress(OSError):  # the terminal may be closed
                    say(f"error: {_words_of(error)}", errors, "red")
            for stream in (sys.stdout, sys.stderr):
                try:
                    stream.flush()
                except OSError:  # the flush at the end of the process would fail too
                    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            sys.exit(1)


_REMEDIES = dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "Free some space there, or name another place.")
_REMEDIES |= dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "Name a place where you have write access.")


def _words_of(error: OSError) -> str:
    """Return the system's error with its file and a remedy; some libraries' errors have only a text."""
    if error.errno is None:
        return str(error) or type(error).__name__
    words = f"{error.filename or 'the output'}: {sentence(error.strerror or '')}"
    return f"{words} {_REMEDIES.get(error.errno, '')}".rstrip()


# rich's help cuts names of options at 80 columns.
_LOOK: dict[str, Any] = {"pretty_exceptions_enable": False, "rich_markup_mode": None, "add_completion": False}
app = Typer(name="verl-precision", cls=_Verbs, no_args_is_help=True, context_settings=_HELP, **_LOOK)
console = Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 120, emoji=False, markup=False)
errors = Console(stderr=True, emoji=False, markup=False)  # `:1234:` is no emoji, and `a[b]` no style
FIGURES, ENGINES = ("jinja2", "matplotlib"), ("torch", "transformers", "vllm")  # packages that verbs need
_PROGRESS_BARS = "HF_HUB_DISABLE_PROGRESS_BARS"  # huggingface_hub and transformers read it when they are imported


def say(text: str, to: Console = console, style: str | None = None) -> None:
    """Print a text without markup; on a terminal it is wrapped between words."""
    to.print(paragraph(text, to), style=style, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def silence_third_party() -> Iterator[None]:
    """Hide every logger's INFO and WARNING, Python's warnings, and progress bars inside; errors are still shown."""
    disabled, bars = logging.root.manager.disable, os.environ.get(_PROGRESS_BARS)
    logging.disable(logging.WARNING)
    os.environ.setdefault(_PROGRESS_BARS, "1")
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(disabled)
        if bars is None:
            os.environ.pop(_PROGRESS_BARS, None)


@dataclass(frozen=True)
class Verb:
    """A verb of the command line; its name is that of its entry point."""

    function: Callable[..., None]  # its docstring is the help, its parameters are the options
    job: str
    section: str
    needs: Sequence[str]
    context_settings: dict[str, Any]

    @property
    def paragraphs(self) -> list[str]:
        """The docstring for --help: Typer would keep the line breaks inside a paragraph."""
        return [" ".join(each.split()) for each in inspect.cleandoc(self.function.__doc__ or "").split("\n\n")]

    def command(self, name: str) -> TyperCommand:
        """Return Typer's command for the verb. It exits with 1 after our errors, with 128 + number after a signal."""
        taken, of_job, fields = inspect.signature(self.function).parameters, None, list[inspect.Parameter]()
        own = [each for each in taken.values() if each.name not in ("given", "job")]
        if self.job:
            from verl_precision.base.options import parameters_of

            fields = parameters_of(of_job := pkgutil.resolve_name(self.job))

        def run(context: Context, **values: Any) -> None:
            from verl_precision.base.versions import require_packages

            if self.job:
                typed = {each for each in values if str(context.get_parameter_source(each)).endswith("COMMANDLINE")}
                given = {each.name: values.pop(each.name) for each in fields}
                values["given"] = {field: value for field, value in given.items() if field in typed}
            with ended_by_signals(process_ends=True) as heard:
                try:
                    require_packages(name, *self.needs)
                    if "job" in taken and of_job is not None:
                        values["job"] = of_job(**values.pop("given"))
                    self.function(**values)
                except VerlPrecisionError as error:
                    say(f"error: {error}", errors, "red")
                    raise Exit(1) from None
                except KeyboardInterrupt as interrupt:
                    with suppress(OSError):  # the terminal may be closed
                        say(f"interrupted; {interrupt}" if str(interrupt) else "interrupted", errors)
                    raise Exit(128 + (heard or [signal.SIGINT])[0]) from None

        context = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=Context)
        options = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in (*own, *fields)]
        for each in options:
            kind, shown = str(each.annotation.__origin__), each.annotation.__metadata__[0]
            word = next((word for part, word in _TYPES.items() if part in kind), each.name.upper())
            shown.metavar = shown.metavar or (None if "bool" in kind else _VALUES.get(each.name, word))
        run.__signature__ = inspect.Signature([context, *options])  # type: ignore[attr-defined]
        run.__annotations__ = {}  # Typer reads the signature
        alone = Typer(**_LOOK)
        alone.command(name, help="\n\n".join(self.paragraphs), context_settings=_HELP | self.context_settings)(run)
        return get_command(alone)  # type: ignore[return-value]


def verb(section: str, job: str = "", needs: Sequence[str] = (), **context: Any) -> Callable[[Callable], Verb]:
    """Make a function a verb; its entry point in setup.py, group verl_precision.verbs, gives it a name.

    `section` is the part of --help that lists the verb. `job` (`module:name`) is a class whose fields are options, too;
    the function gets an object of it as `job`, or the options that the user has set as `given`.
    `needs` are packages that the verb imports and that may be missing: a message names them before any work.
    `context` has settings of Click's context, such as `ignore_unknown_options=True`.
    """
    return lambda function: Verb(function, job, section, needs, context)


def run_job(job: Any, session: Callable[[Any, Console], object]) -> None:
    """Run a job; a repeated command continues it in the same folder."""
    with after_ctrl_c(f"every process has ended. Finished work is in {job.folder}; the same command continues it"):
        session(job, console)


def _print_version(wanted: bool) -> None:
    if wanted:
        console.print(__version__)
        raise Exit


_Version = Annotated[bool, Option("--version", callback=_print_version, is_eager=True, help="Print the version.")]


@app.callback()
def main(version: _Version = False) -> None:
    """Close the floating-point gap between training and rollout in verl."""
