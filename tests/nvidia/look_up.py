"""Run under the limiter, with a driver's libcuda and no GPU: say in which library each function that is looked up is.

A line each: how it was looked up (dlsym, or version and flags of cuGetProcAddress), its name, the library's file name.
"""

from __future__ import annotations

import ctypes
from typing import Final

#: as cuGetProcAddress knows them
ASKED: Final = (
    "cuMemAlloc", "cuMemAllocManaged", "cuMemAllocPitch", "cuMemAllocAsync", "cuMemAllocFromPoolAsync", "cuMemFree",
    "cuMemFreeAsync", "cuMemCreate", "cuMemRelease", "cuMemMap", "cuMemUnmap", "cuMemRetainAllocationHandle",
    "cuMemImportFromShareableHandle", "cuArrayCreate", "cuArray3DCreate", "cuArrayDestroy", "cuMipmappedArrayCreate",
    "cuMipmappedArrayDestroy", "cuCtxDestroy", "cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease",
    "cuDevicePrimaryCtxReset", "cuMemGetInfo", "cuDeviceTotalMem", "cuLaunchKernel", "cuLaunchKernelEx",
    "cuLaunchCooperativeKernel", "cuLaunchCooperativeKernelMultiDevice", "cuLaunch", "cuLaunchGrid",
    "cuLaunchGridAsync", "cuGraphInstantiate", "cuGraphInstantiateWithFlags", "cuGraphInstantiateWithParams",
    "cuGraphExecDestroy", "cuGraphLaunch", "cuGetProcAddress", "cuInit",
)  # fmt: skip
VARIANTS: Final = ("", "_v2", "_ptsz")
NO_DEVICE: Final = 100


class Info(ctypes.Structure):
    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("at", ctypes.c_void_p),
    )


def library_of(address: int | None) -> str:
    """Return the file name of the library that has this address; "" for none."""
    info = Info()
    if not address or not ctypes.CDLL(None).dladdr(ctypes.c_void_p(address), ctypes.byref(info)):
        return ""
    return str(info.file.decode()).rpartition("/")[2].partition(".")[0]


def main() -> None:
    cuda = ctypes.CDLL("libcuda.so.1")
    code = cuda.cuInit(0)
    print("cuInit", code)
    for name in ASKED:
        for variant in VARIANTS:
            try:
                found = ctypes.cast(getattr(cuda, name + variant), ctypes.c_void_p).value
            except AttributeError:
                continue
            print("dlsym", name + variant, library_of(found))
        for version in (3010, 11030, 12000):
            for flags in (0, 2):
                pointer, status = ctypes.c_void_p(), ctypes.c_int()
                asked = (name.encode(), ctypes.byref(pointer), version, ctypes.c_uint64(flags), ctypes.byref(status))
                if cuda.cuGetProcAddress_v2(*asked) == 0 and pointer.value:
                    print(f"{version}/{flags}", name, library_of(pointer.value))
    size = ctypes.c_uint64()
    print("cuMemAlloc", cuda.cuMemAlloc_v2(ctypes.byref(size), ctypes.c_size_t(1)))


if __name__ == "__main__":
    main()
