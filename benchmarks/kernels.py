"""Registers and spills of the Triton kernels, compiled here for cards that need not be here.

    python benchmarks/kernels.py

A kernel that spills keeps in memory what should stay in registers: its sizes are too large. Exits with 1 if one does.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from elfatt_sd.attention import triton as kernels
from elfatt_sd.runtime import norm

CARDS = (80, 89, 90, 120)
HEADS = (40, 64, 80, 128, 160)
GROUPS = (10, 80)  # channels of a group of a GroupNorm
_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
_USED = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


def variants() -> Iterator[tuple[str, Any, dict[str, str], dict[str, Any], dict[str, int]]]:
    """Yield the kernels: their names, themselves, types of their arguments, constants and options."""
    flags = {"ORDERED": True, "TEXT": False, "BIAS": False}
    kinds = {"sampled": {}, "sampled with text": {"TEXT": True, "BIAS": True}}
    for size in HEADS:
        blocks, options = kernels.sizes(size)
        for name, own in kinds.items():
            types = sampled_types()
            yield f"{name}, head size {size}", kernels.attend_kernel, types, {**flags, **own, **blocks}, options
    sums = dict.fromkeys(("means", "squares", "mean_of", "scale_of"), "*fp32")
    types = dict.fromkeys(("x", "out", "weight", "bias"), "*fp16") | sums | {"eps": "fp32"}
    yield "norm, runs", norm.run_kernel, types, dict(norm.SIZES), norm.OPTIONS
    yield "norm with SiLU", norm.norm_kernel, types, {**norm.SIZES, "SILU": True}, norm.OPTIONS
    for size in GROUPS:
        yield f"norm, groups of {size}", norm.group_kernel, types, norm.joined(size), norm.OPTIONS


def sampled_types() -> dict[str, str]:
    """Return the types of the pointers and of what is not a whole number."""
    halves = dict.fromkeys(("q", "k", "v", "out", "text_k", "text_v", "text_bias"), "*fp16")
    numbers = dict.fromkeys(("scale", "log_weight", "log_text"), "fp32")
    return halves | numbers | {"order": "*i64"}


def compile_for(
    card: int, kernel: Any, types: dict[str, str], constants: dict[str, Any], options: dict[str, int]
) -> Any:
    """Compile a kernel for a card, with strides that are multiples of 16, as they are."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    aligned = [
        name for name in names if signature[name].startswith("*") or name.endswith(("_token", "_batch", "_head"))
    ]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    fixed = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, fixed, attributes)
    return triton.compile(source, target=GPUTarget("cuda", card, 32), options=options)


def used(compiled: Any) -> tuple[int, int, int]:
    """Return registers, bytes of spills, and bytes of shared memory."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        said = subprocess.run([_CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True)
    found = _USED.search(said.stdout + said.stderr)
    if found is None:
        raise SystemExit(f"cuobjdump says nothing of registers: {said.stdout}{said.stderr}")
    registers, stack, _, local = map(int, found.groups())
    return registers, stack + local, int(compiled.metadata.shared)


def main() -> int:
    """Print a row for each kernel and card."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--card", type=int, action="append", help=f"such as 90; all of {CARDS} by default")
    parser.add_argument("--only", default="", help="kernels whose name has this in it")
    options = parser.parse_args()
    print("| kernel | card | registers | spilled bytes | shared KiB |\n|---|---|---|---|---|")
    spilled = 0
    for name, kernel, types, constants, how in variants():
        for card in options.card or CARDS:
            if options.only in name:
                registers, spills, shared = used(compile_for(card, kernel, types, constants, how))
                spilled += spills
                print(f"| {name} | sm_{card} | {registers} | {spills} | {shared / 1024:.0f} |", flush=True)
    return int(spilled > 0)


if __name__ == "__main__":
    raise SystemExit(main())
