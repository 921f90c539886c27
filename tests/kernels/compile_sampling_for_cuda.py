"""Compile the sampling kernels, every branch of them, for an H100-class GPU; needs no GPU.

Run as a script, without ``TRITON_INTERPRET``: launches are replaced by compilation for the types of
their arguments. What the interpreter accepts and the compiler does not (branch types, constexpr
arithmetic) fails here.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

TARGET_GPU = GPUTarget("cuda", 90, 32)
POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.int8: "*i8",
}
compiled: set[str] = set()


def compile_launch(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    names = ("num_warps", "num_stages", "launch_pdl", "maxnreg")
    options = {name: kwargs.pop(name) for name in names if name in kwargs}
    bound = self.signature.bind(*args, **kwargs).arguments
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    for parameter in self.params:
        value = bound[parameter.name]
        if isinstance(value, torch.Tensor):
            signature[parameter.name] = POINTERS[value.dtype]
        elif parameter.is_constexpr or value is None or value == 1:
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
        else:
            signature[parameter.name] = "i32"
    key = f"{self.__name__} {signature} {constants}"
    if key not in compiled:
        source = ASTSource(self, signature, constexprs=constants)
        assert triton.compile(source, target=TARGET_GPU, options=options).asm["cubin"]
        compiled.add(key)


def main() -> None:
    JITFunction.run = compile_launch
    from specgen.kernels import gumbel, logits, rejection, rng

    for module in (gumbel, rejection):  # as on that GPU, though the tensors are on the CPU
        module.overlap_options = lambda _: {"OVERLAP": True, "launch_pdl": True}
    ints, seeds, floats = torch.zeros(4, dtype=torch.int32), torch.zeros(4).long(), torch.zeros(4)
    vocab_size, k = 3000, 2
    ids = torch.zeros(vocab_size, dtype=torch.int32)
    positions = torch.zeros(4, 1, dtype=torch.int32)

    rng.philox(seeds, ints, ints, ints, ints)
    rng.gumbel_noise(ints)
    rng.token_gumbel(seeds, positions, ints, 0, ints, ints)
    rng.accept_uniform(seeds, ints, ints, ints)
    rows = torch.zeros(4, k + 1, vocab_size, dtype=torch.bfloat16)
    one, drafts = rows[:, :1], torch.zeros(4, k, dtype=torch.int32)
    logits.filter_thresholds(rows, floats, ints, floats)
    gumbel.greedy_sample(one, positions, ids)
    for kept, target_ids in ((None, ids), (torch.zeros(4, 1), None)):
        gumbel.gumbel_sample(one, floats, seeds, positions, ints, 0, 1, kept, target_ids)
    row_arguments = (floats, seeds, ints, ints)
    rejection.rejection_sample(one, drafts[:, :0], ints, None, ints, None, *row_arguments, None)
    kept = torch.zeros(4, k + 1)
    rejection.rejection_sample(rows, drafts, ints, None, ints, None, *row_arguments, kept)
    rejection.rejection_sample(rows, drafts, ints, rows, ints, ids, *row_arguments, None)
    for q in (None, rows):  # the synthetic rule
        rejection.rejection_sample(rows, drafts, ints, q, ints, ids, *row_arguments, None, floats)
    print(f"compiled {len(compiled)} variants")


if __name__ == "__main__":
    main()
