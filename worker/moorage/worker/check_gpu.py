"""Check the one GPU that this process sees: `python -m moorage.worker.check_gpu`, for the worker's `check_command`.

It makes a context, copies numbers to the GPU and back, and with PyTorch multiplies two matrices; all that it reads is
compared. Without a PyTorch for GPUs it uses the CUDA driver's library. The last line says what was found. The exit
code is 0 for a well GPU, and for a simulated one, which is not checked.
"""

from __future__ import annotations

import array
import ctypes
import os
import sys
from typing import Any, Final

from moorage.schemas.names import SIMULATED_UUID

#: 64 MiB of numbers, each another one
_WORDS: Final = 16 * 1024 * 1024
#: side of the matrices; their entries are so small that each sum is exact
_SIDE: Final = 2048


class CheckFailed(Exception):
    """What is wrong with the GPU, in one line."""


def _torch() -> Any:
    """Return PyTorch if it is there and was built for GPUs, else None."""
    try:
        import torch  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        return None
    return torch if torch.version.cuda or torch.version.hip else None


def _by_torch(torch: Any) -> str:
    if not torch.cuda.is_available():
        raise CheckFailed("PyTorch finds no GPU: no driver, or no context can be made")
    try:
        numbers = torch.arange(_WORDS, dtype=torch.int32)
        if not torch.equal(numbers.cuda().clone().cpu(), numbers):
            raise CheckFailed("numbers that were copied to the GPU and back are others")
        left, right = (torch.randint(0, 8, (_SIDE, _SIDE), dtype=torch.float32) for _ in range(2))
        if not torch.equal((left.cuda() @ right.cuda()).cpu(), left @ right):
            raise CheckFailed("a product of matrices is another than the processor's")
    except RuntimeError as error:
        raise CheckFailed(str(error).splitlines()[0] if str(error) else "a CUDA error") from None
    return f"{torch.cuda.get_device_name(0)} copied and multiplied as it should, by PyTorch {torch.__version__}"


def _by_driver() -> str:
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise CheckFailed("neither PyTorch for GPUs nor the CUDA driver's library is here") from None

    def call(name: str, *arguments: Any) -> None:
        if code := getattr(cuda, name)(*arguments):
            text = ctypes.c_char_p()
            cuda.cuGetErrorName(code, ctypes.byref(text))
            raise CheckFailed(f"{name}: {(text.value or b'').decode() or 'CUDA error'} ({code})")

    device, context, name = ctypes.c_int(), ctypes.c_void_p(), ctypes.create_string_buffer(100)
    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(device), 0)
    call("cuDeviceGetName", name, len(name), device)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxSetCurrent", context)
    sent, size = array.array("I", range(_WORDS)), ctypes.c_size_t(4 * _WORDS)
    here = (ctypes.c_uint32 * _WORDS).from_buffer(sent)
    back = (ctypes.c_uint32 * _WORDS)()
    first, second = ctypes.c_uint64(), ctypes.c_uint64()
    for place in (first, second):
        call("cuMemAlloc_v2", ctypes.byref(place), size)
    call("cuMemcpyHtoD_v2", first, here, size)
    call("cuMemcpyDtoD_v2", second, first, size)
    call("cuMemcpyDtoH_v2", back, second, size)
    if bytes(back) != sent.tobytes():
        raise CheckFailed("numbers that were copied to the GPU and back are others")
    call("cuMemsetD32_v2", second, ctypes.c_uint32(0xA5A5A5A5), ctypes.c_size_t(_WORDS))
    call("cuMemcpyDtoH_v2", back, second, size)
    if bytes(back) != b"\xa5" * (4 * _WORDS):
        raise CheckFailed("memory that the GPU has set reads otherwise")
    return f"{name.value.decode(errors='replace')} copied and set its memory as it should, by the CUDA driver"


def main() -> int:
    if os.environ.get("MOORAGE_GPU_UUIDS", "").startswith(SIMULATED_UUID):
        print("a simulated GPU: nothing was checked")
        return 0
    torch = _torch()
    try:
        print(_by_driver() if torch is None else _by_torch(torch))
    except CheckFailed as why:
        print(why)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
