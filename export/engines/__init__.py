"""TensorRT engines of a bundle, built without a GPU where TensorRT-RTX does it.

The same code serves TensorRT and TensorRT-RTX through their Python API; Polygraphy would add a
process-wide choice between the two and no step that is missing here.
"""

from .build import BuiltEngine, build_engines
from .options import BACKENDS, EngineOptions

__all__ = [
    "BACKENDS",
    "BuiltEngine",
    "EngineOptions",
    "build_engines",
]
