"""Divide a GPU in MIG mode into other slices, through NVML.

Source: NVML's reference on Multi Instance GPU. A slice is a GPU instance with one compute instance that has all of it,
as `nvidia-smi mig -cgi PROFILE -C` makes them. Only the driver records the slices: a change that is interrupted leaves
fewer slices, and repeating the change makes all of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple, NoReturn

from moorage.schemas.errors import Refused, refuse

#: more slices than any GPU has
SLICES_MAX: Final = 64
_PART: Final = re.compile(r"(?:([1-9][0-9]?)x)?([1-8]g\.[0-9]{1,4}gb(?:[+-][a-z.]{1,16})*)")


class Profile(NamedTuple):
    """A kind of GPU instance: its name such as `1g.10gb`, NVML's id, its compute slices, how many a GPU has at most."""

    name: str
    id: int
    slices: int
    most: int


def parse_layout(text: str) -> list[str]:
    """Return the profiles of a layout, one per slice: `3g.40gb,4x1g.10gb`; none for `off`.

    Raises Refused for any other text, or more than `SLICES_MAX` slices.
    """
    if text == "off":
        return []
    found: list[str] = []
    for word in text.split(","):
        part = _PART.fullmatch(word.strip())
        if part is None:
            raise _refused_layout(text)
        found += [part[2]] * int(part[1] or 1)
    if len(found) > SLICES_MAX:
        raise _refused_layout(text)
    return found


def _refused_layout(text: str) -> Refused:
    return refuse(
        "invalid-argument",
        "this is not a MIG layout",
        field="$.layout",
        found=text[:80],
        allowed="profiles with counts, as 3g.40gb,4x1g.10gb, or off",
    )


