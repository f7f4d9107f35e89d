"""The table of docs/families.md: every known model as a twin, by the main command, one row each.

    python -m porter.families [SLUG ...] [--out docs/families.md] [--threads 1]

A row is written as soon as its model is done; models that the file already has are measured again only when named.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from porter.known_models import known_models

HEAD = (
    "| model | architecture | verdict | stock: unequal, mean | port: unequal | installed | lowest ratio | seconds |",
    "|---|---|---|---|---|---|---|---|",
)
INTRODUCTION = """# Known models as twins

Each row is one run of `zm-port MODEL --hw cpu --twin`: the published configuration with few layers and small dimensions
(every feature kept), random weights, the real engines. The ratio is the lowest workload's, rollout with the port over
stock in its fastest configuration, with the interval of that median. The slow workload of a twin is the prefill of
8 x 512 tokens (0.66 of stock on one, its decode 1.3 to 2.0): beside so small a model attention weighs more than it does in
the published size. Made by `python -m porter.families`; a model without a row has not been run.
"""


def measured(slug: str, threads: int, folder: Path) -> dict[str, Any]:
    """The report of one run; empty when the command gave none."""
    command = [sys.executable, "-m", "porter", slug, "--hw", "cpu", "--twin", "--json", "--quiet"]
    command += ["--threads", str(threads), "--out", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    sys.stderr.write(done.stderr)
    return json.loads(done.stdout) if done.stdout else {}


def row(slug: str, report: dict[str, Any]) -> str:
    """One line of the table; what was not measured is a dash."""
    if not report:
        return f"| {slug} | - | no report | - | - | - | - | - |"
    stock, port, speed = (report[name] for name in ("baseline", "mismatch", "throughput"))
    before = f"{stock['unequal']:,} of {stock['tokens']:,}, {stock['mean_abs']:.1e}" if stock else "-"
    after = f"{port['unequal']:,} of {port['tokens']:,}" if port else "-"
    installed = sum(b["choice"] != "keep" for b in report["bindings"])
    ratio = "-"
    if speed:
        low = min(speed["workloads"], key=lambda w: w["ratio"])
        ratio = f"{low['ratio']:.2f} ({low['ratio_low']:.2f}-{low['ratio_high']:.2f})"
    cells = (
        slug,
        report["model"]["architecture"],
        report["verdict"],
        before,
        after,
        installed,
        ratio,
        round(report["seconds"]),
    )
    return "| " + " | ".join(map(str, cells)) + " |"


def rows_of(path: Path) -> dict[str, str]:
    """Rows that the file already has, by model."""
    lines = path.read_text().splitlines() if path.exists() else []
    table = [line for line in lines if line.startswith("| ") and line not in HEAD]
    return {line.split("|")[1].strip(): line for line in table}


def main() -> int:
    """The program; see the top of the file."""
    parser = argparse.ArgumentParser(prog="python -m porter.families", description="Ports every known model as a twin.")
    parser.add_argument("models", nargs="*", help="slugs; all that the file does not have yet if none is given")
    parser.add_argument("--out", type=Path, default=Path("docs/families.md"))
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    rows = rows_of(given.out)
    for slug in given.models or [slug for slug in known_models() if slug not in rows]:
        with tempfile.TemporaryDirectory(prefix="zm-port-") as place:
            rows[slug] = row(slug, measured(slug, given.threads, Path(place) / "run"))
        table = [*HEAD, *(rows[name] for name in sorted(rows))]
        given.out.write_text(INTRODUCTION + "\n" + "\n".join(table) + "\n")
        print(rows[slug], flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
