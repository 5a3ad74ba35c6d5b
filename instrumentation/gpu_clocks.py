"""Clocks, power, temperature and driver of the GPU that the run uses, as nvidia-smi reports them; nothing is set."""

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
# Why clocks are low (NVML, nvmlClocksEventReasons), where something slows the GPU that a run cannot help; the power cap
# is not among them: large products reach it on every card. Drivers before 535 have the older name of the field.
_REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
_THROTTLED = {
    0x08: "hardware slowdown", 0x20: "thermal slowdown by the driver", 0x40: "thermal slowdown by the hardware",
    0x80: "power brake",
}  # fmt: skip


def describe_clocks() -> tuple[dict[str, float | None] | None, str | None]:
    """Return the current GPU's clocks and its driver's version; None for what nvidia-smi does not tell."""
    return parse_clocks(GPU.smi(*_FIELDS.values()))


def describe_state() -> dict[str, Any]:
    """Return the current GPU's clocks and, under "throttled", why it is slowed down now; one question to nvidia-smi."""
    text = next((text for field in _REASONS if (text := GPU.smi(*_FIELDS.values(), field))), "")
    clocks, _, reasons = text.strip().split("\n")[0].rpartition(",")
    try:
        bits = int(reasons, 16)
    except ValueError:
        bits = 0
    slowed = [reason for bit, reason in _THROTTLED.items() if bits & bit]
    return {**(parse_clocks(clocks)[0] or {}), "throttled": slowed}


def power_limit_watt() -> float | None:
    """Return the current GPU's power limit; None where nvidia-smi does not report it."""
    return _number(GPU.smi("power.limit").split("\n")[0])


def parse_clocks(text: str) -> tuple[dict[str, float | None] | None, str | None]:
    """Read nvidia-smi's answer, one line for the GPU; a field such as "[N/A]" is None, another shape all None."""
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