class MigGpu:
    """A GPU that may be divided into MIG slices; `api` is pynvml, initialized.

    Errors of NVML are raised as Refused.
    """

    def __init__(self, api: Any, raw: Any) -> None:
        self._api = api
        self._raw = raw
        with self._refusing("listing the GPU's profiles"):
            self.profiles = {each.name: each for each in self._profiles()}

    def check(self, layout: Sequence[str]) -> None:
        """Raise Refused for profiles that this GPU does not have, or more of a profile than it has room for."""
        for name, count in Counter(layout).items():
            profile = self.profiles.get(name)
            if profile is None or count > profile.most:
                raise refuse(
                    "failed-precondition",
                    "the GPU has no such slices" if self.profiles else "the GPU cannot be divided into MIG slices",
                    field="$.layout",
                    found=f"{count}x{name}",
                    allowed=", ".join(f"{each.most}x{each.name}" for each in self.profiles.values()) or "none",
                )

    def layout(self) -> list[str]:
        """Return the profiles of the GPU's slices now, sorted by name, without slices that have no compute instance."""
        with self._refusing("listing the slices"):
            return sorted(
                profile.name
                for profile in self.profiles.values()
                for instance in self._instances(profile)
                if self._compute_instances(instance)
            )

    def change(self, layout: Sequence[str]) -> bool:
        """Destroy the GPU's slices and make these; return False, and change nothing, if the GPU has them already.

        MIG mode is turned on before if it is off, and turned off for an empty layout. Raises Refused if `check` does,
        or if a step fails: then the former slices are made again, as far as NVML allows, but the mode is not set back.
        """
        self.check(layout)
        is_on = self._is_on()
        if is_on and layout and self.layout() == sorted(layout) and self._count() == len(layout):
            return False
        if not layout and not is_on:
            return False
        former = self.layout() if is_on else []
        try:
            if is_on:
                self._destroy_all()
            if not layout or not is_on:
                self._switch(1 if layout else 0)
            self._create_all(layout)
        except Refused:
            if former:
                self._restore(former)
            raise
        return True

    # ------------------------------------------------------------------------------------------------- inside

    def _profiles(self) -> list[Profile]:
        api = self._api
        found = []
        for number in range(api.NVML_GPU_INSTANCE_PROFILE_COUNT):
            try:
                info = api.nvmlDeviceGetGpuInstanceProfileInfo(self._raw, number, version=2)
            except (api.NVMLError_NotSupported, api.NVMLError_InvalidArgument, api.NVMLError_FunctionNotFound):
                continue  # not of this GPU, or of a driver that gives no names
            name = info.name if isinstance(info.name, str) else info.name.decode(errors="replace")
            found.append(
                Profile(name.removeprefix("MIG "), int(info.id), int(info.sliceCount), int(info.instanceCount))
            )
        return found

    def _is_on(self) -> bool:
        with self._refusing("reading the MIG mode"):
            try:
                current, _ = self._api.nvmlDeviceGetMigMode(self._raw)
            except self._api.NVMLError_NotSupported:
                return False
            return bool(current == self._api.NVML_DEVICE_MIG_ENABLE)

    def _switch(self, mode: int) -> None:
        with self._refusing("setting the MIG mode"):
            self._api.nvmlDeviceSetMigMode(self._raw, mode)
        if self._is_on() != bool(mode):
            raise refuse(
                "failed-precondition",
                "the GPU changes its MIG mode at its next reset",
                next="run nvidia-smi --gpu-reset -i GPU, then this command again",
            )

    def _count(self) -> int:
        with self._refusing("listing the slices"):
            return sum(len(self._instances(profile)) for profile in self.profiles.values())

    def _destroy_all(self) -> None:
        with self._refusing("destroying the slices"):
            for profile in self.profiles.values():
                for instance in self._instances(profile):
                    for compute in self._compute_instances(instance):
                        self._api.nvmlComputeInstanceDestroy(compute)
                    self._api.nvmlGpuInstanceDestroy(instance)

    def _create_all(self, layout: Sequence[str]) -> None:
        """Make the largest slices first: the driver chooses the places, and a large slice fits in few."""
        api = self._api
        with self._refusing(f"making {','.join(layout)}"):
            for name in sorted(layout, key=lambda name: (-self.profiles[name].slices, name)):
                instance = api.nvmlDeviceCreateGpuInstance(self._raw, self.profiles[name].id)
                api.nvmlGpuInstanceCreateComputeInstance(instance, self._whole(instance, self.profiles[name]))

    def _restore(self, former: Sequence[str]) -> None:
        """Make the former slices again and ignore errors; a slice in use could not be destroyed, and is still there."""
        with contextlib.suppress(Refused):
            self._destroy_all()
        with contextlib.suppress(Refused):
            self._create_all(list((Counter(former) - Counter(self.layout())).elements()))

    def _whole(self, instance: Any, profile: Profile) -> int:
        """Return the id of the compute instance profile with all slices of a GPU instance; 0 if NVML lists none."""
        for info in self._compute_profiles(instance):
            if info.sliceCount == profile.slices:
                return int(info.id)
        raise refuse("failed-precondition", f"NVML names no compute instance that has all of a slice {profile.name}")

    def _compute_profiles(self, instance: Any) -> list[Any]:
        api = self._api
        found = []
        for number in range(api.NVML_COMPUTE_INSTANCE_PROFILE_COUNT):
            try:
                found.append(
                    api.nvmlGpuInstanceGetComputeInstanceProfileInfo(
                        instance, number, api.NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED, version=2
                    )
                )
            except (api.NVMLError_NotSupported, api.NVMLError_InvalidArgument):
                continue
        return found

    def _instances(self, profile: Profile) -> list[Any]:
        found, count = (self._api.c_nvmlGpuInstance_t * max(1, profile.most))(), ctypes.c_uint(profile.most)
        self._api.nvmlDeviceGetGpuInstances(self._raw, profile.id, found, ctypes.byref(count))
        return [found[at] for at in range(count.value)]

    def _compute_instances(self, instance: Any) -> list[Any]:
        api = self._api
        found: list[Any] = []
        for info in self._compute_profiles(instance):
            room = (api.c_nvmlComputeInstance_t * max(1, info.instanceCount))()
            count = ctypes.c_uint(info.instanceCount)
            api.nvmlGpuInstanceGetComputeInstances(instance, info.id, room, ctypes.byref(count))
            found += [room[at] for at in range(count.value)]
        return found

    @contextlib.contextmanager
    def _refusing(self, doing: str) -> Iterator[None]:
        try:
            yield
        except self._api.NVMLError as error:
            self._refuse(error, doing)

    def _refuse(self, error: Any, doing: str) -> NoReturn:
        api = self._api
        helps = {
            api.NVML_ERROR_NO_PERMISSION: "run it as root: dividing a GPU needs that permission",
            api.NVML_ERROR_IN_USE: "a process uses the GPU: moorage fleet and nvidia-smi show which",
            getattr(api, "NVML_ERROR_INSUFFICIENT_RESOURCES", None): "smaller slices, or fewer: nvidia-smi mig -lgipp",
        }
        raise refuse(
            "failed-precondition", f"NVML refused {doing}: {error}", next=helps.get(error.value, "")
        ) from error
