"""CDI specs of every form, and what three engines read of them: podman 4.3.1, docker 26.1.5 and podman 5.4.2.

`tests/system/worker/drivers/test_cdi_engines.py` asks these engines, and `tests/unit/worker/devices/test_cdi_specs.py`
asks moorage. Each case has a vendor of its own, so all of them are in the two folders at once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

ENGINES: Final = ("podman 4.3", "docker 26", "podman 5.4")
#: the folders of specs, the one with precedence last
ETC: Final = "etc"
RUN: Final = "run"


class Case(NamedTuple):
    """Spec files, and the devices that an engine finds in them.

    `files` are texts by folder and name; VENDOR and DEV stand for what is the case's own, and a file without a folder
    is in ETC. `found` has the file in /dev that each device gives a container, "" for none, by the device's name.
    `asked` are more names to ask for. `differs` has what some engines, or moorage, find instead.
    """

    what: str
    files: Mapping[str, str | bytes]
    found: Mapping[str, str] = {}
    asked: Sequence[str] = ("0",)
    differs: Mapping[str, Mapping[str, str]] = {}
    kind: str = "gpu"


def node(name: str = "0", **more: Any) -> dict[str, Any]:
    return {"deviceNodes": [{"path": f"DEV{name}", "hostPath": "/dev/null", **more}]}


def device(name: str = "0", edits: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {"name": name, "containerEdits": node(name) if edits is None else edits, **more}


def spec(*devices: dict[str, Any], version: str | None = "0.5.0", **more: Any) -> str:
    head = {} if version is None else {"cdiVersion": version}
    return json.dumps(head | {"kind": "VENDOR/gpu", "devices": list(devices or [device()])} | more)


def yaml_of(devices: str = "", head: str = "cdiVersion: 0.5.0\nkind: VENDOR/gpu\n") -> str:
    return head + "devices:\n" + (devices or yaml_device())


def yaml_device(name: str = '"0"', at: str = "0") -> str:
    return f"- name: {name}\n  containerEdits: {{deviceNodes: [{{path: DEV{at}, hostPath: /dev/null}}]}}\n"


def with_edits(**edits: Any) -> str:
    """Return a spec of two devices; these edits are those of the second one."""
    return spec(device("0"), device("1", edits))


ZERO: Final = {"0": "DEV0"}
BOTH: Final = {"0": "DEV0", "1": "DEV1"}
FOUND: Final[Mapping[str, Mapping[str, str]]] = {"moorage": ZERO}
NOT_43: Final[Mapping[str, Mapping[str, str]]] = {"podman 4.3": {}}
PAIR: Final = ("0", "1")
LAUGHS: Final = "".join(f"a{at}: &a{at} [{','.join([f'*a{at - 1}'] * 9) if at else 1}]\n" for at in range(9))

CASES: Final = (
    # which files are read
    Case("JSON", {"a.json": spec(device("0"), device("1"))}, BOTH),
    Case("YAML", {"a.yaml": yaml_of()}, ZERO),
    Case("a file .yml", {"a.yml": yaml_of()}),
    Case("a file .YAML", {"a.YAML": yaml_of()}),
    Case("a hidden file", {".hidden.json": spec()}, ZERO),
    Case("a file that is called .yaml", {".yaml": yaml_of()}, ZERO),
    Case("an empty file", {"a.json": ""}),
    Case("YAML in a file .json", {"a.json": yaml_of()}, ZERO),
    Case("JSON in a file .yaml", {"a.yaml": spec()}, ZERO),
    # a device in more than one file
    Case("a name twice in one folder", {"a.json": spec(device("0"), device("1")), "b.json": spec(device("0"))},
         {"1": "DEV1"}),
    Case("a name once in each folder", {"a.json": spec(), "run/a.json": spec(device("0", node("run")))},
         {"0": "DEVrun"}),
    Case("a name twice in the first folder and once in the second",
         {"a.json": spec(), "b.json": spec(), "run/a.json": spec()}),
    Case("a name once in the first folder and twice in the second",
         {"a.json": spec(), "run/a.json": spec(), "run/b.json": spec()}),
    Case("a name twice in one file", {"a.json": spec(device("0"), device("1"), device("0"))}, asked=PAIR),
    # faults by which every engine and moorage find no device of the file
    Case("a device without a name", {"a.json": spec(device("0"), {"containerEdits": node("1")})}),
    Case("a device without edits", {"a.json": spec(device("0"), {"name": "1"})}, asked=PAIR),
    Case("a node without a path", {"a.json": with_edits(deviceNodes=[{"hostPath": "/dev/null"}])}, asked=PAIR),
    Case("no devices", {"a.json": json.dumps({"cdiVersion": "0.5.0", "kind": "VENDOR/gpu", "devices": []})}),
    Case("devices that are null", {"a.yaml": "cdiVersion: 0.5.0\nkind: VENDOR/gpu\ndevices: null\n"}),
    Case("a list in the place of a text", {"a.json": spec(device("0", node("0", path=["DEV0"])))}),
    # faults that engines refuse the file for, each by its version: moorage leaves them to the engine
    Case("an unknown field", {"a.json": spec(comment="x")}, differs=FOUND),
    Case("a variable without =", {"a.json": spec(device("0", node() | {"env": ["A"]}))}, differs=FOUND),
    Case("groups in version 0.6.0", {"a.json": spec(device("0", node() | {"additionalGids": [7]}), version="0.6.0")},
         differs=FOUND),
    Case("version 1.0.0", {"a.json": spec(version="1.0.0")}, differs=FOUND),
    Case("an unknown field in version 9.9.0", {"a.json": spec(comment="x", version="9.9.0")}, differs=FOUND),
    Case("a version with a v", {"a.json": spec(version="v0.5.0")}, ZERO, differs=NOT_43),
    Case("version 0.7.0 with groups", {"a.json": spec(device("0", node() | {"additionalGids": [7]}), version="0.7.0")},
         ZERO, differs=NOT_43),
    Case("version 0.3.0", {"a.json": spec(device("a", {"env": ["A=1"]}), version="0.3.0")}, {"a": ""}),
    Case("version 0.8.0", {"a.json": spec(version="0.8.0")}, ZERO, differs={"podman 4.3": {}, "docker 26": {}}),
    # empty edits
    Case("empty edits of the file", {"a.json": spec(containerEdits={})}, ZERO),
    Case("edits of the file that are null", {"a.json": spec(containerEdits=None)}, ZERO),
    Case("nodes that are null", {"a.json": spec(device("0", {"deviceNodes": None, "env": ["A=1"]}))}, {"0": ""}),
    # what YAML makes of a name
    Case("a name that is a number", {"a.yaml": yaml_of(yaml_device("0"))}, ZERO),
    Case("a name that is a number to base 60", {"a.yaml": yaml_of(yaml_device("1:0"))}, {"1:0": "DEV0"}, asked=("60",)),
    Case("a name that is a day", {"a.yaml": yaml_of(yaml_device("2026-01-01"))}, {"2026-01-01": "DEV0"}),
    Case("a name with a tag of its own", {"a.yaml": yaml_of(yaml_device("!tag 0"))}, ZERO),
    # forms of YAML
    Case("an anchor", {"a.yaml": yaml_of("- name: a\n  containerEdits: &e {env: [A=1]}\n- name: b\n"
                                         "  containerEdits: *e\n")}, {"a": "", "b": ""}),
    Case("a merged mapping", {"a.yaml": yaml_of("- &d\n  containerEdits: {env: [A=1]}\n  name: a\n")
                              + "containerEdits:\n  <<: {env: [B=1]}\n"}, {"a": ""}),
    Case("aliases of aliases of aliases", {"a.yaml": yaml_of() + LAUGHS}),
    Case("a comment in a file .json", {"a.json": "# by hand\n" + spec()}, ZERO),
    Case("tabs in a file .json", {"a.json": spec().replace(", ", ",\n\t\t")}, ZERO),
    Case("two documents", {"a.yaml": yaml_of() + "---\n" + yaml_of(yaml_device('"1"'))}, ZERO, asked=("1",)),
    Case("ends of lines of Windows", {"a.yaml": yaml_of().replace("\n", "\r\n")}, ZERO),
    Case("a byte order mark", {"a.yaml": b"\xef\xbb\xbf" + yaml_of().encode()}, ZERO),
    Case("UTF-16", {"a.yaml": b"\xff\xfe" + yaml_of().encode("utf-16-le")}, ZERO),
    Case("no UTF-8", {"a.yaml": b"# \xff\n" + yaml_of().encode()}),
)  # fmt: skip


def vendor_of(at: int) -> str:
    return f"moorage-case{at:02d}.test"


def written(text: str | bytes, at: int) -> bytes:
    """Return the bytes of a file of that case."""
    raw = text.encode() if isinstance(text, str) else text
    if raw.startswith(b"\xff\xfe"):
        return b"\xff\xfe" + written(raw[2:].decode("utf-16-le"), at).decode().encode("utf-16-le")
    return raw.replace(b"VENDOR", vendor_of(at).encode()).replace(b"DEV", f"/dev/moorage-case{at:02d}-".encode())


def write_all(folders: Mapping[str, Path]) -> None:
    """Write the files of all cases into these folders, by ETC and RUN. Files of one name get the case's number."""
    for at, case in enumerate(CASES):
        for name, text in case.files.items():
            folder, _, file = name.rpartition("/")
            if not file.startswith("."):
                file = f"case{at:02d}-{file}"
            (folders[folder or ETC] / file).write_bytes(written(text, at))


def expected_of(engine: str, at: int) -> dict[str, set[str]]:
    """Return the devices of a case that an engine, or "moorage", finds: their qualified names, and files in /dev."""
    case, found = CASES[at], dict[str, set[str]]()
    for name, path in case.differs.get(engine, case.found).items():
        path = path.replace("DEV", f"/dev/moorage-case{at:02d}-")
        found[f"{vendor_of(at)}/{case.kind}={name}"] = {path} if path else set()
    return found


def expected(engine: str) -> dict[str, set[str]]:
    """Return the same of all cases."""
    return {name: files for at in range(len(CASES)) for name, files in expected_of(engine, at).items()}


def asked() -> list[str]:
    """Return the qualified names of all devices that some case is about, found or not."""
    names: dict[str, None] = {}
    for at, case in enumerate(CASES):
        every = [*case.found, *case.asked, *(name for each in case.differs.values() for name in each)]
        names |= {f"{vendor_of(at)}/{case.kind}={name}": None for name in every}
    return list(names)
