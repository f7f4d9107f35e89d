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
    "| model | architecture | verdict | stock: unequal, mean | port: unequal | installed | batch | one stream | prefill "
    "| seconds | hardware |",
    "|---|---|---|---|---|---|---|---|---|---|---|",
)
INTRODUCTION = """# Known models as twins

Each row is one run of `zm-port MODEL --hw cpu --twin`: the published configuration with few layers and small dimensions
(every feature kept), random weights, the real engines. The three ratios are throughput with the port over stock in its
fastest configuration, each with the interval of its median: 32 prompts x 24 tokens, one stream x 32 tokens, 8 prompts of
512 tokens. They say what alignment costs a *small* model, where a token takes a few milliseconds and attention, norms and
the Python between them weigh more than in the published size. `zero_slow` is a ratio below 0.90. Made by
`python -m porter.families`; a model without a row has not been run.
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
        return f"| {slug} | - | no report |" + " - |" * 8
    stock, port, speed = (report[name] for name in ("baseline", "mismatch", "throughput"))
    before = f"{stock['unequal']:,} of {stock['tokens']:,}, {stock['mean_abs']:.1e}" if stock else "-"
    after = f"{port['unequal']:,} of {port['tokens']:,}" if port else "-"
    installed = sum(b["choice"] != "keep" for b in report["bindings"])
    ratios = ["-"] * 3
    if speed:
        ratios = [f"{w['ratio']:.2f} ({w['ratio_low']:.2f}-{w['ratio_high']:.2f})" for w in speed["workloads"]]
    cells = (
        slug,
        report["model"]["architecture"],
        report["verdict"],
        before,
        after,
        installed,
        *ratios,
        round(report["seconds"]),
        f"{report['hw']['device']}, {report['hw']['isa']}, threads {report['hw']['threads']}",
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
