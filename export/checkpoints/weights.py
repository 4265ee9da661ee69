"""Checkpoint tensors as a lazy mapping, and how they are read from safetensors files."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from draftgraph.graphs.errors import DraftgraphError

from .files import read_json, sha256

_DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}

# Buffers that older transformers versions saved; they follow from the configuration.
_HARMLESS_TENSOR = re.compile(r"(^|\.)rotary_emb\.inv_freq$")


@dataclass(frozen=True)
class _Tensor:
    shape: tuple[int, ...]
    code: str  # dtype as safetensors spells it
    load: Callable[[], np.ndarray]


class Weights:
    """Read-only tensors by name, each in its stored dtype (bf16 as `ml_dtypes.bfloat16`).

    Nothing is kept: every `weights[name]` reads the tensor again, so that an export never holds
    more than what it is working on.
    """

    def __init__(self, tensors: Mapping[str, _Tensor]) -> None:
        self._tensors = dict(sorted(tensors.items()))

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> Weights:
        """Tensors that are in memory already: float32, float16 or bfloat16 arrays."""
        return cls(
            {
                name: _Tensor(array.shape, _CODES.get(array.dtype, str(array.dtype)), _give(array))
                for name, array in arrays.items()
            }
        )

    @classmethod
    def computed(
        cls,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: np.dtype,
        make: Callable[[str, tuple[int, ...]], np.ndarray],
    ) -> Weights:
        """Tensors that `make(name, shape)` gives in that dtype, anew at every read."""

        def load(name: str) -> Callable[[], np.ndarray]:
            return lambda: make(name, shapes[name])

        return cls({n: _Tensor(shape, _CODES[dtype], load(n)) for n, shape in shapes.items()})

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def dtype(self, name: str) -> np.dtype:
        code = self._tensors[name].code
        if code not in _DTYPES:
            raise DraftgraphError(
                f"tensor {name} has dtype {code}, but only fp32, fp16 and bf16 weights can be "
                "read: the scales of a quantised checkpoint are conventions of its producer; give "
                "the unquantised checkpoint"
            )
        return _DTYPES[code]

    def __getitem__(self, name: str) -> np.ndarray:
        self.dtype(name)
        return self._tensors[name].load()

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __len__(self) -> int:
        return len(self._tensors)

    def renamed(self, names: Mapping[str, str]) -> Weights:
        """The tensors `names` lists, under new names (old -> new)."""
        return Weights({new: self._tensors[old] for old, new in names.items()})

    def without(self, names: Collection[str]) -> Weights:
        return Weights({n: tensor for n, tensor in self._tensors.items() if n not in names})


def _give(array: np.ndarray) -> Callable[[], np.ndarray]:
    return lambda: array


def take_exactly(
    weights: Weights,
    expected: Mapping[str, tuple[int, ...]],
    where: str,
    *,
    optional: Collection[str] = (),
) -> Weights:
    """The expected tensors, after checking that all are there, in shape, and that no others are."""
    for name in expected:
        if name in weights:
            try:
                weights.dtype(name)
            except DraftgraphError as error:
                raise DraftgraphError(f"{where}: {error}") from None
    missing = [n for n in expected if n not in weights and n not in optional]
    extra = [n for n in weights.names() if n not in expected and not _HARMLESS_TENSOR.search(n)]
    if missing or extra:
        problems = [
            *([f"tensors missing: {_listed(missing)}"] if missing else []),
            *([f"tensors without a place in the model: {_listed(extra)}"] if extra else []),
        ]
        raise DraftgraphError(
            f"{where}: the weights do not match config.json ({'; '.join(problems)}); every tensor "
            "must be known, since one left out would change the model; check that config.json and "
            "the weights belong together"
        )
    for name, shape in expected.items():
        if name in weights and weights.shape(name) != tuple(shape):
            raise DraftgraphError(
                f"{where}: tensor {name} has shape {list(weights.shape(name))}, but config.json "
                f"implies {list(shape)}; check that config.json and the weights belong together"
            )
    return weights.renamed({n: n for n in expected if n in weights})


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 6} more" if len(names) > 6 else ""
    return ", ".join(names[:6]) + more


def same_values(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal in shape and in every value, compared in float32 whatever the stored dtypes."""
    rows = 4096  # at a time: an upcast copy of a large embedding is several gigabytes
    return a.shape == b.shape and all(
        np.array_equal(a[i : i + rows].astype(np.float32), b[i : i + rows].astype(np.float32))
        for i in range(0, len(a), rows)
    )


