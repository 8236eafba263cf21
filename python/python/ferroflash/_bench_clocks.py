"""What a GPU says of its clocks, through NVML where its library is; no setting is touched."""

from __future__ import annotations

import ctypes
from typing import Any

# Why clocks are held down, by the bits of NVML's nvmlClocksEventReasons. An idle GPU and a clock
# that was asked for are no throttling.
_REASONS = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x10: "sync boost",
    0x20: "thermal, by software",
    0x40: "thermal, by hardware",
    0x80: "power brake",
}
_SM, _MEMORY = 1, 2  # NVML_CLOCK_SM, NVML_CLOCK_MEM


def reasons(bits: int) -> list[str]:
    """The names of the reasons that are set."""
    return [words for bit, words in _REASONS.items() if bits & bit]


class Clocks:
    """One GPU, by its UUID; false where its clocks cannot be read."""

    def __init__(self, uuid: Any) -> None:
        self._device = ctypes.c_void_p()
        self._why = self._open(uuid)

    def __bool__(self) -> bool:
        return self._why is None

    def _open(self, uuid: Any) -> str | None:
        """Why clocks cannot be read, or None."""
        if uuid is None:
            return "this torch does not tell a device's UUID"
        try:
            self._library = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            return "libnvidia-ml.so.1 was not found"
        name = f"GPU-{uuid}".encode()
        calls = [
            ("nvmlInit_v2", ()),
            ("nvmlDeviceGetHandleByUUID", (name, ctypes.byref(self._device))),
        ]
        for function, arguments in calls:
            code = getattr(self._library, function)(*arguments)
            if code:
                return f"{function} failed with {code}"
        return None

    def words(self) -> str:
        """How clocks are read, or why they are not."""
        return (
            f"not read: {self._why}" if self._why else "read through NVML while the device worked"
        )

    def driver(self) -> str | None:
        """The driver's version, and the CUDA version that it supports."""
        if not self:
            return None
        text, cuda = ctypes.create_string_buffer(80), ctypes.c_int()
        failed = self._library.nvmlSystemGetDriverVersion(text, ctypes.c_uint(80))
        failed |= self._library.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(cuda))
        if failed:
            return None
        return f"{text.value.decode()}, CUDA {cuda.value // 1000}.{cuda.value % 1000 // 10}"

    def read(self) -> dict:
        """The device now."""
        watts = self._number("nvmlDeviceGetPowerUsage")
        bits = self._number("nvmlDeviceGetCurrentClocksThrottleReasons", kind=ctypes.c_ulonglong)
        return {
            "sm_mhz": self._number("nvmlDeviceGetClockInfo", _SM),
            "memory_mhz": self._number("nvmlDeviceGetClockInfo", _MEMORY),
            "celsius": self._number("nvmlDeviceGetTemperature", 0),
            "watts": None if watts is None else watts / 1e3,
            "throttled_by": reasons(bits or 0),
        }

    def _number(self, function: str, *arguments: int, kind: Any = ctypes.c_uint) -> int | None:
        number = kind()
        code = getattr(self._library, function)(self._device, *arguments, ctypes.byref(number))
        return None if code else number.value
