"""Reading prompt files for the benchmarks."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..graphs.errors import DraftgraphError

_JSON_LINES = (".jsonl", ".ndjson", ".json")


@dataclass(frozen=True)
class BenchPrompt:
    """One prompt and where it stands."""

    content: str | tuple[int, ...]  # text, or token ids for bundles without a tokenizer
    line: int
    source: str | None = None


@dataclass(frozen=True)
class PromptSet:
    """The prompts of one file."""

    file: Path
    prompts: tuple[BenchPrompt, ...]


def read_prompts(file: Path, limit: int | None = None) -> PromptSet:
    """The first `limit` prompts of a file.

    `.jsonl`: one object a line with "prompt" (text, or a list of token ids) and perhaps "source".
    Any other name: one prompt a line. Blank lines are skipped. Errors name the line.
    """
    try:
        lines = file.read_bytes().split(b"\n")
    except OSError as error:
        raise DraftgraphError(f"{file}: cannot be read ({error.strerror})") from None
    prompts: list[BenchPrompt] = []
    for number, raw in enumerate(lines, start=1):
        if len(prompts) == limit:
            break
        where = f"{file}, line {number}"
        try:
            line = raw.decode("utf-8").strip()
        except UnicodeDecodeError:
            raise DraftgraphError(f"{where}: not UTF-8 text") from None
        if not line:
            continue
        if file.suffix.lower() in _JSON_LINES:
            prompts.append(_entry(line, number, where))
        else:
            prompts.append(BenchPrompt(line, number))
    if not prompts:
        raise DraftgraphError(
            f"{file}: no prompts in it; expected one JSON object a line with the key prompt "
            "(.jsonl), or one prompt a line"
        )
    return PromptSet(file, tuple(prompts))


def _entry(line: str, number: int, where: str) -> BenchPrompt:
    try:
        entry: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise DraftgraphError(f"{where}: not valid JSON ({error.msg})") from None
    if not isinstance(entry, dict) or "prompt" not in entry:
        raise DraftgraphError(f'{where}: expected an object with the key "prompt"')
    prompt, source = entry["prompt"], entry.get("source")
    if isinstance(prompt, list) and all(type(i) is int for i in prompt):
        prompt = tuple(prompt)
    if not isinstance(prompt, (str, tuple)) or not prompt:
        raise DraftgraphError(f"{where}: prompt is {prompt!r}, expected text that is not empty")
    if source is not None and not isinstance(source, str):
        raise DraftgraphError(f"{where}: source is {source!r}, expected text")
    return BenchPrompt(prompt, number, source)
