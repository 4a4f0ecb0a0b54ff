import concurrent.futures
import json
import os
import pathlib
import re
import time

import pytest

from jaxrl_llm.rewards.verify import Verdict, judge, math_equal

HERE = pathlib.Path(__file__).parent
DATA = pathlib.Path(os.environ.get("JAXRL_LLM_DATA", HERE.parents[2] / "shared" / "data"))


def cases(name):
    return json.loads((HERE / name).read_text())


CASES = cases("verifier_cases.json") + cases("more_verifier_cases.json")


def wrong(cases):
    return [case for case in cases if math_equal(case["answer"], case["gold"]) != case["equal"]]


@pytest.mark.parametrize("name", ["verifier_cases.json", "more_verifier_cases.json"])
def test_math_equal_decides_every_case(name):
    assert not wrong(cases(name))


def test_math_equal_is_symmetric():
    turned = [
        {**case, "answer": case["gold"], "gold": case["answer"]} for case in CASES if not case.get("one_way")
    ]
    assert not wrong(turned)


def test_math_equal_accepts_every_gold_against_itself():
    golds = [case["gold"] for case in CASES if re.search(r"\w|\\{", case["gold"])]
    assert not [gold for gold in golds if not math_equal(gold, gold)]
    assert not [
        gold for gold in golds if not math_equal(rf"Thus \boxed{{{gold}}}.", gold) and "boxed" not in gold
    ]


def test_math_equal_accepts_the_golds_of_gsm8k():
    if not (DATA / "gsm8k").is_dir():
        pytest.skip(f"no GSM8K in {DATA}: set JAXRL_LLM_DATA")
    rows = [json.loads(line) for f in ("train", "test") for line in (DATA / "gsm8k" / f"{f}.jsonl").open()]
    for row in rows:
        gold = row["answer"].split("####")[1].strip()
        assert math_equal(gold, gold) and math_equal(row["answer"], gold), gold
        assert not math_equal(str(float(gold.replace(",", "")) + 1), gold), gold


def test_math_equal_works_off_the_main_thread():
    """Pitfall 17: calls from 8 threads, which alarms would fail in."""
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        assert not [case for found in threads.map(wrong, [CASES[i::8] for i in range(8)]) for case in found]


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        ("7", Verdict.CORRECT),
        ("8", Verdict.WRONG),
        ("seven", Verdict.WRONG),
        ("", Verdict.UNPARSED),
        (r"\boxed{7", Verdict.UNPARSED),
        (r"\sqrt{7", Verdict.UNPARSED),
        ("I have no idea what to say about all this", Verdict.UNPARSED),
    ],
)
def test_judge_tells_wrong_from_unparsed(answer, verdict):
    assert judge(answer, "7") is verdict


@pytest.mark.parametrize(
    "tower", ["9^{9^{9^{9}}}", "9^9^9^9", "(9^9)^(9^9)", "99999!", "1e99999999", r"\binom{10^9}{5000}"]
)
def test_judge_refuses_towers_at_once(tower):
    """Pitfall 17: answer 9^{9^{9^{9}}}."""
    start = time.monotonic()
    assert judge(tower, "9") is not Verdict.CORRECT
    assert time.monotonic() - start < 2
