"""Text to token ids and back: one interface over every kind of vocabulary.

Token ids are what the engine works with. Text is made from ids for rewards and logs, never the other way
round within a step: encoding a decoded text can give other ids.
"""

from __future__ import annotations

import abc
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import tokenizers

from jaxrl_llm.data import gguf_vocab
from jaxrl_llm.data.chat_template import compile_template

Message = Mapping[str, Any]  # {"role": ..., "content": ...}

# Special tokens that end a turn or a document, in the vocabularies that have them.
_END_TOKENS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<|end|>",
    "<end_of_turn>",
)


@dataclass(frozen=True)
class SpecialTokens:
    """Ids that have a role, and how a chat is written with them."""

    eos_id: int
    bos_id: int | None = None
    pad_id: int | None = None  # None: eos_id
    stop_ids: frozenset[int] = frozenset()  # besides eos_id
    add_bos: bool = False  # every prompt starts with BOS
    chat_template: str | None = None  # jinja2


class Tokenizer(abc.ABC):
    """A vocabulary with its special tokens.

    Attributes:
      vocab_size: the largest id plus 1.
      bos_id: begin-of-sequence id, or None.
      eos_id: end-of-sequence id.
      pad_id: what unused places of arrays hold. Masks never look at it, so it may equal `eos_id`.
      stop_ids: ids that end a response: end of sequence, of turn, of document. The one place that knows them.
      chat_template: jinja2 source, or None.
    """

    def __init__(self, special: SpecialTokens, vocab_size: int) -> None:
        ids = {special.eos_id, special.bos_id, special.pad_id, *special.stop_ids} - {None}
        if bad := sorted(i for i in ids if not 0 <= i < vocab_size):
            raise ValueError(f"special token ids {bad} lie outside the vocabulary of {vocab_size}")
        self.vocab_size = vocab_size
        self.bos_id = special.bos_id
        self.eos_id = special.eos_id
        self.pad_id = special.eos_id if special.pad_id is None else special.pad_id
        self.stop_ids = special.stop_ids | {special.eos_id}
        self.chat_template = special.chat_template
        self._add_bos = special.add_bos and special.bos_id is not None

    @abc.abstractmethod
    def encode(self, text: str) -> list[int]:
        """Returns the ids of `text`; special tokens written in it become their ids, none are added."""

    @abc.abstractmethod
    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Returns the text of `ids`; bytes that are not valid UTF-8 become U+FFFD."""

    @abc.abstractmethod
    def token(self, index: int) -> str:
        """Returns the special token `index` as it is written in text."""

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """Returns `messages` as the chat template writes them.

        Raises:
          ValueError: there is no template, or it refuses the messages.
        """
        if self.chat_template is None:
            raise ValueError(
                "this tokenizer has no chat template; set data.chat=False to give prompts as they are"
            )
        roles = {"bos_token": self.bos_id, "eos_token": self.eos_id, "pad_token": self.pad_id}
        names = {name: self.token(index) for name, index in roles.items() if index is not None}
        try:
            return compile_template(self.chat_template).render(
                messages=messages, add_generation_prompt=add_generation_prompt, **names
            )
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template fails on the messages: {error}") from error

    def chat(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> list[int]:
        """Returns the ids of a chat.

        Args:
          messages: `{"role": ..., "content": ...}` each.
          add_generation_prompt: end with what opens the assistant's turn.

        Returns:
          Ids with one BOS at most at the start: a template that writes BOS, and a vocabulary that wants one
          added, don't make two.
        """
        return self._one_bos(self.encode(self.render(messages, add_generation_prompt=add_generation_prompt)))

    def prompt(
        self, prompt: str | Sequence[Message], *, system: str | None = None, chat: bool = True
    ) -> list[int]:
        """Returns the ids of a prompt, ready for sampling.

        Args:
          prompt: text (the user's message), or a list of messages.
          system: a system message to put first, unless the messages have their own.
          chat: render through the chat template; otherwise `prompt` is text that the model continues.
        """
        if chat:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
            if system is not None and not (messages and messages[0]["role"] == "system"):
                messages.insert(0, {"role": "system", "content": system})
            return self.chat(messages)
        if not isinstance(prompt, str) or system is not None:
            raise ValueError(
                "a list of messages, or a system message, needs the chat template: set data.chat=True"
            )
        return self._one_bos(self.encode(prompt))

    def _one_bos(self, ids: list[int]) -> list[int]:
        run = next((i for i, token in enumerate(ids) if token != self.bos_id), len(ids))
        keep = 1 if self._add_bos else min(run, 1)
        return [self.bos_id] * keep + ids[run:]


class ByteTokenizer(Tokenizer):
    """The 256 bytes of UTF-8 and four special tokens: a vocabulary for tiny models and tests."""

    special = ("<pad>", "<bos>", "<eos>", "<turn>")

    def __init__(self) -> None:
        pad, bos, eos, _ = range(256, 256 + len(self.special))
        template = (
            "{{ bos_token }}{% for m in messages %}<turn>{{ m['role'] }}\n{{ m['content'] }}{{ eos_token }}"
            "{% endfor %}{% if add_generation_prompt %}<turn>assistant\n{% endif %}"
        )
        super().__init__(
            SpecialTokens(eos_id=eos, bos_id=bos, pad_id=pad, add_bos=True, chat_template=template),
            vocab_size=256 + len(self.special),
        )
        self._ids = {token: 256 + i for i, token in enumerate(self.special)}

    def encode(self, text: str) -> list[int]:
        ids = []
        for part in _split_at(text, self._ids):
            ids += [self._ids[part]] if part in self._ids else part.encode()
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        shown = (i for i in ids if i < 256 or not skip_special)
        return b"".join(bytes([i]) if i < 256 else self.token(i).encode() for i in shown).decode(
            errors="replace"
        )

    def token(self, index: int) -> str:
        return self.special[index - 256]


class JsonTokenizer(Tokenizer):
    """A vocabulary of the `tokenizers` library, such as a `tokenizer.json` holds."""

    def __init__(self, backend: tokenizers.Tokenizer, special: SpecialTokens) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        super().__init__(special, max(backend.get_vocab(with_added_tokens=True).values()) + 1)

    def encode(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return self._backend.decode(ids, skip_special_tokens=skip_special)

    def token(self, index: int) -> str:
        return self._backend.id_to_token(index)


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model.

    SentencePiece itself never reads control tokens in text, so text is cut at them first. The space that it
    puts before a text goes before the first part only, as in Hugging Face's tokenizers of the same models.
    """

    def __init__(self, proto: bytes, special: SpecialTokens) -> None:
        import sentencepiece
        from sentencepiece import sentencepiece_model_pb2 as pb

        model = pb.ModelProto.FromString(proto)
        cut = (pb.ModelProto.SentencePiece.CONTROL, pb.ModelProto.SentencePiece.UNKNOWN)
        self._special = {p.piece: i for i, p in enumerate(model.pieces) if p.type in cut}
        self._backend = sentencepiece.SentencePieceProcessor(model_proto=proto)
        model.normalizer_spec.add_dummy_prefix = False
        self._inner = sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())
        super().__init__(special, len(model.pieces))

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for i, part in enumerate(_split_at(text, self._special)):
            backend = self._inner if i else self._backend
            ids += [self._special[part]] if part in self._special else backend.encode(part)
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        if skip_special:
            special = set(self._special.values())
            return self._backend.decode([i for i in ids if i not in special])
        text, run = "", []
        for i in [*ids, None]:
            if i is not None and self._backend.id_to_piece(i) not in self._special:
                run.append(i)
                continue
            text += (self._inner if text else self._backend).decode(run)
            text += "" if i is None else self.token(i)
            run = []
        return text

    def token(self, index: int) -> str:
        return self._backend.id_to_piece(index)


