"""Filling a batch, with a sampler that always says the same and rewards that the prompts decide."""

import numpy as np
import pytest

from configs.tiny import get_config
from jaxrl_llm import config as cfg
from jaxrl_llm.data.pipeline import PromptStream
from jaxrl_llm.data.sources import examples
from jaxrl_llm.data.tokenizer import ByteTokenizer
from jaxrl_llm.prompts import dynamic_sampling_keep
from jaxrl_llm.rewards.pool import Scorer
from jaxrl_llm.rollout.groups import NoContrastError, collect
from jaxrl_llm.types import Rollout

TOKENIZER = ByteTokenizer()
CONTRAST = {0, 3, 5, 8, 10, 13}  # of 16 prompts, in rounds of 8: three kept in each


def by_prompt(completion, example):
    """Samples of a prompt with contrast are right in turn; None for the last sample of prompt 3."""
    kind, sample = example.answer, int(completion)
    if kind == "unscored" and sample == 1:
        return None
    return float(sample % 2) if kind != "same" else 1.0


def generate(prompts):
    """Response g of every prompt is the digit g; at the first look the odd ones are finished."""
    batch, size = prompts.tokens.shape[0], 4
    digits = np.array([TOKENIZER.encode(str(g))[0] for g in range(size)], np.int32)
    tokens = np.zeros((batch, size, 3), np.int32)
    tokens[..., 0] = digits
    lengths = np.ones((batch, size), np.int32)
    rollout = Rollout(tokens, lengths, np.zeros((batch, size), bool), np.zeros(tokens.shape, np.float32))
    odd = np.broadcast_to(np.arange(size) % 2 == 1, lengths.shape)
    yield rollout.replace(tokens=np.where(odd[..., None], tokens, 0)), odd
    yield rollout, np.ones(lengths.shape, bool)


def collected(*, answers, keep=dynamic_sampling_keep, want=4, **rollout):
    base = get_config()
    source = examples((f"{i:02d}", answer) for i, answer in enumerate(answers))
    config = base.replace(
        data=cfg.Data(train=list, prompts_per_step=want, prompt_lengths=(32,), shuffle=False),
        rollout=cfg.Rollout(group_size=4, max_new_tokens=3, keep=keep, prompts_per_round=8, **rollout),
        scoring=cfg.Scoring(rewards=(cfg.Reward(by_prompt),), workers=0),
    )
    stream = PromptStream(source, TOKENIZER, config.data, seed=0)
    with Scorer(config.scoring) as scorer:
        return collect(generate, stream, scorer, TOKENIZER, config)


def test_collect_takes_the_first_groups_with_contrast_in_order():
    """The scenario of DAPO: batch 4; two rounds of 8 keep 3 each; the batch is the first 4 kept."""
    got = collected(answers=["contrast" if i in CONTRAST else "same" for i in range(16)])
    assert got.batch.prompts.uid.tolist() == [0, 3, 5, 8]
    assert got.batch.scored is None
    assert got.metrics["sampling_rounds"] == (2, 1) and got.metrics["kept_groups"] == (6, 16)
    assert got.tokens == 16 * 4


def test_collect_goes_on_with_a_short_batch_whose_other_rows_have_no_loss():
    """Pitfall 20: bounded rounds, then fewer groups and a metric."""
    got = collected(answers=["contrast" if i == 2 else "same" for i in range(8)], max_rounds=1)
    assert got.metrics["short_batch"] == (1.0, 1)
    assert got.batch.scored[0].all() and not got.batch.scored[1:].any()
    assert not got.batch.rewards[1:].any()


def test_collect_stops_with_advice_when_the_rounds_run_out():
    """Pitfall 20: a constant reward and `on_short_batch="stop"`."""
    with pytest.raises(NoContrastError, match="3 rounds of 8 prompts gave 0 of 4 groups"):
        collected(answers=["same"] * 8, max_rounds=3, on_short_batch="stop")


def test_collect_marks_an_unscored_sample_and_judges_its_group_by_the_others():
    """Pitfall 15: no reward for one sample: it is counted, and the three others keep their group."""
    answers = ["unscored", *["contrast"] * 7]
    got = collected(answers=answers)
    assert got.batch.scored[0].tolist() == [True, False, True, True]
    assert got.batch.rewards[0].tolist() == [0, 0, 0, 1]
    assert got.metrics["unscored"] == (1.0, 1.0)
    assert got.metrics["reward"][1] == 31


def test_collect_reads_every_group_when_nothing_is_refused():
    got = collected(answers=["same"] * 8, keep=None, want=8)
    assert got.metrics["sampling_rounds"] == (1, 1)
    assert got.batch.rewards.tolist() == [[1.0] * 4] * 8
    assert [sample["completion"] for sample in got.samples] == ["0"] * 4
