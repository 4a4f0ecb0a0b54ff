"""The configs that come with the project are whole."""

from pathlib import Path

import pytest

from configs.default import HELD_OUT, sums
from configs.gsm8k import FOLDER
from jaxrl_llm import config as cfg
from jaxrl_llm.rewards import last_number, math_reward
from jaxrl_llm.rewards.text import stated_number

ROOT = Path(__file__).parents[1]
CONFIGS = sorted(path for path in (ROOT / "configs").glob("*.py"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_loads_and_passes_its_checks(path):
    config = cfg.load_config(str(path))
    cfg.check(config)
    assert not cfg.differences(cfg.to_json(config), config)


def test_sums_never_trains_on_a_held_out_problem():
    held_out, train = sums(held_out=True), sums(held_out=False)
    assert len(held_out) == HELD_OUT and len(held_out) + len(train) == 8100
    assert not {e.prompt for e in held_out} & {e.prompt for e in train}
    assert all(last_number(e.answer, e) == 1 for e in held_out)


@pytest.mark.skipif(not FOLDER.is_dir(), reason=f"no {FOLDER}; see JAXRL_LLM_DATA")
def test_gsm8k_reads_problems_with_their_golds():
    config = cfg.load_config(str(ROOT / "configs" / "gsm8k.py"))
    held_out = config.data.evaluation()
    assert len(held_out) == 256 and len(config.data.train()) == 7473
    first = held_out[0]
    assert first.answer == "18" and first.prompt.endswith("then write the answer after ####.")
    assert math_reward(f"9 * 2 = 18 dollars\n#### {first.answer}", first) == 1
    assert math_reward("I don't know", first) == 0


@pytest.mark.parametrize("text, number", [("79 + 36 = 115.", "115"), ("so 0.50", "1/2"), ("none", None)])
def test_stated_number_reads_the_last_number(text, number):
    assert stated_number(text) == number
