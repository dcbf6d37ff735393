"""Compile the kernels for GPUs that need not be there: `python -m tests.compile_kernels`, TRITON_INTERPRET not set.

What the interpreter cannot see is seen here: whether types agree, and whether a program's shared memory fits. A launch
is caught on the way, and its arguments give the types, as they would on a device.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lmeval_prune.kernels.decode_attention import triton as attention
from lmeval_prune.kernels.token_filter import triton as token_filter
from lmeval_prune.kernels.token_filter.state import Memory

ROOM = {80: 163 * 1024, 90: 227 * 1024}  # of shared memory a program, A100 and H100
TYPES = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.uint8: "*u8",
}


class Caught:
    """In a kernel's place: compiles what it is launched with. Its first configuration must fit; others may not."""

    def __init__(self, kernel: Any, every: bool) -> None:
        self.function = getattr(kernel, "fn", None) if hasattr(kernel, "configs") else kernel
        configs = getattr(kernel, "configs", None) or [triton.Config({})]
        self.configs = configs if every else configs[:1]

    def __getitem__(self, grid: Any) -> Any:
        return self.launch

    def launch(self, *args: Any, num_warps: int | None = None, **constants: Any) -> None:
        names = self.function.arg_names
        given = {**dict(zip(names, args, strict=False)), **constants}
        for config in self.configs:
            signature, fixed, attributes = {}, {}, {}
            for i, name in enumerate(names):
                value = {**given, **config.kwargs}[name]
                if isinstance(value, torch.Tensor):
                    signature[name] = TYPES[value.dtype]
                    attributes[(i,)] = [["tt.divisibility", 16]]
                elif self.function.params[i].is_constexpr or (
                    value == 1 and not self.function.params[i].do_not_specialize
                ):
                    signature[name], fixed[name] = "constexpr", value
                else:
                    signature[name] = "fp32" if isinstance(value, float) else "i32"
                    if value % 16 == 0 and isinstance(value, int) and not self.function.params[i].do_not_specialize:
                        attributes[(i,)] = [["tt.divisibility", 16]]
            options = {"num_warps": num_warps or config.num_warps, "num_stages": config.num_stages}
            for capability, room in ROOM.items():
                made = triton.compile(
                    ASTSource(self.function, signature, fixed, attributes),
                    target=GPUTarget("cuda", capability, 32),
                    options=options,
                )
                shared = made.metadata.shared
                print(f"{self.function.__name__} sm_{capability} {config.kwargs} {options} shared {shared}")
                assert shared <= room or config is not self.configs[0], f"{shared} bytes, more than {room}"


def main(every: bool) -> None:
    for module in (attention, token_filter):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            setattr(module, name, Caught(getattr(module, name), every))
    for dtype, width in ((torch.bfloat16, 128), (torch.float32, 80)):
        lengths, skipped, positions = (
            torch.zeros(3, dtype=torch.int32),
            torch.zeros(3).bool(),
            torch.zeros(3, 64, dtype=torch.long),
        )
        keys = torch.zeros(3, 2, 64, width, dtype=dtype)
        for splits, window, softcap in ((1, None, None), (4, 16, 30.0)):
            query = torch.zeros(3, 8, width, dtype=dtype)
            names = ("slots", "new_key", "new_value", "skipped", "keep", "masks", "window", "positions", "softcap")
            options = dict.fromkeys(names) | {"window": window, "positions": positions, "softcap": softcap}
            attention.decode(query, keys, keys, lengths, 0.1, **options, splits=splits)
        states, rule = torch.zeros(3, 6, dtype=torch.float64), torch.zeros(5, dtype=torch.float64)
        key, valid = torch.zeros(3, 2, 1, width, dtype=dtype), torch.zeros(3, 1).bool()
        anchor = torch.zeros(3, 2, width, dtype=torch.float32)
        store = (keys, keys, positions, lengths, torch.zeros(2, dtype=torch.long))
        for some, stored in ((states, store), (states[:1], None)):
            memory = Memory(skipped, anchor, anchor, some)
            token_filter.decide(key, key, valid, memory, rule, 0, False, stored, 7, False)


if __name__ == "__main__":
    main("--every" in sys.argv)
