"""Clocks, power, temperature and driver of the GPU that the run uses, as nvidia-smi reports them; read only."""

from typing import Any

from .gpu import GPU

# Units as nvidia-smi prints them without units: MHz, MHz, W, °C.
_FIELDS = {
    "sm_mhz": "clocks.sm",
    "memory_mhz": "clocks.mem",
    "power_w": "power.draw",
    "temperature_c": "temperature.gpu",
    "driver": "driver_version",
}
# Reasons for low clocks (NVML, nvmlClocksEventReasons) that are faults of the machine. The power cap is not among them:
# large matrix products reach it on every card. Drivers before 535 use the older name of the field.
_REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
_THROTTLED = {
    0x08: "hardware slowdown", 0x20: "thermal slowdown by the driver", 0x40: "thermal slowdown by the hardware",
    0x80: "power brake",
}  # fmt: skip


def describe_clocks() -> tuple[dict[str, float | None] | None, str | None]:
    """Return the current GPU's clocks and its driver's version; None for values that nvidia-smi does not report."""
    return parse_clocks(GPU.smi(*_FIELDS.values()))


def describe_state() -> dict[str, Any]:
    """Return the current GPU's clocks and, as "throttled", the active reasons for a slowdown; one nvidia-smi call."""
    text = next((text for field in _REASONS if (text := GPU.smi(*_FIELDS.values(), field))), "")
    clocks, _, reasons = text.strip().split("\n")[0].rpartition(",")
    try:
        bits = int(reasons, 16)
    except ValueError:
        bits = 0
    slowed = [reason for bit, reason in _THROTTLED.items() if bits & bit]
    return {**(parse_clocks(clocks)[0] or {}), "throttled": slowed}


def power_limit_watt() -> float | None:
    """Return the current GPU's power limit; None if nvidia-smi does not report it."""
    return _number(GPU.smi("power.limit").split("\n")[0])


def parse_clocks(text: str) -> tuple[dict[str, float | None] | None, str | None]:
    """Parse nvidia-smi's output, one line for the GPU; "[N/A]" is None, and all are if the format differs."""
    line = text.strip().split("\n")[0]
    words = dict(zip(_FIELDS, (word.strip() for word in line.split(",")), strict=False))
    if len(words) != len(_FIELDS):
        return None, None
    driver = words.pop("driver")
    return {key: _number(word) for key, word in words.items()}, driver


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None
