"""What every reader returns: a contract, tensors under canonical names, and their origin."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from draftgraph.graphs.contract import DraftContract, TargetContract

from .weights import Weights


@dataclass(frozen=True)
class TargetCheckpoint:
    """A target model. `lm_head.weight` is absent from `weights` when the contract says tied."""

    contract: TargetContract
    weights: Weights  # Hugging Face names without the leading "model."
    tokenizer_files: dict[str, bytes]  # as they are on disk, by file name
    provenance: dict[str, str]  # file name -> SHA-256
    source: Path


@dataclass(frozen=True)
class DraftCheckpoint:
    """A drafter. `embed_tokens.weight` and `lm_head.weight` are absent when shared.

    draft_ids: [draft_vocab_size] i64, increasing, where the contract has a draft vocabulary.
    """

    contract: DraftContract
    weights: Weights  # DeepSpec names
    provenance: dict[str, str]
    source: Path
    draft_ids: np.ndarray | None = None
