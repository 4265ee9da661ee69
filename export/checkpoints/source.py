"""Where a checkpoint comes from: a local path, or the id of a Hugging Face hub repository."""

from __future__ import annotations

import re
from pathlib import Path

from draftgraph.graphs.errors import DraftgraphError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# Neither code nor pickled weights are ever fetched.
_PATTERNS = ["*.safetensors", "*.json", "*.jinja"]


def resolve(path_or_id: str | Path) -> Path:
    """An existing path as it is; a hub id as the directory of its downloaded snapshot."""
    path = Path(path_or_id).expanduser()
    if path.exists():
        return path
    name = str(path_or_id)
    if not _HUB_ID.fullmatch(name):
        raise DraftgraphError(
            f"{name}: there is no such file or directory; give a checkpoint directory, a .gguf "
            "file or a Hugging Face id of the form org/name"
        )
    return _download(name)


def _download(name: str) -> Path:
    try:
        import huggingface_hub
        from huggingface_hub.errors import RepositoryNotFoundError
    except ImportError:
        raise DraftgraphError(
            f"{name}: there is no such directory, and huggingface_hub is not installed to look for "
            "it on the hub; give a local checkpoint directory or install draftgraph[export]"
        ) from None
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=_PATTERNS))
    except RepositoryNotFoundError:  # includes gated repositories
        raise DraftgraphError(
            f"{name}: there is neither such a directory nor a repository of this name on the "
            "Hugging Face hub that you may read; check the name, or log in if access is restricted"
        ) from None
    except Exception as error:  # of the hub's client, its HTTP library or the file system
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DraftgraphError(
            f"{name}: there is no such directory, and the Hugging Face hub cannot be reached "
            f"(offline? {reason}); give a local checkpoint directory instead"
        ) from None
