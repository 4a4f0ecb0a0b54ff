"""Ids and chats equal to Hugging Face's; specials, stop ids and BOS in one place."""

import json
import random
import re
from pathlib import Path

import gguf
import pytest
import sentencepiece
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors, trainers

from jaxrl_llm.data.tokenizer import (
    ByteTokenizer,
    JsonTokenizer,
    SpecialTokens,
    tokenizer_from_gguf,
    tokenizer_from_hf,
    tokenizer_from_sentencepiece,
)

ROOT = Path(__file__).parents[2]
SMOLLM2 = ROOT / ".models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
CORPUS = ROOT / "LICENSE"

FRAGMENTS = [
    *("What is 79 + 36?", "3.14159", "1,000,000", "0x1F", "½ ² Ⅷ ٣ 一二三", "2024-12-01", "a1b2c3"),
    *("naïve café", "Ελληνικά", "Русский текст", "日本語のテキスト", "한국어", "عربى", "हिन्दी", "e\u0301"),
    *("🎉", "👩‍👩‍👧‍👦", "🇫🇷🇯🇵", "🤷🏽‍♀️", "\u200b", "\ufeff", "\u00a0"),
    *(
        "def f(x):\n    return x**2\n",
        "for (int i=0;i<n;++i) {\n\t}",
        "<div class='a'>",
        "a_b->c[0] != NULL;",
    ),
    *(" ", "  ", "   ", "\t", "\n", "\n\n", "\r\n", " \n ", "        "),
    *(
        "I'll don't we've THEY'RE",
        "Hello, world!",
        "...",
        "?!",
        "—",
        "“quoted”",
        "\\frac{1}{2}",
        "$5.00",
        "#### 42",
    ),
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_start|>user\n", "<|im_", "<s>", "</s>", "<unk>"),
]


def strings(count: int = 400) -> list[str]:
    rng = random.Random(0)
    return ["", *FRAGMENTS] + [
        "".join(rng.choices(FRAGMENTS, k=rng.randint(2, 6))) for _ in range(count - len(FRAGMENTS))
    ]


CHATS = [
    [{"role": "user", "content": "What is 2 + 2?"}],
    [{"role": "system", "content": "Be  brief.\n"}, {"role": "user", "content": " é 🎉 <|im_end|> "}],
    [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!\n\n"},
        {"role": "user", "content": ""},
    ],
]


@pytest.fixture(scope="module")
def smollm2():
    if not SMOLLM2.is_file():
        pytest.skip(f"needs {SMOLLM2}")
    return tokenizer_from_gguf(SMOLLM2)


@pytest.fixture(scope="module")
def smollm2_reference(smollm2):
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(SMOLLM2.parent, gguf_file=SMOLLM2.name)


