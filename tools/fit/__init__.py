"""Fitting drafters to a target: model, loss, data, training loop, checkpoints (docs/fit.md)."""
