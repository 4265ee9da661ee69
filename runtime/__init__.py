"""Run an exported bundle: `Engine.load(path).generate(prompt, SamplingParams(...))`.

Imports neither torch nor transformers.
"""

from ..graphs.errors import DraftgraphError
from .bundle import Bundle, load_bundle
from .engine import Engine
from .results import Output, Round, Stats
from .sampling import SamplingParams

__all__ = [
    "Bundle",
    "DraftgraphError",
    "Engine",
    "Output",
    "Round",
    "SamplingParams",
    "Stats",
    "load_bundle",
]
