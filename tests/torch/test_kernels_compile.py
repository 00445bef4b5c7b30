"""Every Triton kernel compiles for a GPU, with the arguments that its wrapper gives it: no GPU is needed for that.

The interpreter, which the other tests run kernels by where there is no GPU, takes what a compiler does not.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

COMPILE = '''
import json, sys
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from minisgl.kernels import activation, decode_attention, gumbel, inputs, norm, one_row, rotary

capability = int(sys.argv[1])


class Gpu:
    """Stands in for a driver: what Triton asks of it before it compiles."""

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", capability, 32)

    def get_active_torch_device(self):
        return torch.device("cpu")


triton.runtime.driver.set_active(Gpu())
launch, compiled = JITFunction.run, []

def compile_only(self, *arguments, grid, warmup, **options):
    made = launch(self, *arguments, grid=grid, warmup=True, **options)
    assert made.asm["cubin"]
    compiled.append([self.fn.__name__, made.asm["ptx"].count("griddepcontrol.wait")])

JITFunction.run = compile_only
pdl = capability >= 90
for module in (activation, decode_attention, norm, one_row, rotary):
    module.dependent_launch = lambda device: (pdl, {"launch_pdl": True} if pdl else {})


def some(*shape, dtype=torch.bfloat16):
    return torch.zeros(shape, dtype=dtype)


def long(*shape):
    return some(*shape, dtype=torch.int64)


def int32(*shape):
    return some(*shape, dtype=torch.int32)


for rows in (1, 64):
    activation.silu_and_mul_fused(some(rows, 2 * 96))
    norm.rms_norm_fused(some(rows, 96), some(96), 1e-6)
    norm.add_rms_norm_fused(some(rows, 96), some(rows, 96), some(96), 1e-6)
    rotation = rotary.Rotation(some(500, 64, dtype=torch.float32), long(rows))
    for norms in (None, (some(64), some(64), 1e-6)):
        rotary.rotate_and_store_fused(some(rows, 8, 64), rotation, norms, some(99, 2, 64), some(99, 2, 64), long(rows))
    heat = some(rows, dtype=torch.float32)
    for dtype in (torch.bfloat16, torch.float32):
        found = gumbel.find_fused(some(rows, 5000, dtype=dtype), int32(rows), heat, long(rows), long(rows), 0, 2)
    gumbel.choose_fused(found[None], int32(rows), heat, long(rows))
    inputs.decode_inputs_fused(int32(rows), int32(rows), int32(rows), long(rows), int32(rows, 9), 16, int32(rows, 9))
shapes = ((1, 2, 1, 64, 16), (1, 4, 2, 128, 64), (64, 8, 2, 128, 64), (64, 4, 8, 128, 128))
for rows, kv_heads, group, size, page_size in shapes:
    attend = decode_attention.DecodeAttention(kv_heads * group, kv_heads, size, torch.device("cpu"))
    attend.plan(int32(rows), page_size)
    keys, values = (some(9, page_size, kv_heads, size) for _ in range(2))
    q = some(rows, kv_heads * group, size)
    attend(q, keys, values, int32(rows, 4), int32(rows), 0.1, torch.empty_like(q))
norm_of = (some(96), 1e-6)
for options in ((None, None, None, False), (some(64), some(1, 96), norm_of, False), (None, None, norm_of, True)):
    one_row.project_fused(some(1, 96), some(64, 96), *options)
print(json.dumps(compiled))
'''


def kernels() -> set[str]:
    """The names of all that are launched."""
    sources = [file.read_text() for file in (ROOT / "minisgl/kernels").glob("*.py")]
    return {word for source in sources for word in source.replace("(", " ").split() if word.endswith("_kernel")}


@pytest.mark.parametrize("capability", [80, 90])
def test_every_kernel_compiles(capability, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", COMPILE, str(capability)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    compiled = json.loads(done.stdout)
    assert {name for name, _ in compiled} == kernels()
    early = any(waits for _, waits in compiled)
    assert early == (capability >= 90), "only Hopper and later start a kernel before the one ahead has ended"
