"""Models from and to files: GGUF, and folders of safetensors in Hugging Face format.

Parameters are read into host (numpy) arrays; the caller puts them on devices with the shardings it wants.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_llm.data.gguf_vocab import open_gguf
from jaxrl_llm.models import families
from jaxrl_llm.models.decoder import DecoderConfig, decoder, param_shapes
from jaxrl_llm.models.policy import Params, Policy

DEFAULT_GGUF = ".models/SmolLM2-135M-Instruct.Q4_1.gguf"

# Parameter path -> name in a safetensors file, name in a GGUF file. `{}` is the layer.
_NAMES = {
    "embed.weight": ("model.embed_tokens.weight", "token_embd.weight"),
    "norm.scale": ("model.norm.weight", "output_norm.weight"),
    "head.weight": ("lm_head.weight", "output.weight"),
    "layers.attention_norm.scale": ("model.layers.{}.input_layernorm.weight", "blk.{}.attn_norm.weight"),
    "layers.attention.query.weight": ("model.layers.{}.self_attn.q_proj.weight", "blk.{}.attn_q.weight"),
    "layers.attention.key.weight": ("model.layers.{}.self_attn.k_proj.weight", "blk.{}.attn_k.weight"),
    "layers.attention.value.weight": ("model.layers.{}.self_attn.v_proj.weight", "blk.{}.attn_v.weight"),
    "layers.attention.output.weight": (
        "model.layers.{}.self_attn.o_proj.weight",
        "blk.{}.attn_output.weight",
    ),
    "layers.mlp_norm.scale": ("model.layers.{}.post_attention_layernorm.weight", "blk.{}.ffn_norm.weight"),
    "layers.mlp.gate.weight": ("model.layers.{}.mlp.gate_proj.weight", "blk.{}.ffn_gate.weight"),
    "layers.mlp.up.weight": ("model.layers.{}.mlp.up_proj.weight", "blk.{}.ffn_up.weight"),
    "layers.mlp.down.weight": ("model.layers.{}.mlp.down_proj.weight", "blk.{}.ffn_down.weight"),
}
_HF, _GGUF = 0, 1


class LoadedModel(NamedTuple):
    """What a loader returns."""

    policy: Policy
    params: Params  # numpy arrays
    tokenizer: Any  # of jaxrl_llm.data.tokenizer
    config: DecoderConfig  # what `to_hf` needs besides the parameters


class _Source(NamedTuple):
    """Tensors of a checkpoint by name; a shape is known without reading the tensor."""

    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], np.ndarray]


def from_gguf(path: str | Path = DEFAULT_GGUF, *, dtype: str = "float32", **changes: Any) -> LoadedModel:
    """Loads a model with its tokenizer from a GGUF file of the Llama family.

    Args:
      path: the file; quantised tensors are dequantised.
      dtype: of activations, keys and values.
      **changes: other fields of DecoderConfig that the file doesn't decide: param_dtype, remat,
        padded_vocab_size.
    """
    from jaxrl_llm.data.tokenizer import tokenizer_from_gguf

    reader = open_gguf(Path(path))  # opening takes seconds: once for both
    config, params = _params_from_reader(reader, path, dtype=dtype, **changes)
    return _loaded(config, params, tokenizer_from_gguf(path, reader=reader), path)


def from_hf(folder: str | Path, *, dtype: str = "float32", **changes: Any) -> LoadedModel:
    """Loads a model with its tokenizer from a folder with `config.json` and safetensors.

    Args:
      folder: of a Llama-architecture model, with one `model.safetensors` or shards and their index.
      dtype: of activations, keys and values.
      **changes: other fields of DecoderConfig that the files don't decide: param_dtype, remat,
        padded_vocab_size.
    """
    from jaxrl_llm.data.tokenizer import tokenizer_from_hf

    config, params = params_from_hf(folder, dtype=dtype, **changes)
    return _loaded(config, params, tokenizer_from_hf(folder), folder)


def tiny_model(*, seed: int = 0, **changes: Any) -> LoadedModel:
    """Returns a random model of `families.tiny` size with the byte tokenizer.

    Args:
      seed: of the parameters.
      **changes: fields of DecoderConfig.
    """
    from jaxrl_llm.data.tokenizer import ByteTokenizer

    tokenizer = ByteTokenizer()
    config = families.tiny(tokenizer.vocab_size, **changes)
    policy = decoder(config)
    return LoadedModel(policy, jax.device_get(policy.init(jax.random.key(seed))), tokenizer, config)


def params_from_gguf(path: str | Path, **changes: Any) -> tuple[DecoderConfig, Params]:
    """Reads a GGUF file without its tokenizer; see `from_gguf`."""
    return _params_from_reader(open_gguf(Path(path)), path, **changes)


def _params_from_reader(reader: Any, path: str | Path, **changes: Any) -> tuple[DecoderConfig, Params]:
    import gguf

    tensors = {t.name: t for t in reader.tensors}
    if "rope_freqs.weight" in tensors:
        raise ValueError(
            f"{path} has rope_freqs.weight (scaled rotary frequencies); not supported from GGUF: load the "
            "model's Hugging Face folder instead"
        )
    wanted = ("general.architecture", "tokenizer.ggml.tokens")
    prefixes = tuple(f"{name}." for name in families.GGUF_ARCHITECTURES)
    metadata = {n: f.contents() for n, f in reader.fields.items() if n in wanted or n.startswith(prefixes)}
    config = families.from_gguf_metadata(metadata, tied="output.weight" not in tensors, **changes)

    def read(name: str) -> np.ndarray:
        tensor = gguf.dequantize(tensors[name].data, tensors[name].tensor_type)
        heads = {"attn_q": config.heads, "attn_k": config.kv_heads}.get(name.split(".")[-2])
        return tensor if heads is None else _halves_from_pairs(tensor, heads)

    shapes = {name: tuple(int(n) for n in reversed(t.shape)) for name, t in tensors.items()}
    return config, _assemble(config, _Source(shapes, read), _GGUF, path)


def params_from_hf(folder: str | Path, **changes: Any) -> tuple[DecoderConfig, Params]:
    """Reads a Hugging Face folder without its tokenizer; see `from_hf`."""
    folder = Path(folder)
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise FileNotFoundError(f"no {config_file}: give a folder with config.json and safetensors")
    config = families.from_hf_config(json.loads(config_file.read_text()), **changes)
    with ExitStack() as stack:
        files = [stack.enter_context(_open_safetensors(f)) for f in _weight_files(folder)]
        where = {name: file for file in files for name in file.keys()}  # noqa: SIM118 (not a mapping)
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name, file in where.items()}
        if config.tied:  # some checkpoints also store the head; it is the embedding
            shapes.pop("lm_head.weight", None)
        source = _Source(shapes, lambda name: where[name].get_tensor(name))
        return config, _assemble(config, source, _HF, folder)


def to_hf(folder: str | Path, config: DecoderConfig, params: Params, tokenizer: Any = None) -> None:
    """Writes `config.json`, `generation_config.json` and `model.safetensors` that transformers reads.

    A tied head is written once, as the embedding, and `tie_word_embeddings` says so. The padding of the
    vocabulary is left out.

    Args:
      folder: made if missing.
      config: of the model.
      params: its parameters, on host or devices.
      tokenizer: when given, its stop ids go into `generation_config.json`.
    """
    from safetensors.numpy import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for path, value in _flatten(params):
        value = np.asarray(jax.device_get(value))
        name = _NAMES[path][_HF]
        if path.startswith("layers."):
            tensors |= {name.format(i): np.ascontiguousarray(layer) for i, layer in enumerate(value)}
        else:
            is_table = path in ("embed.weight", "head.weight")
            tensors[name] = np.ascontiguousarray(value[: config.vocab_size] if is_table else value)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    stops = {} if tokenizer is None else {"eos_token_id": sorted(int(i) for i in tokenizer.stop_ids)}
    for name, content in (
        ("config.json", families.to_hf_config(config) | stops),
        ("generation_config.json", stops),
    ):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


def _loaded(config: DecoderConfig, params: Params, tokenizer: Any, path: str | Path) -> LoadedModel:
    if tokenizer.vocab_size > config.vocab_size:
        raise ValueError(
            f"{path}: the tokenizer has {tokenizer.vocab_size} ids, the model's vocabulary only "
            f"{config.vocab_size}; take the tokenizer that the model was trained with"
        )
    return LoadedModel(decoder(config), params, tokenizer, config)


def _assemble(config: DecoderConfig, source: _Source, kind: int, path: str | Path) -> Params:
    """Reads every parameter, layers stacked, after checking names and shapes of all of them."""
    stored = dataclasses.replace(config, padded_vocab_size=None)
    names: dict[str, list[str]] = {}  # of the tensors that make one parameter
    shapes: dict[str, tuple[int, ...]] = {}
    for parameter, struct in _flatten(param_shapes(stored)):
        name, shape = _NAMES[parameter][kind], struct.shape
        if parameter.startswith("layers."):
            names[parameter] = [name.format(i) for i in range(config.layers)]
            shape = shape[1:]
        else:
            names[parameter] = [name]
        shapes |= dict.fromkeys(names[parameter], shape)
    _check_tensors(shapes, source.shapes, path)

    params: Params = {}
    for parameter, struct in _flatten(param_shapes(config)):
        out = np.zeros(struct.shape, struct.dtype)
        if parameter.startswith("layers."):
            for i, name in enumerate(names[parameter]):
                out[i] = source.read(name)
        else:
            tensor = source.read(names[parameter][0])
            out[: len(tensor)] = tensor  # rows beyond are the padding of the vocabulary
        *parents, last = parameter.split(".")
        node = params
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = out
    return params


def _check_tensors(expected: Mapping[str, tuple], found: Mapping[str, tuple], path: str | Path) -> None:
    """Raises unless the file has exactly the tensors of the model, in the model's shapes."""
    remedy = "the file is not of the model that its config describes: fetch or convert it again"
    few = lambda names: ", ".join(sorted(names)[:3]) + (", ..." if len(names) > 3 else "")
    if missing := expected.keys() - found.keys():
        raise ValueError(
            f"{path}: {len(missing)} of {len(expected)} tensors missing ({few(missing)}); {remedy}"
        )
    if extra := found.keys() - expected.keys():
        raise ValueError(
            f"{path}: {len(extra)} tensors that the decoder doesn't have ({few(extra)}); {remedy}"
        )
    for name, shape in expected.items():
        if found[name] != shape:
            raise ValueError(f"{path}: {name} has shape {found[name]}, the config asks for {shape}; {remedy}")


