"""Recording the calls of an engine to its backend, and making the same calls to another backend.

The other backend gets the ids, lengths and random numbers of the recording, so it stays on the same
path even where its own picks would leave it, and every output has its counterpart.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from ...runtime import SamplingParams
from ...runtime.backends.base import AcceptSampling, Backend, DraftSampling
from .opening import Room, open_engine

Outputs = dict[str, np.ndarray]
_PHASES = ("target", "backbone", "markov", "confidence", "accept")
_OTHERS = ("reserve", "reset", "hold", "release")
# What every kind of batch decodes with; together they run every graph of a bundle.
BATCHES = {
    "greedy": SamplingParams(),
    "sample": SamplingParams(temperature=0.8, seed=1),
    "filtered": SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=2),
}


@dataclass(frozen=True)
class Call:
    """One call to a backend. outputs: tensors by graph name, of phases that leave some."""

    name: str
    arguments: tuple[Any, ...]
    outputs: Outputs

    @property
    def graph(self) -> str:
        """The graph that a phase runs, without the Markov head's truncation."""
        if self.name == "markov":
            draft: DraftSampling = self.arguments[1]
            return "markov_greedy" if draft.uniforms is None else "markov"
        if self.name == "accept":
            sampling: AcceptSampling = self.arguments[0]
            if sampling.sample_uniform is None:
                return "accept_greedy"
            filters = (sampling.top_k > 0).any() or (sampling.top_p < 1).any()
            return "accept_filtered" if filters else "accept_sample"
        return self.name


class _Recorder:
    """A backend that notes every call; the rest is the other's."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.calls: list[Call] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.backend, name)
        if name not in (*_PHASES, *_OTHERS):
            return found

        def call(*arguments: Any) -> Any:
            kept = copy.deepcopy(arguments)
            result = found(*arguments)
            self.calls.append(Call(name, kept, _outputs(self.backend, name, kept, result)))
            return result

        return call


def record(
    path: Path,
    prompts: Sequence[Sequence[int]],
    *,
    markov: str = "auto",
    batches: Sequence[str] = tuple(BATCHES),
    new_tokens: int = 24,
) -> list[Call]:
    """All calls of the CPU provider decoding the prompts together, once for each kind of batch."""
    engine = open_engine(path, "cpu", Room(requests=len(prompts)), markov=markov)
    recorder = _Recorder(engine.backend)
    engine.backend = cast(Backend, recorder)
    for kind in batches:
        params = BATCHES[kind]
        changed = {**vars(params), "max_new_tokens": new_tokens, "stop_ids": ()}
        engine.generate_batch([list(p) for p in prompts], SamplingParams(**changed))
    return recorder.calls


def replay(backend: Backend, calls: Sequence[Call]) -> list[Outputs]:
    """Make the same calls; the outputs of each."""
    found = []
    for call in calls:
        arguments = copy.deepcopy(call.arguments)
        result = getattr(backend, call.name)(*arguments)
        found.append(_outputs(backend, call.name, arguments, result))
    return found


def _outputs(backend: Backend, name: str, arguments: tuple[Any, ...], result: Any) -> Outputs:
    """What a phase left. Those of the draft are read at its end: it may run as one piece."""
    if name == "target":
        return {n: backend.read(n) for n in ("logits", "features")}
    if name == "markov":
        found = {"draft_ids": result.copy()}
        if arguments[1].uniforms is not None:
            found["draft_logits"] = backend.read("draft_logits")
        return found
    if name == "confidence":
        names = ["hidden", "base_logits"]
        bundle = getattr(backend, "bundle", None)
        if bundle is not None and bundle.draft.markov_type != "none":
            names.append("prev_embeddings")
        found = {n: backend.read(n) for n in names}
        return found if result is None else found | {"confidence_logits": result.copy()}
    if name == "accept":
        return {"accepted": result[0].copy(), "next_id": result[1].copy()}
    return {}