@pytest.fixture(scope="module")
def smollm2_folder(smollm2_reference, tmp_path_factory):
    """A Hugging Face folder of SmolLM2, with the pre-tokenizer of the published model."""
    folder = tmp_path_factory.mktemp("smollm2")
    smollm2_reference.save_pretrained(folder)
    file = folder / "tokenizer.json"
    saved = json.loads(file.read_text())
    digits = {"type": "Digits", "individual_digits": True}
    saved["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, saved["pre_tokenizer"]]}
    file.write_text(json.dumps(saved))
    return folder


@pytest.fixture(scope="module")
def sentencepiece_model(tmp_path_factory):
    """A small SentencePiece model with the settings of Llama 2's."""
    prefix = tmp_path_factory.mktemp("sp") / "tokenizer"
    sentencepiece.SentencePieceTrainer.train(
        **{"input": str(CORPUS), "model_prefix": str(prefix), "vocab_size": 600, "model_type": "bpe"},
        **{"byte_fallback": True, "split_digits": True, "normalization_rule_name": "identity"},
        **{"remove_extra_whitespaces": False, "allow_whitespace_only_pieces": True, "minloglevel": 2},
    )
    return prefix.with_suffix(".model")


def byte_level(tokens=("<|endoftext|>", "<|im_start|>", "<|im_end|>")) -> tokenizers.Tokenizer:
    out = tokenizers.Tokenizer(models.BPE())
    out.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    out.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    out.train(
        [str(CORPUS)],
        trainers.BpeTrainer(
            vocab_size=500, special_tokens=list(tokens), initial_alphabet=alphabet, show_progress=False
        ),
    )
    return out


def write_gguf(path: Path, **metadata) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in metadata.items():
        key = name.replace("__", ".")
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        else:
            (writer.add_string if isinstance(value, str) else writer.add_uint32)(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def gguf_bpe(path: Path, **changes) -> Path:
    saved = json.loads(byte_level().to_str())
    vocab = sorted(saved["model"]["vocab"], key=saved["model"]["vocab"].get)
    fields = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": vocab,
        "token_type": [3] * 3 + [1] * (len(vocab) - 3),
        "merges": [" ".join(m) for m in saved["model"]["merges"]],
        "eos_token_id": 2,
    } | changes
    given = {f"tokenizer__ggml__{name}": value for name, value in fields.items() if value is not None}
    return write_gguf(path, **given)


# Ids


def test_tokenizer_from_gguf_has_the_ids_of_hugging_face(smollm2, smollm2_folder):
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoTokenizer.from_pretrained(smollm2_folder)
    for text in strings():
        assert smollm2.encode(text) == reference.encode(text, add_special_tokens=False), repr(text)


def test_tokenizer_from_gguf_has_the_ids_of_the_gguf_conversion_but_for_numbers_after_spaces(
    smollm2, smollm2_reference
):
    """`smollm` splits numbers off first. The conversion in transformers forgets it: it cuts before the last
    of several spaces in front of a digit, and merges the bytes of other number characters with their space.
    """
    differs = re.compile(r"\s\s\d|[½²Ⅷ٣一二三]")
    same = [text for text in strings() if not differs.search(text)]
    assert len(same) > 300
    for text in same:
        assert smollm2.encode(text) == smollm2_reference.encode(text, add_special_tokens=False), repr(text)
    newlines, one = smollm2.encode("\n\n1")
    assert (smollm2.decode([newlines]), smollm2.decode([one])) == ("\n\n", "1")


def test_tokenizer_from_hf_has_the_ids_of_hugging_face(smollm2_folder):
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoTokenizer.from_pretrained(smollm2_folder)
    tokenizer = tokenizer_from_hf(smollm2_folder)
    for text in strings():
        ids = tokenizer.encode(text)
        assert ids == reference.encode(text, add_special_tokens=False), repr(text)
        assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True), repr(text)
        assert tokenizer.decode(ids, skip_special=False) == reference.decode(ids), repr(text)


def test_tokenizer_from_sentencepiece_has_the_ids_of_sentencepiece_and_hugging_face(sentencepiece_model):
    transformers = pytest.importorskip("transformers")
    tokenizer = tokenizer_from_sentencepiece(sentencepiece_model)
    plain = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_model))
    reference = transformers.LlamaTokenizer.from_pretrained(sentencepiece_model.parent)
    for text in strings():
        ids = tokenizer.encode(text)
        if not text.startswith(" "):  # where transformers leaves out the space that SentencePiece adds
            assert ids == reference.encode(text, add_special_tokens=False), repr(text)
        if not re.search(r"<s>|</s>|<unk>", text):
            assert ids == plain.encode(text), repr(text)
            assert tokenizer.decode(ids) == text


def test_tokenizer_from_gguf_reads_a_sentencepiece_vocabulary(sentencepiece_model, tmp_path):
    expected = tokenizer_from_sentencepiece(sentencepiece_model)
    plain = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_model))
    pieces = range(plain.get_piece_size())
    kind = lambda i: 2 if plain.is_unknown(i) else 3 if plain.is_control(i) else 6 if plain.is_byte(i) else 1
    path = write_gguf(
        tmp_path / "llama.gguf",
        tokenizer__ggml__model="llama",
        tokenizer__ggml__tokens=[plain.id_to_piece(i) for i in pieces],
        tokenizer__ggml__scores=[plain.get_score(i) for i in pieces],
        tokenizer__ggml__token_type=[kind(i) for i in pieces],
        tokenizer__ggml__bos_token_id=1,
        tokenizer__ggml__eos_token_id=2,
    )
    tokenizer = tokenizer_from_gguf(path)
    assert tokenizer.prompt("a <s> b", chat=False)[0] == tokenizer.bos_id == 1
    for text in strings():
        assert tokenizer.encode(text) == expected.encode(text), repr(text)


