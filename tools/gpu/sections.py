"""Running sections one after the other within a time budget, each on its own."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from ...runtime.jsonfile import read_json, write_json
from .pairs import Skipped
from .smoke import ending

SCHEMA_VERSION = 1
Report = Callable[[str], None]


@dataclass(frozen=True)
class Section:
    """estimate: seconds it may take. run: its result, with "passed"; may raise anything."""

    name: str
    estimate: float
    run: Callable[[], dict[str, Any]]


def run_here(section: Section) -> dict[str, Any]:
    """Status, reason, seconds, result and traceback of a section; nothing is raised."""
    start = time.perf_counter()
    outcome: dict[str, Any] = {"reason": None, "result": None, "traceback": None}
    try:
        outcome["result"] = section.run()
        outcome["status"] = "passed" if outcome["result"]["passed"] else "failed"
        if outcome["status"] == "failed":
            outcome["reason"] = "out of bounds, see its figures"
    except Skipped as why:
        outcome |= {"status": "skipped", "reason": str(why)}
    except Exception as error:  # a section's failure must not end the others
        outcome |= {
            "status": "failed",
            "reason": f"{type(error).__name__}: {error}",
            "traceback": traceback.format_exc(),
        }
    return outcome | {"seconds": round(time.perf_counter() - start, 2)}


def run_apart(section: Section, file: Path, command: Sequence[str], limit: float) -> dict[str, Any]:
    """The same in a process of its own, which frees the device and may crash or be stopped.

    command: what runs the section and writes its outcome to `file`.
    """
    file.unlink(missing_ok=True)
    start = time.perf_counter()
    reason = ""
    try:
        ran = subprocess.run(
            [*command], stdout=sys.stderr, stderr=subprocess.PIPE, text=True, timeout=limit
        )
        print(ran.stderr, end="", file=sys.stderr)
        last = (ran.stderr.strip().splitlines() or ["no message"])[-1]
        reason = f"its process {ending(ran.returncode)}: {last}"
    except subprocess.TimeoutExpired:
        reason = f"stopped after {limit:.0f} s, when the time was up"
    if file.is_file():
        return {k: v for k, v in read_json(file, "section").items() if k != "schema_version"}
    seconds = round(time.perf_counter() - start, 2)
    return {
        "status": "failed",
        "reason": reason,
        "result": None,
        "traceback": None,
        "seconds": seconds,
    }


def run_all(
    sections: Sequence[Section],
    *,
    minutes: float,
    only: Sequence[str],
    folder: Path,
    execute: Callable[[Section, float], dict[str, Any]],
    finished: Callable[[list[dict[str, Any]]], None],
    report: Report,
) -> list[dict[str, Any]]:
    """Every section in order, with its outcome; none begins that would not end in time.

    only: patterns of names; others keep the outcome that an earlier run left in `folder`, if any.
    execute: runs a section within a number of seconds. finished: told of all outcomes so far.
    """
    end = time.monotonic() + 60 * minutes
    outcomes: list[dict[str, Any]] = []
    for section in sections:
        file = folder / f"{section.name.replace(':', '-')}.json"
        facts = {"name": section.name, "estimate": section.estimate, "earlier": False}
        left = end - time.monotonic()
        if only and not any(fnmatch(section.name, pattern) for pattern in only):
            if not file.is_file():
                continue
            outcome = {**read_json(file, "section"), "earlier": True}
        elif section.estimate > left:
            outcome = _not_run(f"time: may take {section.estimate:.0f} s, {left:.0f} s are left")
        else:
            report(f"{section.name}: up to {section.estimate:.0f} s, {left:.0f} s left")
            outcome = execute(section, left)
            write_json(file, {"schema_version": SCHEMA_VERSION, **plain_json(outcome)})
            report(f"{section.name}: {outcome['status']} ({outcome['seconds']:.1f} s)")
        outcome.pop("schema_version", None)
        outcomes.append(facts | outcome)
        finished(outcomes)
    return outcomes


def _not_run(reason: str) -> dict[str, Any]:
    return {
        "status": "skipped",
        "reason": reason,
        "result": None,
        "traceback": None,
        "seconds": 0.0,
    }


def plain_json(value: dict[str, Any]) -> dict[str, Any]:
    """As JSON has it: NaN and infinities as text."""
    text = json.dumps(value, default=str)
    plain: dict[str, Any] = json.loads(text, parse_constant=lambda name: name)
    return plain
