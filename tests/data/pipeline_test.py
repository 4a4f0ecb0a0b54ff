"""The stream of prompts: order, resume, hosts, buckets and the length limit."""

import json
import logging

import numpy as np
import pytest

from jaxrl_llm.config import Data
from jaxrl_llm.data.pipeline import PromptStream, batches_for_evaluation
from jaxrl_llm.data.sources import examples
from jaxrl_llm.data.tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer()
SIX = examples([(f"question {i}", str(i)) for i in range(6)])


def data(**fields) -> Data:
    return Data(**{"train": lambda: SIX, "prompts_per_step": 2, "chat": False} | fields)


def stream(items=SIX, seed=0, *, process_index=0, process_count=1, **fields) -> PromptStream:
    hosts = {"process_index": process_index, "process_count": process_count}
    return PromptStream(items, TOKENIZER, data(**fields), seed, **hosts)


def take(s: PromptStream, steps: int) -> list[tuple[int, int, str]]:
    """Returns (uid, example id, prompt text as the model sees it) of each prompt drawn."""
    out = []
    for _ in range(steps):
        batch = next(s)
        for example, uid, row, length in zip(
            batch.examples, batch.prompts.uid, batch.prompts.tokens, batch.prompts.lengths
        ):
            out.append((int(uid), example.id, TOKENIZER.decode(row[:length])))
    return out


@pytest.mark.parametrize("parts", [(3, 3), (2, 2, 2), (1, 4, 1)])
def test_restore_goes_on_with_the_same_prompts(parts):
    """Pitfall 11: 6 prompts, batch 2: 6 steps at once; 3 + 3 (an epoch boundary); 2 + 2 + 2."""
    whole = take(stream(), 6)
    pieces, state = [], stream().state()
    for steps in parts:
        s = stream()
        s.restore(json.loads(json.dumps(state)))
        pieces += take(s, steps)
        state = s.state()
    assert pieces == whole
    assert [uid for uid, _, _ in whole] == list(range(12))


