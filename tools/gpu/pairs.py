"""The bundles that `gpu_check` uses, made on first use and kept in its output folder."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...graphs.contract import DType
from .opening import Room

Report = Callable[[str], None]
GOLDEN, GOLDEN_ROOM = "qwen3-vanilla", Room(512, 4)
MEASURED_ROOM = Room(1024, 32)


class Skipped(Exception):
    """A section that does not apply here; the message says why."""


@dataclass(frozen=True)
class Pairs:
    """folder: where bundles go. target, drafter: of the demo pair. small: a pair for a dry run.

    layers: of the Qwen3-4B-shaped target, default all 36.
    """

    folder: Path
    goldens: Path
    target: str | None
    drafter: str | None
    small: bool = False
    layers: int | None = None

    def golden_names(self) -> list[str]:
        names = sorted(p.parent.name for p in self.goldens.glob("*/expected.json"))
        if not names:
            raise Skipped(f"no traces in {self.goldens}; they are in tests/goldens of the source")
        return names

    def golden(self, name: str, dtype: DType, report: Report = print) -> Path:
        """A pair of the official traces; the truncated Markov graphs are there too."""
        if name not in self.golden_names():
            raise Skipped(f"no traces {name} in {self.goldens}")
        traces = self.goldens / name
        return self._checkpoints(
            f"{name}-{dtype}", str(traces / "target"), str(traces / "draft"), dtype, 20, report
        )

    def demo(self, dtype: DType, report: Report = print) -> Path:
        """The pair that --target and --drafter name."""
        if self.target is None or self.drafter is None:
            raise Skipped("no --target and --drafter given")
        return self._checkpoints(f"demo-{dtype}", self.target, self.drafter, dtype, 128, report)

    def large(self, dtype: DType, report: Report = print) -> Path:
        """Random weights in the shape of Qwen3-4B and its DSpark drafter."""
        from ...export.bundle import export_bundle
        from ...export.random_pair import qwen3_4b_contracts, random_pair

        layers = self.layers or (2 if self.small else 36)
        out = self.folder / f"qwen3-4b-{layers}-layers-{dtype}"
        if not out.is_dir():
            contracts = qwen3_4b_contracts(layers=layers, scale=16 if self.small else 1)
            pair = random_pair(*contracts, dtype)
            self.folder.mkdir(parents=True, exist_ok=True)
            export_bundle(*pair, out, dtype=dtype, validate=False, report=report)
        return out

    def _checkpoints(
        self, name: str, target: str, drafter: str, dtype: DType, top_k: int, report: Report
    ) -> Path:
        """Without the comparison with torch: here everything is compared with the CPU provider."""
        from ...export.bundle import export_bundle
        from ...export.checkpoints import read_draft, read_target

        out = self.folder / name
        if not out.is_dir():
            read = read_target(target)
            self.folder.mkdir(parents=True, exist_ok=True)
            export_bundle(
                read,
                read_draft(drafter, read),
                out,
                dtype=dtype,
                markov_top_k=top_k,
                max_seq_len=min(1024, read.contract.max_position_embeddings),
                validate=False,
                report=report,
            )
        return out


def needed_bytes(path: Path, room: Room) -> int:
    """Roughly the device memory that a bundle takes: weights, caches, features, logits."""
    from ...runtime import load_bundle

    bundle = load_bundle(path, verify=False)
    weights = bundle.files["weights.safetensors"]["bytes"]
    decoder, vocab = bundle.target.decoder, bundle.target.vocab_size
    head = 4 * vocab * decoder.hidden_size  # a runtime may keep it in float32
    caches = room.requests * room.capacity * sum(bundle.kv_bytes)
    width = len(bundle.draft.tap_ids) * decoder.hidden_size
    features = 4 * width * 2 * (room.requests + 1) * room.capacity
    logits = 4 * 4 * room.requests * (bundle.draft.block_size + 1) * vocab
    return math.ceil(1.1 * (weights + head + caches + features + logits))
