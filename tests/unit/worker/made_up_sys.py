"""A made-up machine below a folder: /sys, /proc and /dev with DRM devices, as the kernel's documents describe them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

MIB = 1024 * 1024


class MadeUpMachine:
    """Writes the files; every method returns the folder or path that a test may change afterwards."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._cards = 0
        for folder in ("sys/class/drm", "dev/dri", "proc"):
            (root / folder).mkdir(parents=True)

    def write(self, path: Path | str, text: object) -> Path:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
        return file

    def pci(
        self, minor: int, address: str, vendor: int, device: int, driver: str, *, node: bool = True, **files: object
    ) -> Path:
        """A PCI device with a render node. `files` go into its folder; `__` in a name stands for `/`."""
        folder = self.root / "sys/devices/pci0000:00" / address
        self._device(minor, folder, f"DRIVER={driver}\nPCI_SLOT_NAME={address}", node)
        self.write(folder / "vendor", f"0x{vendor:04x}")
        self.write(folder / "device", f"0x{device:04x}")
        for name, value in files.items():
            self.write(folder / name.replace("__", "/"), value)
        return folder

    def platform(self, minor: int, name: str, driver: str, compatible: str = "") -> Path:
        """A device that is on no PCI bus."""
        folder = self.root / "sys/devices/platform" / name
        self._device(
            minor, folder, f"DRIVER={driver}" + (f"\nOF_COMPATIBLE_0={compatible}" if compatible else ""), True
        )
        return folder

    def _device(self, minor: int, folder: Path, uevent: str, node: bool) -> None:
        card = folder / f"drm/card{self._cards}"
        render = folder / f"drm/renderD{minor}"
        self._cards += 1
        card.mkdir(parents=True)
        render.mkdir()
        self.write(folder / "uevent", uevent)
        (render / "device").symlink_to("../..")
        link = self.root / f"sys/class/drm/renderD{minor}"
        link.symlink_to(Path("../..") / render.relative_to(self.root / "sys"))
        if node:
            self.write(f"dev/dri/renderD{minor}", "")

    def amd(self, minor: int, address: str = "0000:03:00.0", *, device: int = 0x74A1, **files: object) -> Path:
        """An Instinct with everything on it, less what `files` sets to another value; None leaves a file out."""
        every: dict[str, Any] = {
            "product_name": "AMD Instinct MI300X OAM",
            "unique_id": f"a1b2c3d4e5f6{minor:04x}",
            "mem_info_vram_total": 196_592 * MIB,
            "mem_info_vram_used": 290 * MIB,
            "gpu_busy_percent": 0,
            "numa_node": 1,
            "hwmon__hwmon3__temp1_input": 45_000,
            "hwmon__hwmon3__temp1_label": "edge",
            "hwmon__hwmon3__temp2_input": 61_000,
            "hwmon__hwmon3__temp2_label": "junction",
            "hwmon__hwmon3__power1_input": 141_900_000,
            "hwmon__hwmon3__power1_cap": 750_000_000,
            "ras__umc_err_count": "ue: 0\nce: 4",
            "ras__gfx_err_count": "ue: 0\nce: 0",
            **files,
        }
        kept = {name: value for name, value in every.items() if value is not None}
        return self.pci(minor, address, 0x1002, device, "amdgpu", **kept)

    def kfd(self, *minors: int, gfx: int = 90402) -> None:
        """ROCm's topology: a processor, then these GPUs in this order."""
        folder = Path("sys/class/kfd/kfd/topology/nodes")
        self.write(folder / "0/properties", "cpu_cores_count 64\nsimd_count 0\ndrm_render_minor 0")
        for number, minor in enumerate(minors, 1):
            text = f"cpu_cores_count 0\nsimd_count 1216\ngfx_target_version {gfx}\ndrm_render_minor {minor}"
            self.write(folder / str(number) / "properties", text)

    def client(
        self,
        pid: int,
        minor: int,
        *,
        address: str = "",
        number: int = 7,
        comm: str = "python",
        descriptor: int = 5,
        **keys: object,
    ) -> Path:
        """A process with an open descriptor; `keys` are those of fdinfo without `drm_`, with _ for -."""
        process = self.root / f"proc/{pid}"
        (process / "fd").mkdir(parents=True, exist_ok=True)
        (process / f"fd/{descriptor}").symlink_to(f"/dev/dri/renderD{minor}")
        lines = ["pos:\t0", "flags:\t02100002", "drm-driver:\tmade-up"]
        lines += [f"drm-pdev:\t{address}"] if address else []
        lines += [f"drm-client-id:\t{number}"] if number else []
        lines += [f"drm-{name.replace('_', '-')}:\t{value}" for name, value in keys.items()]
        self.write(process / "comm", comm)
        return self.write(process / f"fdinfo/{descriptor}", "\n".join(lines))