def _flatten(tree: Params) -> Iterator[tuple[str, Any]]:
    """Yields the leaves of a tree of parameters with their dotted paths."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        yield ".".join(entry.key for entry in path), leaf


def _halves_from_pairs(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorders the rows of a query or key weight `[heads * Dh, D]` from GGUF's rotary layout to ours.

    llama.cpp turns neighbouring dimensions (2 i, 2 i + 1) of a head; the decoder turns (i, i + Dh / 2).
    """
    pairs = weight.reshape(heads, -1, 2, weight.shape[-1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _weight_files(folder: Path) -> list[Path]:
    """Returns the safetensors files of a folder: the shards of the index, or the single file."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if not index.is_file():
        if not single.is_file():
            raise FileNotFoundError(
                f"{folder} has neither {single.name} nor {index.name}; other formats are not read: "
                "save the model with safetensors"
            )
        return [single]
    shards = sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
    if missing := [shard.name for shard in shards if not shard.is_file()]:
        raise FileNotFoundError(
            f"{folder}: {len(missing)} of the {len(shards)} files in {index.name} are missing "
            f"({', '.join(missing[:3])}); fetch them again"
        )
    return shards


def _open_safetensors(path: Path) -> Any:
    import safetensors

    try:
        return safetensors.safe_open(path, framework="numpy")
    except safetensors.SafetensorError as error:
        raise ValueError(
            f"{path} ({path.stat().st_size} bytes) is cut short or not safetensors ({error}); fetch it again"
        ) from error
