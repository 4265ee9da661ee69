"""What every command prints with: text on stdout, progress and errors on stderr."""

from __future__ import annotations

import logging
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

# Tables keep their shape in pipes and files, where no terminal says how wide it is.
PIPE_WIDTH = 120


def stdout() -> Console:
    """A console on the current stdout; text is printed as it is, without markup."""
    width = None if sys.stdout.isatty() else PIPE_WIDTH
    return Console(width=width, highlight=False, markup=False, emoji=False)


def progress(message: str) -> None:
    """One line of progress."""
    print(message, file=sys.stderr, flush=True)


def heading(console: Console, text: str) -> None:
    """The title of a section, after an empty line."""
    console.print()
    console.print(text, style="bold")


def table(*columns: str, left: int = 1) -> Table:
    """A plain table; the first `left` columns are names, the others numbers."""
    made = Table(box=None, pad_edge=False, show_header=any(columns))
    for i, column in enumerate(columns):
        made.add_column(column, justify="left" if i < left else "right", header_style="dim")
    return made


def size(count: float) -> str:
    """Bytes for people: 1024-based, three significant digits."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} GiB"


def number(value: Any, form: str = ".2f") -> str:
    """A figure, or a dash where there is none."""
    return "–" if value is None else format(value, form)


class _Plain(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        progress(f"{record.levelname.lower()}: {record.getMessage()}")


def show_warnings() -> None:
    """Warnings of the package go to stderr as plain lines."""
    logger = logging.getLogger("draftgraph")
    if not any(isinstance(handler, _Plain) for handler in logger.handlers):
        logger.addHandler(_Plain())
        logger.propagate = False
