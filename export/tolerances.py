"""How far numbers of a dtype may lie apart, for everything that compares them.

Standard library only, so that a machine without the export tools can use them.
"""

from __future__ import annotations

from ..graphs.contract import DType

# Relative to max(1, max |reference|). fp32: a few hundred roundings of 6e-8 through 30+ layers;
# fp16 and bf16 carry 11 and 8 significant bits through the same layers.
TOLERANCE: dict[DType, float] = {"fp32": 2e-4, "fp16": 2e-2, "bf16": 1.2e-1}
# Share of positions whose argmax must agree.
AGREEMENT: dict[DType, float] = {"fp32": 0.99, "fp16": 0.95, "bf16": 0.85}
# A reference gap between the two best logits below this is a tie for its dtype.
TIE: dict[DType, float] = {"fp32": 1e-3, "fp16": 5e-2, "bf16": 4e-1}
