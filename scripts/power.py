"""Run a command, and then print the GPU's clock and power in each second of it.

    python scripts/power.py COMMAND …

"Held back" is what the driver says of the clock: the power limit keeps it down.
"""

import subprocess
import sys
import time
from importlib import import_module


def main() -> None:
    """Start it, look on, print."""
    pynvml = import_module("pynvml")
    pynvml.nvmlInit()
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    limit_w = pynvml.nvmlDeviceGetPowerManagementLimit(gpu) / 1e3
    top_mhz = pynvml.nvmlDeviceGetMaxClockInfo(gpu, pynvml.NVML_CLOCK_SM)
    begin, rows = time.monotonic(), []
    with subprocess.Popen(sys.argv[1:]) as process:
        while process.poll() is None:
            rows.append(
                (
                    time.monotonic() - begin,
                    pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM),
                    pynvml.nvmlDeviceGetPowerUsage(gpu) / 1e3,
                    bool(pynvml.nvmlDeviceGetCurrentClocksEventReasons(gpu) & pynvml.nvmlClocksEventReasonSwPowerCap),
                )
            )
            time.sleep(1)
    print(f"ended with {process.returncode}; power limit {limit_w:.0f} W, highest SM clock {top_mhz} MHz")
    for at_s, mhz, watts, capped in rows:
        print(f"{at_s:6.1f} s  {mhz:5} MHz  {watts:4.0f} W{'  held back' if capped else ''}")
    sys.exit(process.returncode)


if __name__ == "__main__":
    main()