@pytest.mark.parametrize("pre", ["qwen2", "llama-bpe"])
def test_tokenizer_from_gguf_cuts_text_as_the_family_does(pre, tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer = tokenizer_from_gguf(gguf_bpe(tmp_path / "bpe.gguf", pre=pre))
    saved = json.loads(byte_level().to_str())["model"]
    merges = [tuple(m) for m in saved["merges"]]
    if pre == "qwen2":
        reference = transformers.Qwen2Tokenizer(vocab=saved["vocab"], merges=merges)
        reference.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
        encode = lambda text: reference.encode(text, add_special_tokens=False)
    else:
        from transformers.convert_slow_tokenizer import TikTokenConverter

        reference = byte_level()
        reference.model = models.BPE(saved["vocab"], merges, ignore_merges=True)
        reference.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(TikTokenConverter().pattern), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        encode = lambda text: reference.encode(text).ids
    for text in strings(200):
        assert tokenizer.encode(text) == encode(text), repr(text)


def test_byte_tokenizer_returns_every_text():
    tokenizer = ByteTokenizer()
    assert tokenizer.vocab_size == 260
    for text in strings():
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert max(ids, default=0) < 256
    assert tokenizer.encode("a<eos>b") == [97, tokenizer.eos_id, 98]
    assert tokenizer.decode([97, tokenizer.eos_id, 98]) == "ab"
    assert tokenizer.decode([97, tokenizer.eos_id, 98], skip_special=False) == "a<eos>b"
    assert tokenizer.decode([0xC3]) == "\ufffd"


def test_decode_skips_special_tokens(smollm2, sentencepiece_model):
    ids = smollm2.encode("<|im_start|>user\n115<|im_end|>")
    assert smollm2.decode(ids) == "user\n115"
    assert smollm2.decode(ids, skip_special=False) == "<|im_start|>user\n115<|im_end|>"
    tokenizer = tokenizer_from_sentencepiece(sentencepiece_model)
    ids = tokenizer.encode("<s>one two</s> three")
    assert tokenizer.decode(ids, skip_special=False) == "<s>one two</s> three"
    assert tokenizer.decode(ids) == "one two three"


# Special tokens and chats


def test_stop_ids_gather_every_end_token(smollm2, smollm2_folder):
    assert smollm2.stop_ids == {smollm2.eos_id, smollm2.encode("<|endoftext|>")[0]}
    (smollm2_folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 16]}))
    assert tokenizer_from_hf(smollm2_folder).stop_ids == {0, 2, 16}


@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_chat_equals_apply_chat_template(messages, add_generation_prompt, smollm2, smollm2_folder):
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoTokenizer.from_pretrained(smollm2_folder)
    for tokenizer in (smollm2, tokenizer_from_hf(smollm2_folder)):
        rendered = tokenizer.render(messages, add_generation_prompt=add_generation_prompt)
        ids = tokenizer.chat(messages, add_generation_prompt=add_generation_prompt)
        expected = reference.apply_chat_template(
            messages, add_generation_prompt=add_generation_prompt, tokenize=True, return_dict=False
        )
        assert ids == expected
        assert rendered == reference.apply_chat_template(
            messages, add_generation_prompt=add_generation_prompt, tokenize=False
        )


def test_prompt_puts_the_system_message_first_unless_there_is_one():
    tokenizer = ByteTokenizer()
    user, system = {"role": "user", "content": "Hi"}, {"role": "system", "content": "Be brief."}
    expected = tokenizer.chat([system, user])
    assert tokenizer.prompt("Hi", system="Be brief.") == expected
    assert tokenizer.prompt([user], system="Be brief.") == expected
    assert tokenizer.prompt([system, user], system="Be long.") == expected
    assert tokenizer.prompt("Hi", chat=False) == [tokenizer.bos_id, *b"Hi"]
    for prompt, system in (([user], None), ("Hi", "Be brief.")):
        with pytest.raises(ValueError, match=r"set data\.chat=True"):
            tokenizer.prompt(prompt, system=system, chat=False)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match=r"no chat template; set data\.chat=False"):
        tokenizer.prompt("Hi")


# Round trips and BOS


def he_llo() -> JsonTokenizer:
    vocab = {token: i for i, token in enumerate(["h", "e", "l", "o", "he", "ll", "llo", "hello", "<eos>"])}
    merges = [("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo")]
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken("<eos>", normalized=False)])
    return JsonTokenizer(backend, SpecialTokens(eos_id=vocab["<eos>"]))


