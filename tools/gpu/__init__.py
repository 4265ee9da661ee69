"""Trying providers on a machine: what `draftgraph doctor` and `tools/gpu_check.py` share."""
