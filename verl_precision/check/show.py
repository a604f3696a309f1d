"""What a terminal shows of a check."""

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from verl_precision.check.fault import Fault
from verl_precision.check.recipe import RecipeReport


def show_recipe(report: RecipeReport, console: Console) -> None:
    """Print the table of dtypes, then every fault with its remedy, then the verdict."""
    table = Table("what", "dtype", "decided by", box=None, header_style="bold")
    for row in report.rows:
        table.add_row(row.what, row.dtype, row.source)
    console.print(table)
    show_faults(report.faults, console)
    errors = sum(fault.severity == "error" for fault in report.faults)
    console.print(f"{errors} error(s), {len(report.faults) - errors} warning(s)", highlight=False)


def show_faults(faults: Iterable[Fault], console: Console) -> None:
    """Print each fault: name, setting and value, what happens, what to do."""
    for fault in faults:
        word, colour = ("ERROR ", "red") if fault.severity == "error" else ("warn  ", "yellow")
        value = "" if fault.value is None and not fault.allowed else f"={fault.value}"
        console.print(Text(word, colour), Text(f"{fault.name}: {fault.setting}{value}", "bold"), sep="", soft_wrap=True)
        for line in (fault.problem, fault.advice):
            if line:
                console.print(Text(f"      {line}"), soft_wrap=True)
