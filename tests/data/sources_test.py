"""Sources: what they read, and what bad input gets."""

import json
import os
import pickle
import sys
from pathlib import Path

import pytest

from jaxrl_llm.data import sources
from jaxrl_llm.data.sources import examples, gsm8k_gold, jsonl, reasoning_gym, svamp_answer, svamp_prompt
from jaxrl_llm.types import Example

DATA = Path(os.environ.get("JAXRL_LLM_DATA") or Path(__file__).parents[3] / "shared" / "data")
ROWS = [{"question": f"{i} + 1?", "answer": f"It is {i + 1}.\n#### {i + 1}", "level": i} for i in range(6)]


def need(name: str) -> Path:
    path = DATA / name
    if not path.is_file():
        pytest.skip(f"needs {path}; set JAXRL_LLM_DATA to the folder")
    return path


def write(path: Path, rows=ROWS) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# Golds


@pytest.mark.parametrize("split, count", [("train", 7473), ("test", 1319)])
def test_jsonl_extracts_every_gsm8k_gold(split, count):
    found = jsonl(need(f"gsm8k/{split}.jsonl"), gold=gsm8k_gold)
    assert [e.id for e in found] == list(range(count))
    assert all(e.answer == str(int(e.answer)) for e in found)
    assert all(e.meta["row"]["question"] == e.prompt for e in found)
    if split == "test":
        assert [e.answer for e in found[:5]] == ["18", "3", "70000", "540", "20"]


def test_jsonl_extracts_every_svamp_gold():
    found = jsonl(need("svamp/SVAMP.json"), prompt=svamp_prompt, answer=svamp_answer)
    assert len(found) == 1000
    assert all(e.answer == str(int(e.answer)) for e in found)
    assert all(int(e.answer) == e.meta["row"]["Answer"] for e in found)
    assert found[0].answer == "51"
    assert found[0].prompt.endswith("25 dollars on each pack. How much do you have to pay to buy each pack?")
    assert ".. " not in found[2].prompt


def test_gsm8k_gold_takes_what_follows_the_last_mark():
    assert gsm8k_gold("so #### 1\n#### -1,234,567 ") == "-1234567"
    for answer in ("no mark", "an empty mark ####  "):
        with pytest.raises(ValueError, match="no '#### answer' in"):
            gsm8k_gold(answer)


# JSONL and lists


def test_jsonl_maps_fields(tmp_path):
    path = write(tmp_path / "rows.jsonl")
    found = jsonl(path, prompt="question", answer="level", template="{prompt} {Answer}", limit=2)
    assert found == [
        Example("0 + 1? {Answer}", "0", 0, {"row": ROWS[0]}),
        Example("1 + 1? {Answer}", "1", 1, {"row": ROWS[1]}),
    ]
    as_list = tmp_path / "rows.json"
    as_list.write_text("\n " + json.dumps(ROWS, indent=1))
    assert jsonl(as_list, gold=gsm8k_gold) == jsonl(path, gold=gsm8k_gold)
    chat = [{"role": "user", "content": "Hi"}]
    write(path, [{"messages": chat, "score": 0.5}])
    assert jsonl(path, prompt="messages", answer="score")[0] == Example(
        chat, "0.5", 0, {"row": {"messages": chat, "score": 0.5}}
    )


