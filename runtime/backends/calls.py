"""From batches to graph inputs: what every backend feeds, computed on the host.

Pure functions of small integer arrays; the names are those of the bundle's manifest.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from ...graphs.errors import DraftgraphError
from ..bundle import Bundle
from .base import AcceptSampling, ContextBatch, DraftSampling, TokenBatch


@dataclass(frozen=True)
class GraphCall:
    """One run of a graph.

    feeds: inputs that come from the host. tensors: inputs that earlier graphs of the round left.
    sizes: the symbolic axes of its outputs.
    """

    graph: str
    feeds: dict[str, np.ndarray]
    sizes: dict[str, int]
    tensors: tuple[str, ...] = ()
    first_slot: int = 0


@dataclass(frozen=True)
class LogitRows:
    """Where acceptance finds the rows of each slot among the logits of a target call.

    start, count: [R], of the slots from first_slot on. total: rows of the logits.
    """

    start: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    count: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    first_slot: int = 0
    total: int = 0


def target_call(batch: TokenBatch) -> tuple[GraphCall, LogitRows]:
    """The target's inputs: packed tokens, the padded view of them, and the rows with logits."""
    tokens = len(batch.ids)
    busy = batch.lengths > 0
    ends = np.cumsum(batch.lengths)
    cell_token, valid = padded_cells(batch.lengths, tokens)
    logits_index = ends[busy] - 1 if batch.last_only else np.arange(tokens)
    call = GraphCall(
        "target",
        {
            "input_ids": batch.ids,
            "past_length": batch.past_length,
            "cell_token": cell_token,
            "token_cell": np.flatnonzero(valid),
            "logits_index": logits_index,
        },
        {"N": tokens, "M": len(logits_index), "R": len(batch.lengths)},
        first_slot=batch.first_slot,
    )
    if batch.last_only:
        start, count = np.cumsum(busy) - 1, busy.astype(np.int64)
    else:
        start, count = ends - batch.lengths, batch.lengths
    return call, LogitRows(start, count, batch.first_slot, len(logits_index))


def backbone_call(context: ContextBatch, index: np.ndarray) -> GraphCall:
    """The backbone's inputs. index: rows of `context_features`, slot by slot, held ones included.

    Reads the intermediate tensor `context_features`.
    """
    if not len(index):  # nothing new: a row that no cell counts
        index = np.zeros(1, np.int64)
    slots = context.slots - context.first_slot
    drafting = np.zeros(len(context.counts), bool)
    drafting[slots] = True
    context_cell, _ = padded_cells(context.counts, len(index))
    return GraphCall(
        "backbone",
        {
            "feature_index": index,
            "context_cell": context_cell,
            "feature_count": context.counts,
            "past_length": context.past_length,
            "anchor": context.anchor,
            "request_block": np.maximum(np.cumsum(drafting) - 1, 0),
            "block_request": slots,
        },
        {"R": len(context.counts), "B": len(slots)},
        ("context_features",),
        context.first_slot,
    )


def markov_call(head: str, anchor: np.ndarray, sampling: DraftSampling) -> GraphCall:
    """The Markov head's inputs; head: "markov" or "markov_topk", of which greedy has its own."""
    feeds = {"anchor": anchor}
    if sampling.uniforms is None:
        head += "_greedy"
    else:
        feeds |= {"uniforms": sampling.uniforms, "temperature": sampling.temperature}
    return GraphCall(head, feeds, {"B": len(anchor)}, ("base_logits", "hidden"))


def accept_call(
    sampling: AcceptSampling,
    rows: LogitRows,
    slot_block: np.ndarray,
    draft_temperature: np.ndarray,
    gamma: int,
) -> GraphCall:
    """Inputs of the acceptance graph that these parameters need.

    slot_block: [slots] the drafted block of each slot, any for one that did not draft.
    draft_temperature: [B], of the blocks.
    """
    at = sampling.slots - rows.first_slot
    start, count = rows.start[at], rows.count[at]
    feeds = {
        "cell_token": start[:, None] + np.minimum(np.arange(gamma + 1), count[:, None] - 1),
        "request_block": slot_block[sampling.slots],
        "verify_length": sampling.verify_length,
    }
    sizes = {"R": len(sampling.slots)}
    if sampling.sample_uniform is None or sampling.accept_uniform is None:
        return GraphCall("accept_greedy", feeds, sizes, ("logits", "draft_ids"))
    token_request = np.zeros(rows.total, np.int64)  # any for the rows of a slot not judged
    for request, (first, length) in enumerate(zip(start, count, strict=True)):
        token_request[first : first + length] = request
    feeds |= {
        "token_request": token_request,
        "accept_uniform": sampling.accept_uniform,
        "sample_uniform": sampling.sample_uniform,
        "temperature": sampling.temperature,
        "draft_temperature": draft_temperature,
    }
    name = "accept_sample"
    if (sampling.top_k > 0).any() or (sampling.top_p < 1).any():
        name = "accept_filtered"
        feeds |= {"top_k": sampling.top_k, "top_p": sampling.top_p}
    return GraphCall(name, feeds, sizes, ("logits", "draft_ids", "draft_logits"))


def padded_cells(lengths: np.ndarray, total: int) -> tuple[np.ndarray, np.ndarray]:
    """The padded view of packed rows: index [R, S] into them, and which cells hold one.

    lengths [R]: rows of each request; `total` is their sum. Cells without a row name a valid one.
    """
    columns = np.arange(max(1, int(lengths.max())))
    starts = np.cumsum(lengths) - lengths
    last = np.maximum(lengths - 1, 0)[:, None]
    cells = np.minimum(starts[:, None] + np.minimum(columns, last), total - 1)
    return cells, columns < lengths[:, None]


def markov_head(bundle: Bundle, markov: str) -> str:
    """The graph that the option `markov` ("auto", "full", "topk") of a backend means, "markov" or
    "markov_topk". Raises `DraftgraphError`."""
    if markov not in ("auto", "full", "topk"):
        raise DraftgraphError(f'markov is {markov!r}, expected "auto", "full" or "topk"')
    if markov == "topk" and "markov_topk" not in bundle.graphs:
        raise DraftgraphError(
            f"{bundle.path}: no truncated Markov graph in this bundle; export it with "
            '--markov-top-k, or use markov="full"'
        )
    return "markov_topk" if markov != "full" and "markov_topk" in bundle.graphs else "markov"


def runs(*index: np.ndarray) -> list[tuple[int, ...]]:
    """Row numbers as (start, count) of consecutive stretches, in order: one copy each.

    Of several as long: (start of each, count), consecutive in all.
    """
    size = len(index[0])
    if not size:
        return []
    if size == 1:  # every step of a single request
        return [(*(int(i[0]) for i in index), 1)]
    breaks = np.flatnonzero(np.any([np.diff(i) != 1 for i in index], axis=0)) + 1
    edges = pairwise([0, *breaks.tolist(), size])
    return [(*(int(i[a]) for i in index), b - a) for a, b in edges]
