"""Draws the README's plot and prints its table from finished quickstart runs.

python -m tests.benchmarks.quickstart_plot runs/seed0 runs/seed1 runs/seed2 --out .assets/quickstart.svg
"""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def rows_of(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def seed_of(run: Path) -> int:
    return json.loads((run / "config.json").read_text())["seed"]


def table(runs: dict[int, list[dict]]) -> str:
    """Returns a Markdown table: held-out accuracy before and after."""
    lines = ["| seed | before | after 10 steps | after 20 | after 30 |", "|---|---|---|---|---|"]
    for seed, rows in runs.items():
        accuracies = [f"{row['eval/accuracy']:.1%}" for row in rows if "eval/accuracy" in row]
        lines.append(f"| {seed} | {' | '.join(accuracies)} |")
    return "\n".join(lines)


def draw(runs: dict[int, list[dict]], out: Path) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(8, 2.8), sharey=True, layout="constrained")
    for seed, rows in runs.items():
        held_out = [
            (row["step"], row["eval/accuracy"]) for row in rows if row.get("eval/accuracy") is not None
        ]
        axes[0].plot(*zip(*held_out), marker="o", markersize=4, label=f"seed {seed}")
        axes[1].plot([row["step"] for row in rows[1:]], [row["reward"] for row in rows[1:]], linewidth=1.2)
    titles = ("held-out accuracy (greedy, 256 sums)", "reward (mean of 64 samples)")
    for axis, title in zip(axes, titles):
        axis.set_title(title, fontsize=10, loc="left")
        axis.set_xlabel("step")
        axis.set_ylim(0, 1)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, fontsize=9, loc="upper left")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    finished = dict(sorted((seed_of(run), rows_of(run)) for run in args.runs))
    draw(finished, args.out)
    print(table(finished))
