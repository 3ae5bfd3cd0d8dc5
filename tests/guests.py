"""A guest for tests with virtual machines: Debian's cloud kernel, and an initramfs of busybox.

The kernel is the one of Debian's package, installed, or unpacked into the folder that VM_KERNEL names.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

#: that the cloud kernel has as modules, in the order in which they are loaded
MODULES: Final = (
    "virtio/virtio_ring", "virtio/virtio", "virtio/virtio_pci_modern_dev", "virtio/virtio_pci_legacy_dev",
    "virtio/virtio_pci", "char/virtio_console",
)  # fmt: skip


def kernel() -> Path | None:
    """Return the kernel that the guests boot; None where this machine has none."""
    found = sorted(Path(os.environ.get("VM_KERNEL", "/")).glob("boot/vmlinuz-*-cloud-amd64"))
    return found[-1] if found else None


@functools.cache
def why_no_vm() -> str:
    """Return "" where a test can have VMs, else one line that says why not."""
    missing = [name for name in ("qemu-system-x86_64", "busybox") if shutil.which(name) is None]
    if missing:
        return f"no VMs: no {missing[0]}"
    return "" if kernel() is not None else "no VMs: no cloud kernel of Debian's in /boot or VM_KERNEL"


def make_initramfs(folder: Path, boot: str | None = None, modules: Sequence[str] = MODULES) -> Path:
    """Return an initramfs of busybox and the kernel's modules, made in a folder of the test's own.

    `boot` is the script that runs before the job comes, in place of the one that loads the modules.
    """
    image = folder / "guest.img"
    if image.exists():
        return image
    found = kernel()
    assert found is not None
    release = found.name.removeprefix("vmlinuz-")
    drivers = found.parents[1] / "lib/modules" / release / "kernel/drivers"
    root = folder / "guest"
    (root / "etc/moorage").mkdir(parents=True)
    (root / "bin").mkdir()
    shutil.copy(shutil.which("busybox") or "", root / "bin/busybox")
    for name in subprocess.run(["busybox", "--list"], capture_output=True, text=True, check=True).stdout.split():
        if name != "busybox":
            (root / "bin" / name).symlink_to("busybox")
    for module in modules:
        shutil.copy(drivers / f"{module}.ko", root / "etc/moorage")
    loads = "".join(f"insmod /etc/moorage/{Path(module).name}.ko\n" for module in modules)
    (root / "etc/moorage/boot").write_text(loads if boot is None else boot)
    names = "\n".join(str(path.relative_to(root)) for path in sorted(root.rglob("*")))
    with image.open("wb") as into:
        pack = ["busybox", "cpio", "-o", "-H", "newc"]
        subprocess.run(pack, input=names.encode(), stdout=into, stderr=subprocess.DEVNULL, cwd=root, check=True)
    return image


def make_disk(folder: Path) -> Path:
    """Return a disk image with a file system of busybox and a file `on-disk`."""
    root, image = folder / "disk", folder / "disk.raw"
    (root / "bin").mkdir(parents=True)
    shutil.copy(shutil.which("busybox") or "", root / "bin/busybox")
    for name in ("sh", "cat", "env", "sync", "test"):
        (root / "bin" / name).symlink_to("busybox")
    (root / "on-disk").write_text("of the image\n")
    make = [shutil.which("mke2fs") or "/sbin/mke2fs", "-q", "-t", "ext4", "-d", str(root), str(image), "16M"]
    subprocess.run(make, check=True, capture_output=True)
    return image
