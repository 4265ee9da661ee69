"""The tokens that a drafter may draft.

Over a large vocabulary most of a draft's time goes into the head, and nearly all of what is drafted
well into few tokens. With a draft vocabulary the head has rows for these only. Verification is
exact for any drafter, so this costs acceptance where another token would have been right, nothing
else (FR-Spec, arXiv 2502.14856).
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from ..graphs.errors import DraftgraphError
from ..runtime.jsonfile import check_version, read_json, write_text
from .checkpoints import DraftCheckpoint

FILE = "draft_vocab.json"
SCHEMA_VERSION = 1


def write_draft_vocab(folder: Path, ids: np.ndarray) -> None:
    """draft_vocab.json of a drafter directory. ids: the most frequent ones first."""
    payload = {"schema_version": SCHEMA_VERSION, "ids": ids.tolist()}
    write_text(folder / FILE, json.dumps(payload) + "\n")


def read_draft_vocab(file: Path, vocab_size: int) -> np.ndarray:
    """[n] i64, the most frequent ones first. Raises `DraftgraphError`."""
    payload = read_json(file, "draft vocabulary; `draftgraph fit` writes one beside a drafter")
    check_version(payload, SCHEMA_VERSION, f"{file}")
    ids = payload.get("ids")
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        raise DraftgraphError(f"{file}: expected the key ids, a list of token ids")
    if len(set(ids)) < len(ids) or min(ids) < 0 or max(ids) >= vocab_size:
        raise DraftgraphError(
            f"{file}: expected different ids from 0 to {vocab_size - 1}, found {min(ids)} to "
            f"{max(ids)}, {len(ids) - len(set(ids))} of them twice; make it for this target"
        )
    return np.array(ids, np.int64)


def restrict(draft: DraftCheckpoint, size: int) -> DraftCheckpoint:
    """The drafter with the `size` most frequent tokens of its draft_vocab.json."""
    if not draft.source.is_dir():
        raise DraftgraphError(f"{draft.source}: not a directory, so it has no {FILE}")
    ids = read_draft_vocab(draft.source / FILE, draft.contract.vocab_size)
    if not 1 <= size <= len(ids):
        raise DraftgraphError(
            f"draft-vocab is {size}, expected 1 to {len(ids)}, which {draft.source / FILE} lists"
        )
    contract = replace(draft.contract, draft_vocab_size=size)
    return replace(draft, contract=contract, draft_ids=np.sort(ids[:size]))