def test_stream_gives_every_example_once_an_epoch_in_new_orders():
    epochs = [[i for _, i, _ in take(s, 3)] for s in [stream()] for _ in range(4)]
    assert all(sorted(epoch) == list(range(6)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert [i for _, i, _ in take(stream(shuffle=False), 6)] == [*range(6), *range(6)]
    assert take(stream(seed=1), 3) != take(stream(seed=0), 3)


def test_draw_takes_any_number_and_counts_on():
    s = stream(shuffle=False)
    batches = [s.draw(count) for count in (1, 8, 3)]
    assert [b.prompts.uid.tolist() for b in batches] == [[0], [*range(1, 9)], [9, 10, 11]]
    assert [e.id for b in batches for e in b.examples] == [*range(6), *range(6)]
    assert s.position == s.state()["position"] == 12


@pytest.mark.parametrize("hosts", [2, 4])
def test_hosts_share_out_the_batch_of_one_host(hosts):
    items = examples([("q" * (10 * i + 1), "a") for i in range(6)])
    one = stream(items, prompts_per_step=4)
    many = [stream(items, prompts_per_step=4, process_index=h, process_count=hosts) for h in range(hosts)]
    for _ in range(5):
        want, parts = next(one), [next(s) for s in many]
        assert [e for part in parts for e in part.examples] == want.examples
        for field in ("tokens", "lengths", "uid"):
            got = np.concatenate([getattr(part.prompts, field) for part in parts])
            np.testing.assert_array_equal(got, getattr(want.prompts, field))
    fewer = stream(items, prompts_per_step=4)
    fewer.restore(many[1].state())
    assert take(fewer, 2) == take(one, 2)


def test_draw_pads_to_the_smallest_bucket():
    items = examples([("q" * n, "a") for n in (7, 8, 15, 16)])  # and BOS
    s = stream(items, shuffle=False, prompt_lengths=(8, 16, 32))
    batches = [s.draw(1) for _ in range(4)]
    assert [b.prompts.tokens.shape for b in batches] == [(1, 8), (1, 16), (1, 16), (1, 32)]
    assert [b.prompts.lengths.tolist() for b in batches] == [[8], [9], [16], [17]]
    row = batches[1].prompts.tokens[0]
    assert row.tolist() == [TOKENIZER.bos_id, *b"qqqqqqqq"] + [TOKENIZER.pad_id] * 7
    assert {a.dtype for b in batches for a in (b.prompts.tokens, b.prompts.lengths, b.prompts.uid)} == {
        np.dtype(np.int32)
    }


def test_stream_drops_or_truncates_long_prompts_and_counts_them(caplog):
    """Pitfall 22: a 12-token prompt at limit 8: the same 8 ids on both sides, or dropped and counted."""
    items = examples([("abcdefghijk", "a"), ("abc", "a")])  # 12 and 4 tokens
    with caplog.at_level(logging.WARNING):
        dropped = stream(items, prompt_lengths=(4, 8), on_long_prompt="drop")
    assert (dropped.dropped, dropped.truncated) == (1, 0)
    assert {text for _, _, text in take(dropped, 3)} == {"abc"}
    assert (
        "1 of 2 training prompts are over the limit of 8 tokens (the longest has 12): dropped" in caplog.text
    )
    options = {"prompt_lengths": (4, 8), "on_long_prompt": "truncate", "shuffle": False}
    cut = stream(items, **options)
    assert (cut.dropped, cut.truncated) == (0, 1)
    batch = next(cut)
    assert batch.prompts.lengths.tolist() == [8, 4]
    assert batch.prompts.tokens[0].tolist() == TOKENIZER.encode("abcdefghijk")[-8:]
    (evaluation,) = batches_for_evaluation(items, TOKENIZER, data(**options), 2)
    np.testing.assert_array_equal(evaluation.prompts.tokens, batch.prompts.tokens)


def test_stream_encodes_each_prompt_once():
    """Pitfall 22: ids are made from text at the start, and never again."""
    tokenizer = ByteTokenizer()
    s = PromptStream(SIX, tokenizer, data(), 0)
    tokenizer.encode = None  # calling it would raise
    assert take(s, 6) == take(stream(), 6)


def test_stream_renders_chats_with_the_system_message():
    batch = stream(chat=True, system="Be brief.", shuffle=False).draw(1)
    ids = batch.prompts.tokens[0, : batch.prompts.lengths[0]].tolist()
    assert ids == TOKENIZER.prompt("question 0", system="Be brief.")


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: stream([]), "the training data is empty"),
        (
            lambda: stream(prompt_lengths=(4,)),
            r"all 6 training prompts are over the 4-token limit \(the longest has 11",
        ),
        (lambda: stream(process_count=3).draw(2), "cannot draw 2 prompts on 3 hosts"),
        (lambda: stream().draw(0), "cannot draw 0 prompts"),
        (lambda: stream(process_index=2, process_count=2), r"process_index 2 is not in \[0, 2\)"),
        (
            lambda: stream(examples([("fine", ""), ("\ud800", "")])),
            r"example 1 cannot be encoded: .*'\\ud800'",
        ),
        (
            lambda: stream(examples([([{"content": "no role"}], "")]), system="s", chat=True),
            "example 0 cannot",
        ),
        (lambda: batches_for_evaluation([], TOKENIZER, data(), 2), "the held-out data is empty"),
        (lambda: batches_for_evaluation(SIX, TOKENIZER, data(), 0), "it must be at least 1"),
    ],
)
def test_stream_refuses_what_it_cannot_use(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize(
    "other, message",
    [
        (lambda: stream(SIX[:5]), r"examples \(saved 6, now 5\)"),
        (lambda: stream([*SIX[:5], *examples([("another", "5")])]), r"prompts \(saved '[0-9a-f]+', now"),
        (lambda: stream(seed=3), r"seed \(saved 0, now 3\)"),
        (lambda: stream(shuffle=False), r"shuffle \(saved True, now False\)"),
    ],
)
def test_restore_refuses_another_stream(other, message):
    with pytest.raises(ValueError, match=message):
        other().restore(stream().state())


def test_batches_for_evaluation_hold_every_example_once_in_one_shape():
    batches = batches_for_evaluation(SIX, TOKENIZER, data(prompt_lengths=(16, 32)), 4)
    assert [b.prompts.tokens.shape for b in batches] == [(4, 16), (4, 16)]
    assert [b.valid.tolist() for b in batches] == [[True] * 4, [True, True, False, False]]
    assert [e.id for b in batches for e, ok in zip(b.examples, b.valid) if ok] == list(range(6))
    assert [len(b.examples) for b in batches] == [4, 4]
    assert np.concatenate([b.prompts.uid for b in batches]).tolist() == list(range(8))
    assert batches[1].examples[3] == SIX[5]