def tokenizer_from_gguf(path: str | Path, *, reader: Any = None) -> Tokenizer:
    """Returns the tokenizer in the metadata of a GGUF file, with its special tokens and chat template.

    Args:
      path: of a file with a `gpt2` (byte-level BPE) or `llama` (SentencePiece BPE) vocabulary.
      reader: the `gguf.GGUFReader` of the file, if it is open already (opening takes seconds).

    Raises:
      FileNotFoundError: no such file.
      ValueError: not a GGUF file, cut short, or a kind of vocabulary that is not supported.
    """
    metadata = gguf_vocab.metadata_from_gguf(path, reader)
    get = lambda name, default=None: metadata.get(f"tokenizer.ggml.{name}", default)
    kind = get("model")
    if kind not in ("gpt2", "llama"):
        raise ValueError(
            f"{path} has a vocabulary of type {kind!r}; supported are 'gpt2' and 'llama': "
            "load the tokenizer from the model's tokenizer.json instead"
        )
    if get("eos_token_id") is None:
        raise ValueError(f"{path} names no end-of-sequence token (tokenizer.ggml.eos_token_id)")
    tokens = get("tokens")
    types = get("token_type", [1] * len(tokens))
    ends = {i for i, (token, t) in enumerate(zip(tokens, types)) if t != 1 and token in _END_TOKENS}
    ends |= {get(name) for name in ("eot_token_id", "eom_token_id")} - {None}
    special = SpecialTokens(
        eos_id=get("eos_token_id"),
        bos_id=get("bos_token_id"),
        pad_id=get("padding_token_id"),
        stop_ids=frozenset(ends),
        add_bos=get("add_bos_token", kind == "llama"),
        chat_template=metadata.get("tokenizer.chat_template"),
    )
    if kind == "llama":
        return SentencePieceTokenizer(gguf_vocab.sentencepiece_proto(metadata), special)
    return JsonTokenizer(gguf_vocab.byte_level_bpe(metadata), special)


