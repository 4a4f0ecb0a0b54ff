"""Runs as one self-contained HTML page: curves, a table, sample texts, and what differs in the configs."""

from __future__ import annotations

import datetime
import io
import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.config import flatten
from jaxrl_llm.metrics import CONFIG_FILE, METRICS_FILE, SAMPLES_FILE, VERSIONS_FILE, write_atomically

COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#999999")  # Tol's bright scheme
_DASHES = ("-", "--", ":", "-.")
_MOST_POINTS = 600  # of one curve; longer ones are averaged in blocks


@dataclass(frozen=True)
class Panel:
    """One plot: the metrics whose names match, one line style each.

    Attributes:
      title: the plot's heading.
      pattern: regular expression of whole metric names.
      note: what the numbers mean.
      smooth: draw the running mean over the raw values.
      log: logarithmic axis, where values allow it.
      counts: leave the panel out when every value is 0.
    """

    title: str
    pattern: str
    note: str
    smooth: bool = True
    log: bool = False
    counts: bool = False


PANELS = (
    Panel("Held-out accuracy", "eval/accuracy", "greedy, prompts never trained on", smooth=False),
    Panel("Held-out pass@k", r"eval/pass@\d+", "chance that one of k samples is right", smooth=False),
    Panel("Held-out maj@k", r"eval/maj@\d+", "the most frequent of k answers is right", smooth=False),
    Panel("Reward", "reward", "mean over the step's samples"),
    Panel("Training accuracy", "accuracy", "share of samples that the verifier accepts"),
    Panel("Reward terms", "reward/.+", "each reward alone, before its weight"),
    Panel("Response length", "response_length", "tokens"),
    Panel("Truncated", "truncated", "share of samples that ran out of tokens"),
    Panel("KL to the reference", "kl", "nats a token"),
    Panel("Entropy", "entropy", "nats a token"),
    Panel("Sampler-trainer drift", "drift_(mean|max)", "|log-probability difference| of a token", log=True),
    Panel("Ratio", "ratio.*", "policy over sampling policy"),
    Panel("Gradient norm", "grad_norm", "before clipping"),
    Panel("Loss", "loss", "the surrogate; its height says little"),
    Panel("Regularizers", "regularize/.+", "each term, before its coefficient"),
    Panel("Groups without gradient", "zero_gradient_groups", "share of groups whose rewards are all equal"),
    Panel("Learning rate", "learning_rate", "at the step's last update", smooth=False),
    Panel("Skipped updates", "skipped", "not finite, so left out", smooth=False, counts=True),
    Panel("Unscored samples", "unscored", "samples without a reward in the step", smooth=False, counts=True),
    Panel("Seconds per step", "seconds/(step|rollout|reward|update)", "wall clock"),
    Panel("Tokens per second", "tokens_per_second", "sampled"),
)

# (metric, label, better) of the summary; better is "max", "min", or "" where neither is.
SUMMARY = (
    ("eval/accuracy", "Held-out accuracy", "max"),
    (r"eval/pass@\d+", "Held-out {}", "max"),  # the largest k
    (r"eval/maj@\d+", "Held-out {}", "max"),
    ("reward", "Reward", "max"),
    ("accuracy", "Training accuracy", "max"),
    ("response_length", "Response length", ""),
    ("truncated", "Truncated", "min"),
    ("grad_norm", "Gradient norm", ""),
    ("seconds/step", "Seconds per step", "min"),
)


