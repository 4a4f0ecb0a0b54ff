"""Vocabularies in GGUF metadata, rebuilt for the libraries that encode with them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from jaxrl_llm.signature import did_you_mean

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # of tokenizer.ggml.token_type; the same codes as SentencePiece's

_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{digits}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def metadata_from_gguf(path: str | Path, reader: Any = None) -> dict[str, Any]:
    """Reads the `tokenizer.*` entries of a GGUF file, or of its reader.

    Raises:
      FileNotFoundError: no such file.
      ValueError: not a GGUF file, cut short, or without a tokenizer.
    """
    fields = (reader or open_gguf(Path(path))).fields
    found = {name: field.contents() for name, field in fields.items() if name.startswith("tokenizer.")}
    if "tokenizer.ggml.tokens" not in found:
        raise ValueError(
            f"{path} holds no tokenizer (tokenizer.ggml.tokens); give a file of a language model"
        )
    return found


def byte_level_bpe(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Builds the byte-level BPE of a `gpt2` vocabulary.

    How text is cut before merging is not in the file, only its name, `tokenizer.ggml.pre`.

    Raises:
      ValueError: a name that is not known here; a guess would give other ids than the model was trained on.
    """
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in _PRE_TOKENIZERS:
        raise ValueError(
            f"GGUF pre-tokenizer {pre!r} is not supported{did_you_mean(pre, _PRE_TOKENIZERS)}; "
            "load the tokenizer from the model's tokenizer.json instead"
        )
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    # Llama 3 takes a piece that is a token whole as that token, whatever the merges say.
    bpe = models.BPE({t: i for i, t in enumerate(tokens)}, merges, ignore_merges=pre == "llama-bpe")
    out = tokenizers.Tokenizer(bpe)
    if pre == "qwen2":
        out.normalizer = normalizers.NFC()
    out.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    out.decoder = decoders.ByteLevel()
    types = metadata.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))
    out.add_tokens(
        [
            AddedToken(token, special=kind == _CONTROL, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
    )
    return out


def sentencepiece_proto(metadata: Mapping[str, Any]) -> bytes:
    """Builds the SentencePiece model (BPE with byte fallback) of a `llama` vocabulary, serialised."""
    from sentencepiece import sentencepiece_model_pb2 as pb

    model = pb.ModelProto()
    tokens = metadata["tokenizer.ggml.tokens"]
    scores = metadata["tokenizer.ggml.scores"]
    types = metadata["tokenizer.ggml.token_type"]
    for token, score, kind in zip(tokens, scores, types, strict=True):
        model.pieces.add(piece=token, score=score, type=kind)
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    trainer.model_type = pb.TrainerSpec.BPE
    trainer.byte_fallback = True
    for role, default in (("unk", 0), ("bos", 1), ("eos", 2)):
        name = {"unk": "unknown"}.get(role, role)
        index = metadata.get(f"tokenizer.ggml.{name}_token_id", default)
        setattr(trainer, f"{role}_id", index)
        setattr(trainer, f"{role}_piece", tokens[index])
    normalizer.name = "identity"
    normalizer.add_dummy_prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    normalizer.remove_extra_whitespaces = False
    return model.SerializeToString()


def open_gguf(path: Path) -> Any:
    """Opens a GGUF file; raises when it is missing, foreign or cut short."""
    import gguf

    if not path.is_file():
        raise FileNotFoundError(
            f"no model file {path}: run `bash launch/fetch_model.sh`, or give another path"
        )
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise ValueError(
            f"{path} is not a GGUF file: it starts with {magic!r}, not b'GGUF'; give a .gguf file"
        )
    try:
        return gguf.GGUFReader(path)
    except (ValueError, IndexError, OverflowError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path} is cut short or corrupt: its {path.stat().st_size} bytes end before what its header "
            "announces; delete it and fetch it again (`bash launch/fetch_model.sh`)"
        ) from error


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _split(digits: str) -> pre_tokenizers.PreTokenizer:
    pattern = Regex(_SPLIT.replace("{digits}", digits))
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pattern, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


_PRE_TOKENIZERS = {
    "gpt-2": _gpt2,
    "smollm": _single_digits,
    "starcoder": _single_digits,
    "refact": _single_digits,
    "llama-bpe": lambda: _split("{1,3}"),
    "qwen2": lambda: _split(""),
}