def check_finite(weights: Weights) -> None:
    """Refuse infinities and NaNs: one of them turns every logit into NaN."""
    for name in weights.names():
        if not np.isfinite(weights[name]).all():
            raise DraftgraphError(
                f"tensor {name} holds infinities or NaNs, but every weight must be finite; the "
                "checkpoint is damaged or its training diverged: fetch it again or use another"
            )


def open_safetensors(directory: Path, provenance: dict[str, str]) -> Weights:
    """All tensors of `model.safetensors`, or of the shards its index lists.

    The SHA-256 of every file read is added to `provenance`.
    """
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.is_file():  # transformers prefers the single file too, should both be there
        return Weights(_open_file(single, provenance))
    if index.is_file():
        return Weights(_open_shards(index, provenance))
    raise _no_weights(directory)


def _open_file(path: Path, provenance: dict[str, str]) -> dict[str, _Tensor]:
    try:
        handle = safe_open(str(path), framework="np")
        slices = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118
        tensors = {
            name: _Tensor(tuple(part.get_shape()), part.get_dtype(), _read(handle, name, path))
            for name, part in slices.items()
        }
    except (SafetensorError, OSError) as error:
        raise DraftgraphError(
            f"{path}: this is not a complete safetensors file ({error}); it is damaged or was cut "
            "off while being copied: fetch it again"
        ) from None
    provenance[path.name] = sha256(path)
    return tensors


def _read(handle: safe_open, name: str, path: Path) -> Callable[[], np.ndarray]:
    def load() -> np.ndarray:
        try:
            return handle.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise DraftgraphError(
                f"{path}: tensor {name} cannot be read ({error}); fetch the file again"
            ) from None

    return load


def _open_shards(index: Path, provenance: dict[str, str]) -> dict[str, _Tensor]:
    weight_map = read_json(index, provenance).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise DraftgraphError(
            f"{index}: weight_map is missing or is not an object of tensor name to file name; "
            "fetch the file again"
        )
    tensors: dict[str, _Tensor] = {}
    for shard in sorted(set(weight_map.values())):
        # Shards lie beside their index; any other name could read files the user did not give.
        if Path(shard).name != shard or "\\" in shard or not shard.endswith(".safetensors"):
            raise DraftgraphError(
                f"{index}: shard {shard!r} is not the plain name of a .safetensors file in the "
                "same directory; shards must lie beside the index: correct the index"
            )
        path = index.parent / shard
        if not path.is_file():
            raise DraftgraphError(
                f"{index}: shard {shard} is listed, but there is no such file in {index.parent}; "
                "fetch the missing shard"
            )
        found = _open_file(path, provenance)
        twice = sorted(set(found) & set(tensors))
        if twice:
            raise DraftgraphError(
                f"{path}: tensors {_listed(twice)} are in another shard too; fetch the shards again"
            )
        absent = sorted(n for n, s in weight_map.items() if s == shard and n not in found)
        if absent:
            raise DraftgraphError(
                f"{path}: tensors {_listed(absent)} are listed in {index.name} for this shard but "
                "are not in it; fetch the index and the shards again"
            )
        tensors.update(found)
    return tensors


def _no_weights(directory: Path) -> DraftgraphError:
    names = sorted(path.name for path in directory.iterdir())
    pickled = [n for n in names if n.endswith((".bin", ".pt", ".pth", ".ckpt", ".pkl"))]
    if pickled:
        return DraftgraphError(
            f"{directory}: found only pickled weights ({_listed(pickled)}), which draftgraph never "
            "reads because unpickling runs code from the file; convert them to model.safetensors "
            "(save_pretrained of transformers writes it)"
        )
    other = [n for n in names if n.endswith(".safetensors")]
    found = f"found {_listed(other)}" if other else "found no weights"
    return DraftgraphError(
        f"{directory}: {found}, but model.safetensors or model.safetensors.index.json is expected; "
        "give the directory that holds the checkpoint"
    )
