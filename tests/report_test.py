"""The HTML report."""

import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from config_test import make_config

from jaxrl_llm import config as cfg
from jaxrl_llm.report import write_report

EVIL = "</div><script>alert('x')</script><img src=x onerror=alert(1)>&amp;"


class Page(HTMLParser):
    """Collects tags, attributes and text, and that tags are closed in order."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.attributes, self.text, self.open = [], [], [], []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("meta", "br", "img", "link", "input"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.text.append(data)

    @property
    def words(self):
        return " ".join(" ".join(self.text).split())


def write_run(folder, rows, samples=(), config=None):
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if samples:
        (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in samples))
    if config:
        (folder / "config.json").write_text(cfg.to_json(config))
    return folder


def rows_of(steps, offset=0.0):
    for step in range(steps + 1):
        row = {"step": step, "params_digest": "ab12", "loss": None}
        if step:
            row |= {"reward": offset + step / steps, "reward/exact": 0.5, "grad_norm": 1.0, "skipped": 0}
            row |= {"drift_mean": 1e-6, "drift_max": 1e-5, "seconds/step": 2.0, "my_metric": step}
        if step % 5 == 0:
            row |= {"eval/accuracy": offset + step / 100, "eval/pass@2": 0.5, "eval/pass@16": 0.6}
        yield row


def sample(step, reward, completion="115", prompt="What is 79 + 36?"):
    terms = {"exact": reward}
    return {
        "step": step,
        "prompt": prompt,
        "completion": completion,
        "reward": reward,
        "terms": terms,
        "gold": "115",
    }


def page_of(tmp_path, *runs):
    html = write_report(runs, tmp_path / "out" / "report.html").read_text()
    return Page(html), html


def test_write_report_shows_curves_table_and_samples(tmp_path):
    run = write_run(tmp_path / "sums", rows_of(20), [sample(s, r) for s in (1, 20) for r in (0.0, 1.0)])
    page, _ = page_of(tmp_path, run)
    for heading in (
        "Held-out accuracy",
        "Held-out pass@k",
        "Reward",
        "Sampler-trainer drift",
        "Seconds per step",
    ):
        assert heading in page.words
    assert "1 other metric" in page.words
    assert "Skipped updates" not in page.words  # all zero
    assert "Loss" not in page.words  # never a number
    assert "Held-out accuracy 0 0.2 20 0.2" in page.words
    assert "Held-out pass@16" in page.words
    assert "Step 1" in page.words and "Step 20" in page.words
    assert page.tags.count("svg") >= 8


def test_write_report_needs_nothing_from_elsewhere(tmp_path):
    run = write_run(tmp_path / "sums", rows_of(20), [sample(1, 1.0)], make_config())
    page, html = page_of(tmp_path, run)
    assert not {"script", "link", "img", "iframe", "image"} & set(page.tags)
    assert all(
        value.startswith("#") for name, value in page.attributes if name in ("src", "href", "xlink:href")
    )
    assert not re.search(r"url\((?!['\"]?#)|@import", html)


def test_write_report_escapes_what_a_model_writes(tmp_path):
    """A completion is text: it can neither run in the page nor break it."""
    messages = [{"role": "user", "content": EVIL}]
    config = make_config(name=EVIL.replace("/", ""))
    run = write_run(
        tmp_path / "a<b>",
        [{"step": 1, f"reward/{EVIL}": 0.5, EVIL: 1.0}],
        [sample(1, 1.0, EVIL, messages)],
        config,
    )
    page, html = page_of(tmp_path, run)
    assert not {"script", "img"} & set(page.tags)
    assert "<script" not in html
    assert page.words.count("<script>alert('x')</script>") >= 2


def test_write_report_overlays_runs_and_compares_configs(tmp_path):
    config = make_config()
    one = write_run(tmp_path / "x" / "run", rows_of(10), config=config)
    other = cfg.override(config, ["seed=1", "objective.loss.clip_low=0.3"])
    two = write_run(tmp_path / "y" / "run", rows_of(10, 0.5), config=other)
    page, html = page_of(tmp_path, one, two)
    assert "x/run" in page.words and "y/run" in page.words
    differing = page.words[
        page.words.index("What differs in the configs") : page.words.index("Config and versions")
    ]
    assert "objective.loss jaxrl_llm.losses.policy:ppo_clip(clip_low=0.1)" in differing
    assert "seed 0 1" in differing
    assert "rollout" not in differing
    assert html.count("#4477aa") > 5 and html.count("#ee6677") > 5


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [{"step": 0, "eval/accuracy": 0.25}],
        [{"step": 3, "reward": None, "params_digest": "x"}],
        [{"step": 1, "reward": 0.5}, {"step": 2, "kl": 0.0, "entropy": 1e-9, "drift_mean": 0.0}],
        [{"step": s, "seconds/step": 1e6 + s, "learning_rate": 1e-30} for s in range(1, 15)],
    ],
)
def test_write_report_copes_with_any_subset(tmp_path, rows):
    page, _ = page_of(tmp_path, write_run(tmp_path / "run", rows))
    assert ("No step has been logged yet." in page.words) == (
        not any(len(row) > 1 for row in rows) or rows[0]["step"] == 3
    )


def test_write_report_reads_a_run_under_way(tmp_path):
    run = write_run(tmp_path / "run", [{"step": 1, "reward": 0.5}])
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "rew')
    page, _ = page_of(tmp_path, run)
    assert "Reward 0.5 0.5 1 0.5" in page.words


def test_write_report_stays_small_for_long_runs(tmp_path):
    rng = np.random.default_rng(0)
    rows = [{"step": s, "reward": float(rng.normal()), "kl": float(rng.normal())} for s in range(1, 20_001)]
    _, html = page_of(tmp_path, write_run(tmp_path / "run", rows))
    assert len(html) < 400_000


def test_write_report_says_what_is_no_run(tmp_path):
    write_run(tmp_path / "runs" / "a", [])
    with pytest.raises(
        FileNotFoundError, match=r"runs is no run folder: it has no metrics.jsonl; it holds runs: a"
    ):
        write_report([tmp_path / "runs"], tmp_path / "r.html")
    with pytest.raises(FileNotFoundError, match="nowhere is no run folder"):
        write_report([tmp_path / "nowhere"], tmp_path / "r.html")