def test_decode_then_encode_gives_other_ids():
    """Pitfall 22: [he, llo] is the text of [hello], so ids must never be made from text again."""
    tokenizer = he_llo()
    he, llo, hello = (tokenizer.encode(text) for text in ("he", "llo", "hello"))
    assert tokenizer.decode(he + llo) == tokenizer.decode(hello) == "hello"
    assert tokenizer.encode(tokenizer.decode(he + llo)) == hello != he + llo


@pytest.mark.parametrize("template_bos", [0, 1, 2])
@pytest.mark.parametrize("add_bos", [True, False])
def test_chat_has_exactly_one_bos(template_bos, add_bos, tmp_path):
    """Pitfall 22: a template that emits BOS, and a post-processor that adds one, make one."""
    backend = byte_level(("<s>", "</s>"))
    if add_bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    backend.save(str(tmp_path / "tokenizer.json"))
    template = "{{ bos_token }}" * template_bos + "{{ messages[0].content }}{{ eos_token }}"
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = tokenizer_from_hf(tmp_path)
    wanted = int(add_bos or template_bos > 0)
    ids = tokenizer.prompt("Hi <s> there")
    assert ids[:wanted] == [0] * wanted
    assert ids[wanted:] == tokenizer.encode("Hi <s> there</s>")
    assert tokenizer.prompt("<s>Hi", chat=False) == tokenizer.encode("<s>Hi")


# What bad input gets


def test_tokenizer_from_gguf_refuses_bad_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="no model file"):
        tokenizer_from_gguf(tmp_path / "none.gguf")
    (tmp_path / "foreign.gguf").write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ValueError, match="not a GGUF file: it starts with b'PK"):
        tokenizer_from_gguf(tmp_path / "foreign.gguf")
    whole = gguf_bpe(tmp_path / "whole.gguf")
    data = whole.read_bytes()
    for size in (5, 20, 30, 100, len(data) // 2, len(data) - 3):
        (tmp_path / "cut.gguf").write_bytes(data[:size])
        with pytest.raises(ValueError, match=rf"cut short or corrupt: its {size} bytes"):
            tokenizer_from_gguf(tmp_path / "cut.gguf")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"pre": "smolm"}, "pre-tokenizer 'smolm' is not supported; did you mean 'smollm'"),
        ({"model": "bert"}, "vocabulary of type 'bert'; supported are 'gpt2' and 'llama'"),
        ({"eos_token_id": None}, "names no end-of-sequence token"),
        ({"eos_token_id": 5000}, r"\[5000\] lie outside the vocabulary of 500"),
        ({"tokens": None}, "holds no tokenizer"),
    ],
)
def test_tokenizer_from_gguf_refuses_bad_metadata(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        tokenizer_from_gguf(gguf_bpe(tmp_path / "bad.gguf", **changes))


def test_tokenizer_from_hf_refuses_bad_folders(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no .*tokenizer\.json: save one"):
        tokenizer_from_hf(tmp_path)
    byte_level().save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(FileNotFoundError, match=r"tokenizer_config\.json"):
        tokenizer_from_hf(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    with pytest.raises(ValueError, match="eos_token='</s>', which is not in the vocabulary"):
        tokenizer_from_hf(tmp_path)


def test_tokenizer_from_hf_ignores_saved_truncation_and_prefers_the_template_file(tmp_path):
    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=16)
    backend.save(str(tmp_path / "tokenizer.json"))
    templates = [{"name": "rag", "template": "R"}, {"name": "default", "template": "D"}]
    config = {"eos_token": "<|im_end|>", "chat_template": templates}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = tokenizer_from_hf(tmp_path)
    assert len(tokenizer.encode("x1y2z3w4")) == 8
    assert tokenizer.chat_template == "D"
    assert (tokenizer.pad_id, tokenizer.bos_id) == (tokenizer.eos_id, None)
    (tmp_path / "chat_template.jinja").write_text("F")
    assert tokenizer_from_hf(tmp_path).chat_template == "F"


def test_tokenizer_from_sentencepiece_refuses_bad_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="no SentencePiece model"):
        tokenizer_from_sentencepiece(tmp_path / "none.model")
    (tmp_path / "bad.model").write_bytes(b"not a model")
    with pytest.raises(ValueError, match="is not a SentencePiece model"):
        tokenizer_from_sentencepiece(tmp_path / "bad.model")
