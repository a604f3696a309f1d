"""What the recipes' scripts that read runs have in common: their arguments."""

import argparse
from pathlib import Path


def parser_for_runs(description: str | None, folders: str) -> argparse.ArgumentParser:
    """Return a parser for folders of runs (`folders` says what is in them) and the file of a figure."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help=folders)
    parser.add_argument("--figure", type=Path, help="where the figure goes; without it only tables are printed")
    return parser


def folders_of(arguments: argparse.Namespace) -> list[Path]:
    """Return the folders, without files, which a shell's pattern for folders of runs can match too."""
    return [folder for folder in arguments.folders if folder.is_dir()]