@pytest.mark.parametrize(
    "text, options, message",
    [
        ("", {}, r"rows\.jsonl holds no examples"),
        ("\n\n", {}, "holds no examples"),
        ("[]", {}, "holds no examples"),
        (
            '{"question": "q", "answer": "a"}\n\n{"question": "q"',
            {},
            r"rows\.jsonl, line 3, column \d+: not JSON",
        ),
        ('[\n{"question": 1},\n{]', {}, r"rows\.jsonl, line 3, column 2: not JSON"),
        (
            '{"question": "q", "answer": "a"}\n{"questoin": "q"}',
            {},
            "line 2 has no field 'question'; did you mean",
        ),
        ('{"q": 1, "a": 2}', {"prompt": "q", "answer": "zzz"}, "line 1 has no field 'zzz'; known: a, q"),
        ('{"Question": "q"}', {"prompt": svamp_prompt}, "line 1 has no field 'Body'; known: Question"),
        ('{"question": "q", "answer": "7"}', {"gold": gsm8k_gold}, "line 1: no '#### answer' in '7'"),
        (
            '{"question": "q", "answer": "7"}',
            {"template": "Solve:"},
            r"line 1: template 'Solve:' needs '\{prompt\}'",
        ),
        ('["text"]', {}, "item 0 is a str, not an object"),
    ],
)
def test_jsonl_says_what_is_wrong_and_where(text, options, message, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        jsonl(path, **options)


def test_jsonl_names_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no data file .*none\.jsonl"):
        jsonl(tmp_path / "none.jsonl")


def test_examples_takes_pairs_mappings_and_examples():
    row = {"prompt": "1 + 1?", "answer": 2.0, "source": "here"}
    assert examples([("Hi", 1), row, Example("Bye", "x", 9)]) == [
        Example("Hi", "1", 0),
        Example("1 + 1?", "2", 1, {"row": row}),
        Example("Bye", "x", 2),
    ]
    with pytest.raises(ValueError, match="item 0 is 'text'; give an Example"):
        examples(["text"])
    with pytest.raises(ValueError, match="item 0 has no field 'answer'"):
        examples([{"prompt": "p", "anser": "a"}])
    with pytest.raises(ValueError, match="holds no examples"):
        examples([])


# TFDS


def test_tfds_reads_a_builder_of_gsm8k_without_tensorflow(tmp_path):
    tensorflow_datasets = pytest.importorskip("tensorflow_datasets")
    rows = [json.loads(line) for line in need("gsm8k/test.jsonl").read_text().splitlines()[:6]]

    class Gsm8kRows(tensorflow_datasets.core.GeneratorBasedBuilder):
        VERSION = tensorflow_datasets.core.Version("1.0.0")

        def _info(self):
            text = tensorflow_datasets.features.Text()
            features = tensorflow_datasets.features.FeaturesDict({"question": text, "answer": text})
            return tensorflow_datasets.core.DatasetInfo(builder=self, features=features)

        def _split_generators(self, dl_manager):
            return {"train": self._generate_examples()}

        def _generate_examples(self):
            yield from enumerate(rows)

    builder = Gsm8kRows(data_dir=tmp_path, file_format="array_record")
    builder.download_and_prepare()
    found = sources.tfds(builder.data_dir, gold=gsm8k_gold)
    by_name = sources.tfds("gsm8k_rows", "train[:4]", gold=gsm8k_gold, data_dir=str(tmp_path), limit=3)
    assert "tensorflow" not in sys.modules
    assert by_name == found[:3]
    expected = {row["question"]: gsm8k_gold(row["answer"]) for row in rows}
    assert {e.prompt: e.answer for e in found} == expected
    with pytest.raises(ValueError, match="row 0 has no field 'gold'; known: answer, question"):
        sources.tfds(builder.data_dir, answer="gold")


# reasoning-gym


@pytest.mark.parametrize("name, params", [("leg_counting", {}), ("basic_arithmetic", {"max_digits": 2})])
def test_reasoning_gym_keeps_what_the_scorer_needs(name, params):
    gym = pytest.importorskip("reasoning_gym")
    found = reasoning_gym(name, size=4, seed=7, **params)
    assert [e.id for e in found] == [0, 1, 2, 3]
    assert found == reasoning_gym(name, size=4, seed=7, **params)
    assert [e.prompt for e in found] != [e.prompt for e in reasoning_gym(name, size=4, seed=8, **params)]
    scorer = gym.create_dataset(name, size=1, seed=0, **params)
    for example in pickle.loads(pickle.dumps(found)):
        assert (example.meta["dataset"], example.meta["params"]) == (name, params)
        assert scorer.score_answer(example.answer, example.meta["entry"]) == 1.0
        assert scorer.score_answer("no idea", example.meta["entry"]) < 1.0


def test_reasoning_gym_refuses_unknown_names_and_values():
    pytest.importorskip("reasoning_gym")
    with pytest.raises(ValueError, match="no dataset 'leg_countng'; did you mean 'leg_counting'"):
        reasoning_gym("leg_countng", size=1, seed=0)
    with pytest.raises(ValueError, match="no parameter 'max_digit'; did you mean 'max_digits'"):
        reasoning_gym("basic_arithmetic", size=1, seed=0, max_digit=2)
    with pytest.raises(ValueError, match="refuses size=1, seed=0"):
        reasoning_gym("basic_arithmetic", size=1, seed=0, min_digits=0)
