"""The figures of a fit as tables."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from . import console


def render(result: dict[str, Any], screen: Console) -> None:
    """The course of training on the held-out split, and acceptance in the runtime at the end."""
    history = result["history"]
    gamma = len(history[0]["held_out"]["acceptance"])
    console.heading(screen, "held out, by step (expected: accepted tokens of a block, T=1)")
    positions = [str(k) for k in range(1, gamma + 1)]
    show = console.table("step", "loss", "expected", *positions, "τ, T=0", "τ, T=1", left=0)
    for entry in history:
        held_out, runtime = entry["held_out"], entry["runtime"]
        show.add_row(
            str(entry["step"]),
            f"{entry['loss']:.3f}",
            f"{held_out['expected']:.3f}",
            *(f"{a:.2f}" for a in held_out["acceptance"]),
            console.number(runtime["t0"]["tau"]),
            console.number(runtime["t1"]["tau"]),
        )
    screen.print(show)
    final = result["runtime"]
    console.heading(screen, f"in the runtime, {final['prompts']} held-out prompts")
    show = console.table("temperature", "rounds", "τ", *(f"≥{k}" for k in positions))
    for key, label in (("t0", "0"), ("t1", "1")):
        part = final[key]
        survival = [f"{s:.2f}" for s in part["survival"]] or ["–"] * gamma
        show.add_row(label, str(part["rounds"]), console.number(part["tau"]), *survival)
    screen.print(show)
