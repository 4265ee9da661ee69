"""Facts about the machine that measurements belong to."""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path
from typing import NamedTuple


def processor_name() -> str:
    """The processor's name, as far as the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text("utf-8").splitlines() if info.is_file() else []
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or "unknown")


def vector_instructions() -> list[str]:
    """AVX2 and AVX-512 extensions that the processor has, as far as the system tells them."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text("utf-8").splitlines() if info.is_file() else []
    flags = next((line.split(":", 1)[1].split() for line in lines if line.startswith("flags")), [])
    return sorted(f for f in flags if f.startswith(("avx2", "avx512", "avx_vnni", "amx")))


def available_cores() -> int:
    """Cores this process may use; where the system does not tell, all of them."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Gpu(NamedTuple):
    """One NVIDIA GPU as its driver describes it."""

    name: str
    compute_capability: str  # "9.0"
    driver: str  # "580.65.06", or the CUDA version that the driver serves: "CUDA 13.0"
    memory: int  # bytes


def gpu(index: int = 0) -> Gpu | None:
    """The GPU of that number, None without a driver or device. Reads the driver's own libraries."""
    try:
        cuda = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    except OSError:
        return None
    device, version, memory = ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
    if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), index):
        return None
    name = ctypes.create_string_buffer(128)
    numbers = [ctypes.c_int(), ctypes.c_int()]
    calls = [
        cuda.cuDeviceGetName(name, len(name), device),
        cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device),
        cuda.cuDriverGetVersion(ctypes.byref(version)),
    ]
    for number, attribute in zip(numbers, (75, 76), strict=True):  # COMPUTE_CAPABILITY_MAJOR, MINOR
        calls.append(cuda.cuDeviceGetAttribute(ctypes.byref(number), attribute, device))
    if any(calls):
        return None
    served = f"CUDA {version.value // 1000}.{version.value % 1000 // 10}"
    return Gpu(
        name.value.decode("utf-8", "replace"),
        f"{numbers[0].value}.{numbers[1].value}",
        _driver_version() or served,
        memory.value,
    )


def driver_versions() -> tuple[str | None, str | None]:
    """The NVIDIA driver's version, and that of the CUDA it serves; None where there is none.

    Needs no GPU: a driver that finds no device still tells.
    """
    try:
        cuda = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    except OSError:
        return None, None
    version = ctypes.c_int()
    if cuda.cuDriverGetVersion(ctypes.byref(version)):
        return _driver_version(), None
    return _driver_version(), f"{version.value // 1000}.{version.value % 1000 // 10}"


def _driver_version() -> str | None:
    """The driver's own version, from its management library."""
    try:
        nvml = ctypes.CDLL("nvml.dll" if os.name == "nt" else "libnvidia-ml.so.1")
    except OSError:
        return None
    text = ctypes.create_string_buffer(96)
    if nvml.nvmlInit_v2():
        return None
    try:
        return None if nvml.nvmlSystemGetDriverVersion(text, len(text)) else text.value.decode()
    finally:
        nvml.nvmlShutdown()
