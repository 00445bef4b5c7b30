"""The ceilings of this very device: measured once, in seconds, in a process of its own, and kept in the cache."""

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

from minisgl.bench.record import Ceilings
from minisgl.doctor.machine import cores
from minisgl.host import command
from minisgl.source.cache_folder import cache_folder, make_once, silent


def in_child(device: str, dtype: str) -> str:
    """The JSON of `bytes_per_s` and `flops_per_s` of a device, cpu or cuda, with a dtype.

    Another process measures, so that nothing stays of it here. ValueError with the reason where it fails.
    """
    measure = command("minisgl.profiling.ceilings", device, dtype, str(os.getpid()))
    done = subprocess.run(measure, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"the ceilings could not be measured: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
    return done.stdout


def ceilings(
    name: str, device: str, dtype: str, say: Callable[[str], None] | None, measure: Callable[[str, str], str] = in_child
) -> Ceilings:
    """Of the device that calls itself `name`, for matrices of `dtype`; raises ValueError where it cannot be known.

    A processor's are kept by the number of threads that torch takes. `say` is told before they are measured; where it
    is None they are not, for that takes memory and time of the device.
    """
    threads = os.environ.get("OMP_NUM_THREADS") or f"{cores():g}"
    model = f"{name} {threads} threads" if device == "cpu" else name
    file = cache_folder() / "ceilings" / f"{re.sub(r'[^A-Za-z0-9.]+', '-', model)}-{dtype}.json"

    def make(folder: Path) -> Path:
        if say is None:
            raise ValueError(f"what {name} reaches in {dtype} is not known on this machine: minisgl bench measures it")
        say(f"measuring what {name} reaches in {dtype} at best; it is kept …")
        made = folder / file.name
        made.write_text(measure(device, dtype), encoding="utf-8")
        return made

    found = json.loads(make_once(file, make, silent).read_text(encoding="utf-8"))
    return Ceilings(**found, dtype=dtype, source=f"measured on this device, kept in {file}: remove it to measure again")