@dataclass
class RunData:
    """What the report shows of one run folder."""

    name: str
    color: str
    rows: dict[int, dict[str, Any]]  # step -> metrics
    samples: dict[int, list[dict[str, Any]]]  # step -> samples
    config: dict[str, Any] = field(default_factory=dict)  # dotted path -> value
    starts: list[dict[str, Any]] = field(default_factory=list)

    @property
    def steps(self) -> int:
        return max(self.rows, default=0)

    def names(self) -> set[str]:
        """Returns the names of the metrics that have a number somewhere."""
        return {n for row in self.rows.values() for n, v in row.items() if _is_number(v) and n != "step"}

    def series(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns the steps at which a metric was measured, and its values."""
        points = [(s, row[name]) for s, row in sorted(self.rows.items()) if _is_number(row.get(name))]
        steps, values = zip(*points) if points else ((), ())
        return np.array(steps, float), np.array(values, float)


class Plot(NamedTuple):
    title: str
    note: str
    svg: Any  # Markup
    styles: list[tuple[str, str]]  # (line style, metric) where there are several


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def write_report(runs: Sequence[str | Path], out: str | Path) -> Path:
    """Writes one HTML page about some runs, with nothing loaded from elsewhere.

    Args:
      runs: run folders; the same metric of all runs is drawn in one plot.
      out: the file to write.

    Returns:
      The path written.

    Raises:
      FileNotFoundError: a folder that holds no run.
    """
    import jinja2
    import markupsafe

    names = _distinct([Path(run) for run in runs])
    data = [
        _read_run(Path(run), name, COLORS[i % len(COLORS)]) for i, (run, name) in enumerate(zip(runs, names))
    ]
    plots, others = _plots(data, markupsafe.Markup)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = _number
    page = environment.get_template("report.html.jinja").render(
        runs=data,
        title=" · ".join(names),
        made=datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M"),
        summary=_summary(data),
        plots=plots,
        others=others,
        samples=[(run, _chosen_samples(run)) for run in data if run.samples],
        differences=_config_differences(data),
        shared=data[0].config if len(data) == 1 else _shared(data),
    )
    path = Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, page.encode())
    return path


def _distinct(runs: Sequence[Path]) -> list[str]:
    """Returns the folders' names, with as many parents as tell them apart."""
    paths = [run.resolve().parts for run in runs]
    depth = 1
    while len({p[-depth:] for p in paths}) < len(set(paths)):
        depth += 1
    return ["/".join(p[-depth:]) for p in paths]


def _read_run(folder: Path, name: str, color: str) -> RunData:
    if not (folder / METRICS_FILE).is_file():
        inside = sorted(p.parent.name for p in folder.glob(f"*/{METRICS_FILE}")) if folder.is_dir() else []
        hint = f"; it holds runs: {', '.join(inside)}" if inside else "; give a --run-dir of jaxrl-llm train"
        raise FileNotFoundError(f"{folder} is no run folder: it has no {METRICS_FILE}{hint}")
    rows: dict[int, dict[str, Any]] = {}
    for row in _read_lines(folder / METRICS_FILE):
        rows.setdefault(row["step"], {}).update(row)
    samples: dict[int, list[dict[str, Any]]] = {}
    for row in _read_lines(folder / SAMPLES_FILE):
        samples.setdefault(row["step"], []).append(row)
    run = RunData(name, color, rows, samples)
    if (folder / CONFIG_FILE).is_file():
        run.config = flatten(json.loads((folder / CONFIG_FILE).read_text()))
    if (folder / VERSIONS_FILE).is_file():
        run.starts = json.loads((folder / VERSIONS_FILE).read_text())["starts"]
    return run


def _read_lines(path: Path) -> Iterable[dict[str, Any]]:
    """Yields the objects of a JSON-lines file; the last line may still be half-written."""
    if path.is_file():
        with open(path, "rb") as file:
            yield from (json.loads(line) for line in file if line.endswith(b"\n"))


def _plots(runs: list[RunData], markup: Any) -> tuple[list[Plot], list[Plot]]:
    """Returns the plots of the known panels, and one for each metric that no panel takes."""
    names = sorted(set().union(*(run.names() for run in runs)), key=_natural)
    taken, plots = set(), []
    for panel in PANELS:
        matching = [n for n in names if re.fullmatch(panel.pattern, n)]
        taken |= set(matching)
        if matching and not (
            panel.counts and not any(run.series(n)[1].any() for run in runs for n in matching)
        ):
            plots.append(_plot(panel, matching, runs, markup))
    rest = [n for n in names if n not in taken]
    return plots, [_plot(Panel(n, re.escape(n), ""), [n], runs, markup) for n in rest]


def _natural(name: str) -> list[Any]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _plot(panel: Panel, names: list[str], runs: list[RunData], markup: Any) -> Plot:
    if len(names) > len(_DASHES):  # pass@k: the ends and the middle say the most
        names = [names[round(i * (len(names) - 1) / (len(_DASHES) - 1))] for i in range(len(_DASHES))]
    svg = markup(_draw(panel, names, runs))
    styles = [(dash, name.rpartition("/")[2]) for dash, name in zip(_DASHES, names)] if len(names) > 1 else []
    return Plot(panel.title, panel.note, svg, styles)


def _draw(panel: Panel, names: list[str], runs: list[RunData]) -> str:
    """Returns the plot as SVG; its ink is `currentColor`, so it follows the page's light or dark theme."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, NullFormatter

    ink, faint = "#010203", "#040506"  # replaced below
    style = {"svg.fonttype": "none", "font.size": 9, "text.parse_math": False, "path.simplify": True}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(4.0, 2.2), layout="constrained")
        axes = figure.subplots()
        low = math.inf
        for run in runs:
            for dash, name in zip(_DASHES, names):
                steps, values = _thin(*run.series(name))
                if len(steps):
                    _draw_line(axes, steps, values, run.color, dash, panel.smooth, len(names) == 1)
                    low = min(low, values.min())
        if panel.log and low > 0:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0e}")
            axes.yaxis.set_minor_formatter(NullFormatter())
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(faint)
        axes.tick_params(which="both", color=faint, labelcolor=ink, length=3)
        axes.grid(color=faint, alpha=0.35, linewidth=0.5)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :].replace(ink, "currentColor").replace(faint, "var(--line)")
    return re.sub(r' (width|height)="[^"]*pt"', "", svg, count=2)  # the page decides the size


def _draw_line(
    axes: Any, steps: np.ndarray, values: np.ndarray, color: str, dash: str, smooth: bool, alone: bool
) -> None:
    """Draws one curve: a noisy one as its running mean, over the raw values if it is alone in its plot."""
    if smooth and len(steps) >= 12:
        if alone:
            axes.plot(steps, values, color=color, alpha=0.28, linewidth=0.9)
        axes.plot(steps, _running_mean(values, max(3, len(values) // 15)), dash, color=color, linewidth=1.6)
    else:
        marker = "o" if len(steps) <= 40 else ""
        axes.plot(steps, values, dash, color=color, linewidth=1.5, marker=marker, markersize=2.8)


def _running_mean(values: np.ndarray, width: int) -> np.ndarray:
    """Returns the mean over `width` neighbours, fewer at the ends."""
    ones, window = np.ones_like(values), np.ones(width)
    return np.convolve(values, window, "same") / np.convolve(ones, window, "same")


def _thin(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    block = -(-len(steps) // _MOST_POINTS)
    if block <= 1:
        return steps, values
    edges = np.arange(0, len(steps), block)
    counts = np.diff(np.append(edges, len(steps)))
    return np.add.reduceat(steps, edges) / counts, np.add.reduceat(values, edges) / counts


def _summary(runs: list[RunData]) -> list[dict[str, Any]]:
    """Returns, for each metric of `SUMMARY`, start, best and final of each run."""
    out = []
    for pattern, label, better in SUMMARY:
        found = sorted({n for run in runs for n in run.names() if re.fullmatch(pattern, n)}, key=_natural)
        for name in found[-1:]:
            lines = [(run, *_ends(run, name, better)) for run in runs if name in run.names()]
            out.append({"label": label.format(name.removeprefix("eval/")), "lines": lines, "better": better})
    return out


def _ends(run: RunData, name: str, better: str) -> tuple[Any, Any, Any, Any]:
    """Returns the first value, the best with its step, and the last."""
    steps, values = run.series(name)
    if not better:
        return values[0], None, None, values[-1]
    at = int(values.argmax() if better == "max" else values.argmin())
    return values[0], values[at], int(steps[at]), values[-1]


def _number(value: Any) -> str:
    """Three significant digits; plain text for what is no number."""
    if not _is_number(value):
        return "-" if value is None else str(value)
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:.1e}"


def _chosen_samples(run: RunData, steps: int = 5, each: int = 3) -> list[tuple[int, list[dict[str, Any]]]]:
    """Returns samples at a few steps from the first to the last: of each, the best, the worst and between."""
    known = sorted(run.samples)
    count = min(steps, len(known))
    picked = [known[round(i * (len(known) - 1) / max(count - 1, 1))] for i in range(count)]
    out = []
    for step in picked:
        ranked = sorted(
            run.samples[step], key=lambda s: math.inf if s.get("reward") is None else -s["reward"]
        )
        keep = min(each, len(ranked))
        spread = [ranked[round(i * (len(ranked) - 1) / max(keep - 1, 1))] for i in range(keep)]
        out.append((step, [{**s, "messages": _messages(s.get("prompt", ""))} for s in spread]))
    return out


def _messages(prompt: Any) -> list[tuple[str, str]]:
    if isinstance(prompt, list):
        return [(str(m.get("role", "")), str(m.get("content", ""))) for m in prompt]
    return [("", str(prompt))]


def _config_differences(runs: list[RunData]) -> list[tuple[str, list[Any]]]:
    names = dict.fromkeys(name for run in runs for name in run.config)
    rows = [(name, [run.config.get(name, "absent") for run in runs]) for name in names]
    return [(name, values) for name, values in rows if any(v != values[0] for v in values)]


def _shared(runs: list[RunData]) -> dict[str, Any]:
    return {n: v for n, v in runs[0].config.items() if all(r.config.get(n, "absent") == v for r in runs)}
