"""Clocks, power, temperature and driver of the GPU that the run uses, as nvidia-smi reports them; nothing is set."""

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


def throttled() -> tuple[str, ...]:
    """Return why the current GPU is slowed down now; () where it is not, or nvidia-smi does not tell."""
    told = next((text for field in _REASONS if (text := GPU.smi(field).split("\n")[0].strip())), "")
    try:
        bits = int(told, 16)
    except ValueError:
        return ()
    return tuple(reason for bit, reason in _THROTTLED.items() if bits & bit)


def describe_clocks() -> tuple[dict[str, float | None] | None, str | None]:
    """Return the current GPU's clocks and its driver's version; None for what nvidia-smi does not tell."""
    return parse_clocks(GPU.smi(*_FIELDS.values()))


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