def tokenizer_from_hf(folder: str | Path) -> Tokenizer:
    """Returns the tokenizer of a Hugging Face model folder.

    Reads `tokenizer.json`, `tokenizer_config.json` (special tokens, chat template), and where they exist
    `chat_template.jinja` (preferred) and `generation_config.json` (further stop ids).

    Raises:
      FileNotFoundError: `tokenizer.json` or `tokenizer_config.json` is missing.
      ValueError: no end-of-sequence token is named.
    """
    folder = Path(folder)
    if not (folder / "tokenizer.json").is_file():
        raise FileNotFoundError(
            f"no {folder / 'tokenizer.json'}: save one with the tokenizer's save_pretrained(folder), or use "
            "tokenizer_from_sentencepiece for a .model file"
        )
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    config = _read_json(folder / "tokenizer_config.json", required=True)
    stops = _read_json(folder / "generation_config.json").get("eos_token_id") or []
    ends = set(stops if isinstance(stops, list) else [stops])
    ends |= {i for i, t in backend.get_added_tokens_decoder().items() if t.content in _END_TOKENS}

    def role(name: str) -> int | None:
        token = config.get(name)
        token = token["content"] if isinstance(token, dict) else token
        return None if token is None else backend.token_to_id(token)

    bos, eos = role("bos_token"), role("eos_token")
    if eos is None:
        raise ValueError(
            f"{folder / 'tokenizer_config.json'} has eos_token={config.get('eos_token')!r}, which is not "
            "in the vocabulary; set it to the special token that ends a response"
        )
    special = SpecialTokens(
        eos_id=eos,
        bos_id=bos,
        pad_id=role("pad_token"),
        stop_ids=frozenset(ends),
        # Hugging Face writes down whether BOS is added in the post-processor.
        add_bos=bos is not None and bos in backend.encode("").ids[:1],
        chat_template=_hf_chat_template(folder, config),
    )
    return JsonTokenizer(backend, special)


def tokenizer_from_sentencepiece(path: str | Path, *, chat_template: str | None = None) -> Tokenizer:
    """Returns the tokenizer of a SentencePiece `.model` file.

    Args:
      path: the file; BOS is added to prompts when the model has one.
      chat_template: jinja2 source, as the file has none.

    Raises:
      FileNotFoundError: no such file.
      ValueError: not a SentencePiece model, or one without an end-of-sequence token.
    """
    import sentencepiece

    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no SentencePiece model {path}")
    proto = path.read_bytes()
    try:
        backend = sentencepiece.SentencePieceProcessor(model_proto=proto)
    except RuntimeError as error:
        raise ValueError(f"{path} is not a SentencePiece model: {error}") from error
    optional = lambda index: None if index < 0 else index
    if backend.eos_id() < 0:
        raise ValueError(f"{path} has no end-of-sequence token; train it with eos_id >= 0")
    pieces = range(backend.get_piece_size())
    special = SpecialTokens(
        eos_id=backend.eos_id(),
        bos_id=optional(backend.bos_id()),
        pad_id=optional(backend.pad_id()),
        stop_ids=frozenset(i for i in pieces if backend.id_to_piece(i) in _END_TOKENS),
        add_bos=True,
        chat_template=chat_template,
    )
    return SentencePieceTokenizer(proto, special)


def _split_at(text: str, special: Iterable[str]) -> list[str]:
    """Cuts `text` before and after every special token, the longest where several begin."""
    longest_first = sorted(special, key=len, reverse=True)
    return [part for part in re.split(f"({'|'.join(map(re.escape, longest_first))})", text) if part]


def _read_json(path: Path, required: bool = False) -> dict[str, Any]:
    if not path.is_file() and not required:
        return {}
    return json.loads(path.read_text())


def _hf_chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text()
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        template = {t["name"]: t["template"] for t in template}.get("default")
    return template
