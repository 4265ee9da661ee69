"""Readers of checkpoints: one short file per format, all returning the same typed contracts.

To add a drafter family, write one file with a `read` like `deepspec.read` and add its line to
`_DRAFTERS`.
"""

from __future__ import annotations

from pathlib import Path

from draftgraph.graphs.errors import DraftgraphError

from . import deepspec, gguf_target, hf_target
from .checkpoint import DraftCheckpoint, TargetCheckpoint
from .config import Config, architecture
from .files import read_json
from .source import resolve
from .weights import Weights, check_finite

__all__ = [
    "DraftCheckpoint",
    "TargetCheckpoint",
    "Weights",
    "check_finite",
    "read_draft",
    "read_target",
]

_DRAFTERS = {
    "Qwen3DSparkModel": deepspec.read,
}
# Families we recognise, so that the message can say more than "unknown".
_NOT_YET = {
    "Gemma4DSparkModel": "DeepSpec DSpark for Gemma 4",
    "Qwen3Eagle3Model": "DeepSpec EAGLE-3",
    "Gemma4Eagle3Model": "DeepSpec EAGLE-3 for Gemma 4",
    "DSparkDraftModel": "SpecForge DSpark",
    "DFlashDraftModel": "DFlash",
    "LlamaForCausalLMEagle3": "EAGLE-3",
    "Eagle3LlamaForCausalLM": "EAGLE-3",
    "Eagle3DeepseekV2ForCausalLM": "EAGLE-3",
    "PEagleDraftModel": "P-EAGLE",
    "MedusaModel": "Medusa",
}
_LAYOUTS = ("anchor-first", "mask-first")


def read_target(path_or_id: str | Path) -> TargetCheckpoint:
    """Read a target from a directory, a `.gguf` file, or a Hugging Face hub id."""
    path = resolve(path_or_id)
    if path.is_file():
        if path.suffix.lower() == ".gguf":
            return gguf_target.read(path)
        raise DraftgraphError(
            f"{path}: this is a file; give the directory that holds config.json and the weights, "
            "or a .gguf file"
        )
    if not (path / "config.json").is_file():
        ggufs = sorted(file for file in path.iterdir() if file.suffix.lower() == ".gguf")
        if len(ggufs) == 1:
            return gguf_target.read(ggufs[0])
        several = f", and {len(ggufs)} .gguf files: give the path of one" if ggufs else ""
        raise _no_config(path, several)
    return hf_target.read(path)


def read_draft(
    path_or_id: str | Path, target: TargetCheckpoint, *, layout: str | None = None
) -> DraftCheckpoint:
    """Read a drafter for `target`; `layout` overrides what the checkpoint says of its layout."""
    if layout is not None and layout not in _LAYOUTS:
        raise DraftgraphError(
            f"layout {layout!r} is unknown; expected one of {', '.join(_LAYOUTS)}, or none to "
            "follow the checkpoint"
        )
    if layout == "mask-first":
        raise DraftgraphError(
            "layout mask-first is not supported yet: it arrives with the z-lab DFlash and "
            "SpecForge drafters; DeepSpec drafters are anchor-first, leave the layout out"
        )
    path = resolve(path_or_id)
    if not (path / "config.json").is_file():
        raise _no_config(path)
    provenance: dict[str, str] = {}
    config = Config(read_json(path / "config.json", provenance), str(path / "config.json"))
    return _DRAFTERS[_family(config)](path, config, target, layout=layout, provenance=provenance)


def _family(config: Config) -> str:
    """The architecture of a drafter, one that has a reader."""
    supported = f"supported: {', '.join(_DRAFTERS)}"
    if config.get("speculators_model_type") is not None:
        kind = config.get("speculators_model_type")
        raise config.fail(f"speculators drafters ({kind}) are not supported yet ({supported})")
    if config.get("model_type") == "medusa":
        raise config.fail(f"Medusa drafters are not supported yet ({supported})")
    name = architecture(config)
    if name in _NOT_YET:
        raise config.fail(
            f"architecture {name} ({_NOT_YET[name]}) is not supported yet ({supported})",
            "use a drafter of a supported family",
        )
    if name not in _DRAFTERS:
        raise config.fail(
            f"architecture {name} is not a known drafter ({supported})",
            "check that this is the drafter and not the target",
        )
    return name


def _no_config(path: Path, more: str = "") -> DraftgraphError:
    return DraftgraphError(
        f"{path}: there is no config.json{more}; a checkpoint directory with config.json and "
        "safetensors weights is expected: give the directory that holds them"
    )
