"""What a kernel or an operation is for, told by its name and by the part of the step that asked for it."""

import re

GROUPS = {
    "GEMM": "larger batches, another dtype, other kernels for the products with weights",
    "attention": "another --attention-backend or --page-size",
    "MoE": "fewer, larger kernels for routing and experts",
    "communication": "send less between devices, or while they compute",
    "sampling": "sample in fewer passes over the scores",
    "norm, rope, activation": "fuse norms, rope and activations with what is around them",
    "copies": "copy less",
    "other": "see what the other kernels are for",
}
"""In the order of tables, and what could make each shorter."""

NAMES = (
    ("communication", "nccl allreduce all_reduce allgather all_gather c10d::"),
    ("MoE", "moe expert grouped_gemm _grouped_mm"),
    ("attention", "decode_attention share_kernel kernel_mha batchdecode batchprefill prefillwithkvcache"),
    ("attention", "mergestate variablelengthmerge fmha scaled_dot_product flash::flash flash_attn flash_fwd"),
    ("norm, rope, activation", "norm_kernel rms_norm layer_norm rotate_and_store rotary silu"),
    ("sampling", "candidates_kernel winners_kernel topk sampling multinomial argmax sort"),
    ("copies", "memcpy memset aten::copy_ aten::_to_copy aten::clone aten::fill_ aten::zero_"),
    ("GEMM", "gemm gemv nvjet cutlass splitkreduce project_kernel _linear aten::linear"),
    ("GEMM", "aten::mm aten::addmm aten::bmm aten::matmul int4pack_mm"),
)
"""What the names of a group have, in lower case. The first row that fits counts."""


def group_of(name: str, part: str) -> str:
    """The group of what has this name and was asked for in that part of the step."""
    lower = name.lower()
    is_torch = "at::" in lower or lower.startswith("aten::")
    if is_torch and part in ("attention", "plan", "sample"):
        return "sampling" if part == "sample" else "attention"  # whatever torch does there is for that
    found = next((group for group, words in NAMES if any(word in lower for word in words.split())), "other")
    if found == "other" and is_torch and part == "forward" and "embedding" not in lower:
        return "norm, rope, activation"  # nothing else is left of the layers
    return found


def short(name: str) -> str:
    """A kernel's name without its return type and parameters, and no longer than a table bears."""
    name = re.sub(r"\([^()]*\)$", "", name.removeprefix("void ").replace("(anonymous namespace)::", "")).strip()
    return name if len(name) <= 90 else f"{name[:89]}…"
