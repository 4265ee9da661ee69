"""The commands and extras that the documents name exist."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import typer

from draftgraph.tools import gpu_check
from draftgraph.tools.cli import app

ROOT = Path(__file__).parents[1]
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))


def blocks(document: Path) -> str:
    """The code of a document, lines that go on joined."""
    code = re.findall(r"```\w*\n(.*?)\n```", document.read_text("utf-8"), re.DOTALL)
    return re.sub(r"\\?\n +(?=[\[-])", " ", "\n".join(code))


def test_extras_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    texts = [d.read_text("utf-8") for d in DOCUMENTS]
    for folder in ("export", "runtime", "tools"):
        texts += [f.read_text("utf-8") for f in (ROOT / folder).rglob("*.py")]
    named = {
        extra
        for text in texts
        for listed in re.findall(r"(?:draftgraph|\")\.?\[([a-z][a-z,-]+)\]\"", text)
        for extra in listed.split(",")
    }
    assert {"export", "cuda", "tensorrt", "tensorrt-rtx"} <= named
    assert named <= set(project["optional-dependencies"])


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: d.name)
def test_commands_and_options_exist(document: Path) -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for line in blocks(document).splitlines():
        words = line.split("#")[0].replace("[", " ").split()
        if words[:1] == ["draftgraph"]:
            known = {o for p in commands[words[1]].params for o in (*p.opts, *p.secondary_opts)}
        elif "tools/gpu_check.py" in words:
            known = set(re.findall(r"--[a-z-]+", Path(gpu_check.__file__).read_text("utf-8")))
        else:
            continue
        used = {w.rstrip("]").split("=")[0] for w in words if w.startswith("--")}
        assert used <= known, line
