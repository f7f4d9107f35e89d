"""Targets and the machine, against system files written for each case."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from porter import hardware
from porter.errors import ExitCode, UsageFault


def write(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


@pytest.mark.parametrize("name", ["cpu", "h100", "h200", "b200", "gb200", "mi300x", "mi355x", "MI355X", " cpu "])
def test_every_target_is_found_by_name(name: str) -> None:
    assert hardware.resolve(name).name == name.strip().lower()


@pytest.mark.parametrize(("name", "meant"), [("h10", "h100"), ("mi355", "mi355x"), ("", None), ("cuda", None)])
def test_unknown_target_names_what_is_accepted(name: str, meant: str | None) -> None:
    with pytest.raises(UsageFault) as caught:
        hardware.resolve(name)
    line = str(caught.value)
    assert caught.value.exit_code == ExitCode.usage and "\n" not in line
    assert repr(name) in line and all(target in line for target in ("auto", *hardware.TARGETS))
    assert (f"did you mean {meant}?" in line) if meant else ("did you mean" not in line)


def test_auto_is_the_cpu_without_a_driver(tmp_path: Path) -> None:
    assert hardware.resolve("auto", root=tmp_path).name == "cpu"


@pytest.mark.parametrize(
    ("model", "target"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_auto_reads_nvidias_driver(tmp_path: Path, model: str, target: str | None) -> None:
    information = f"Model: \t\t {model}\nIRQ:   \t\t 42\n"
    root = write(tmp_path, {"proc/driver/nvidia/gpus/0000:01:00.0/information": information})
    if target is None:
        with pytest.raises(UsageFault, match=model):
            hardware.resolve("auto", root=root)
    else:
        found = hardware.resolve("auto", root=root)
        assert found.name == target and hardware.device_present(found, root=root)
        assert hardware.device_name(found, root=root) == model
        assert not hardware.device_present(hardware.TARGETS["mi300x"], root=root)


@pytest.mark.parametrize(("version", "target"), [("90402", "mi300x"), ("90500", "mi355x")])
def test_auto_reads_amds_driver(tmp_path: Path, version: str, target: str) -> None:
    nodes = "sys/class/kfd/kfd/topology/nodes"
    root = write(
        tmp_path,
        {
            f"{nodes}/0/properties": "cpu_cores_count 64\ngfx_target_version 0\n",  # the CPU is a node too
            f"{nodes}/1/properties": f"simd_count 1216\ngfx_target_version {version}\n",
        },
    )
    assert hardware.resolve("auto", root=root).name == target


@pytest.mark.parametrize(
    ("machine", "cpuinfo", "isa"),
    [
        ("x86_64", "flags : fpu avx2 avx512f avx512_bf16 amx_bf16", "amx"),
        ("x86_64", "flags : fpu avx2 avx512f avx512_bf16", "avx512_bf16"),
        ("x86_64", "flags : fpu avx2 avx512f", "avx512"),
        ("x86_64", "flags : fpu avx2", "avx2"),
        ("x86_64", "flags : fpu sse2", "x86_64"),
        ("aarch64", "Features : fp asimd bf16", "arm64_bf16"),
        ("aarch64", "Features : fp asimd", "arm64"),
        ("riscv64", "", "riscv64"),
    ],
)
def test_cpu_isa(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: str, cpuinfo: str, isa: str) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert hardware.cpu_isa(write(tmp_path, {"proc/cpuinfo": cpuinfo + "\n"})) == isa


def test_one_thread_of_each_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "usable_cpus", lambda: [0, 1, 2, 3, 5])
    cores = {0: (0, 0), 1: (0, 1), 2: (0, 0), 3: (1, 0)}
    for cpu, (package, core) in cores.items():
        folder = f"sys/devices/system/cpu/cpu{cpu}/topology"
        write(tmp_path, {f"{folder}/physical_package_id": f"{package}\n", f"{folder}/core_id": f"{core}\n"})
    assert hardware.physical_cpus(tmp_path) == [0, 1, 3, 5]


def test_memory_is_the_smaller_of_machine_and_cgroup(tmp_path: Path) -> None:
    root = write(tmp_path, {"proc/meminfo": "MemTotal:  4096 kB\nMemAvailable:  3072 kB\n"})
    assert hardware.memory_bytes(root) == 4096 * 1024
    assert hardware.available_memory(root) == 3072 * 1024
    group = "sys/fs/cgroup/user/job"
    write(
        root,
        {
            "proc/self/cgroup": "0::/user/job\n",
            f"{group}/memory.max": f"{1024 * 1024}\n",
            f"{group}/memory.current": f"{512 * 1024}\n",
            f"{group}/memory.stat": f"anon 1\ninactive_file {128 * 1024}\n",
        },
    )
    assert hardware.memory_bytes(root) == 1024 * 1024
    assert hardware.available_memory(root) == (1024 - 512 + 128) * 1024
    write(root, {f"{group}/memory.max": "max\n"})
    assert hardware.available_memory(root) == 3072 * 1024


def test_record_of_this_machine() -> None:
    record = hardware.record(hardware.TARGETS["cpu"], threads=2)
    assert record.keys() == {"target", "device", "isa", "threads", "cpus", "memory_bytes"}
    assert record["target"] == "cpu" and record["threads"] == 2 and record["memory_bytes"] > 0
    assert record["device"] and str(record["cpus"]).split(",")[0].isdigit()
    assert hardware.record(hardware.TARGETS["mi355x"], cpus="engine 0, learner 1")["isa"] == "gfx950"
