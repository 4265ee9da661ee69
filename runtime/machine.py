"""Facts about the machine that measurements belong to."""

from __future__ import annotations

import platform
from pathlib import Path


def processor_name() -> str:
    """The processor's name, as far as the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text("utf-8").splitlines() if info.is_file() else []
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or "unknown")
