"""Small JSON files with a schema version, replaced atomically."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from ..graphs.errors import DraftgraphError


def write_json(path: str | Path, payload: dict[str, Any]) -> None:
    """Write beside the file, then rename: a crash leaves the old file as it was."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(payload, indent=1, allow_nan=False) + "\n")


def write_text(path: str | Path, text: str) -> None:
    """Replace a text file atomically."""
    path = Path(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_json(path: str | Path, kind: str) -> dict[str, Any]:
    """A JSON object; `kind` names the file in errors."""
    try:
        payload = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DraftgraphError(f"{path}: no such {kind}") from None
    except (OSError, ValueError) as error:
        raise DraftgraphError(f"{path}: not a readable {kind} ({error})") from error
    if not isinstance(payload, dict):
        raise DraftgraphError(f"{path}: a {kind} is a JSON object")
    return payload


def check_version(payload: dict[str, Any], supported: int, kind: str) -> None:
    """Refuse a file without a schema version, or one from a newer version of this package."""
    version = payload.get("schema_version")
    if not isinstance(version, int) or isinstance(version, bool) or not 1 <= version <= supported:
        raise DraftgraphError(
            f"{kind}: schema_version is {version!r}, this version reads up to {supported}; make "
            "the file again or update draftgraph"
        )
