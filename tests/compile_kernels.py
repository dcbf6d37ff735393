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

from lmeval_prune.kernels import decode_attention_triton as attention
from lmeval_prune.kernels import token_filter_triton as token_filter
from lmeval_prune.kernels.token_filter_memory import Memory

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
    """In a kernel's place: compiles what it is launched with."""

    def __init__(self, kernel: Any) -> None:
        self.function = kernel
        self.must_fit = True  # into a program's shared memory; a configuration that does not is not chosen

    def __getitem__(self, grid: Any) -> Any:
        return self.launch

    def launch(self, *args: Any, num_warps: int = 4, num_stages: int = 3, **named: Any) -> None:
        names, signature, fixed, attributes = self.function.arg_names, {}, {}, {}
        arguments = {**dict(zip(names, args, strict=False)), **named}
        for i, name in enumerate(names):
            value, parameter = arguments[name], self.function.params[i]
            if isinstance(value, torch.Tensor):
                signature[name] = TYPES[value.dtype]
                attributes[(i,)] = [["tt.divisibility", 16]]
            elif parameter.is_constexpr or value is None or (value == 1 and not parameter.do_not_specialize):
                signature[name], fixed[name] = "constexpr", value
            else:
                signature[name] = "fp32" if isinstance(value, float) else "i32"
                if value % 16 == 0 and isinstance(value, int) and not parameter.do_not_specialize:
                    attributes[(i,)] = [["tt.divisibility", 16]]
        options = {"num_warps": num_warps, "num_stages": num_stages}
        chosen = {name: value for name, value in named.items() if name in ("BLOCK_N", "DOT", "STAGES")}
        for capability, room in ROOM.items():
            compiled = triton.compile(
                ASTSource(self.function, signature, fixed, attributes),
                target=GPUTarget("cuda", capability, 32),
                options=options,
            )
            shared = compiled.metadata.shared
            print(f"{self.function.__name__} sm_{capability} {chosen} {options} shared {shared}")
            assert shared <= room or not self.must_fit, f"{shared} bytes, more than {room}"


def compile_attention(dtype: torch.dtype, width: int, every: bool) -> None:
    numbers, positions = torch.zeros(3, dtype=torch.int32), torch.zeros(3, 64, dtype=torch.long)
    keys = torch.zeros(3, 2, 64, width, dtype=dtype)
    cases: tuple[dict[str, Any], ...] = (
        {},
        {"skipped": numbers.bool(), "window": 16, "positions": positions},
        {"skipped": numbers.bool(), "window": 16, "positions": positions, "softcap": 30.0, "splits": 4},
    )
    query = torch.zeros(3, 8, width, dtype=dtype)
    for configs in (attention.DOT_CONFIGS, attention.SUM_CONFIGS):
        launches = [(configs[0], case) for case in cases] + [(config, cases[-1]) for config in configs[1:] if every]
        for config, case in launches:
            attention._decode_kernel.must_fit = config is attention.DOT_CONFIGS[0]
            attention.decode(query, keys, keys, numbers, 0.1, **{"splits": 1, "config": config, **case})


def compile_token_filter(dtype: torch.dtype, width: int) -> None:
    lengths, flags, positions = (
        torch.zeros(3, dtype=torch.int32),
        torch.zeros(3).bool(),
        torch.zeros(3, 64, dtype=torch.long),
    )
    keys = torch.zeros(3, 2, 64, width, dtype=dtype)
    states, rule = torch.zeros(3, 6, dtype=torch.float64), torch.zeros(5, dtype=torch.float64)
    key, valid = torch.zeros(3, 2, 1, width, dtype=dtype), torch.zeros(3, 1).bool()
    anchor = torch.zeros(3, 2, width, dtype=torch.float32)
    store = (keys, keys, positions, lengths, torch.zeros(2, dtype=torch.long))
    for some, stored in ((states, store), (states[:1], None)):
        memory = Memory(flags, anchor, anchor, some)
        token_filter.decide(key, key, valid, memory, rule, 0, False, stored, 7, False)


def main(every: bool) -> None:
    for module in (attention, token_filter):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            setattr(module, name, Caught(getattr(module, name)))
    for dtype, width in ((torch.bfloat16, 128), (torch.float32, 80)):
        compile_attention(dtype, width, every)
        compile_token_filter(dtype, width)


if __name__ == "__main__":
    main("--every" in sys.argv)
