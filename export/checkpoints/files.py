"""Reading the small files of a checkpoint; every file read leaves its SHA-256 in the provenance."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from draftgraph.graphs.errors import DraftgraphError


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_bytes(path: Path, provenance: dict[str, str]) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DraftgraphError(
            f"{path}: the file cannot be read ({error.strerror}); a checkpoint directory with this "
            "file is expected: check the path and its permissions"
        ) from None
    provenance[path.name] = hashlib.sha256(data).hexdigest()
    return data


def read_json(path: Path, provenance: dict[str, str]) -> dict[str, Any]:
    """A JSON object."""
    data = read_bytes(path, provenance)
    try:
        value = json.loads(data)
    except ValueError as error:  # of the decoder and of UTF-8 alike
        raise DraftgraphError(
            f"{path}: this is not valid JSON ({error}); fetch the file again"
        ) from None
    if not isinstance(value, dict):
        raise DraftgraphError(
            f"{path}: expected a JSON object, found {type(value).__name__}; fetch the file again"
        )
    return value
