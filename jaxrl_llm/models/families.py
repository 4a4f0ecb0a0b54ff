"""Which published models the decoder computes, and the tiny one of the tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxrl_llm.models.decoder import DecoderConfig, Llama3Scaling
from jaxrl_llm.signature import did_you_mean

HF_ARCHITECTURES = ("LlamaForCausalLM",)
GGUF_ARCHITECTURES = ("llama",)
ROPE_TYPES = ("default", "llama3")


def tiny(vocab_size: int, **changes: Any) -> DecoderConfig:
    """Returns a decoder of about 0.1 M parameters for tests: two layers, width 64."""
    shape = {
        "hidden": 64,
        "layers": 2,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
        "mlp": 128,
        "max_positions": 2048,
    }
    return DecoderConfig(vocab_size=vocab_size, **(shape | changes))


def from_hf_config(config: Mapping[str, Any], **changes: Any) -> DecoderConfig:
    """Returns the decoder that a Hugging Face `config.json` describes.

    Args:
      config: the parsed file, of transformers 4 (`rope_theta`, `rope_scaling`) or 5 (`rope_parameters`).
      **changes: fields of DecoderConfig that the file doesn't decide, such as dtype and remat.
    """
    architecture = (config.get("architectures") or ["none"])[0]
    _check_architecture(architecture, HF_ARCHITECTURES)
    for name, supported in (
        ("hidden_act", "silu"),
        ("attention_bias", False),
        ("mlp_bias", False),
        ("quantization_config", None),
        ("partial_rotary_factor", 1.0),
    ):
        value = config.get(name)
        if value is not None and value != supported:
            raise ValueError(f"config.json has {name} = {value!r}; the decoder supports only {supported!r}")
    heads = config["num_attention_heads"]
    rope = config.get("rope_parameters") or {}
    return DecoderConfig(
        vocab_size=config["vocab_size"],
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        mlp=config["intermediate_size"],
        max_positions=config.get("max_position_embeddings", 2048),
        rope_theta=rope.get("rope_theta") or config.get("rope_theta", 10000.0),
        rope_scaling=_rope_scaling(rope or config.get("rope_scaling") or {}),
        norm_eps=config.get("rms_norm_eps", 1e-6),
        tied=config.get("tie_word_embeddings", False),
        **changes,
    )


def to_hf_config(config: DecoderConfig) -> dict[str, Any]:
    """Returns the `config.json` of a decoder, readable by transformers 4 and 5."""
    scaling = config.rope_scaling
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.mlp,
        "max_position_embeddings": config.max_positions,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling
        and {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_positions,
        },
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": config.param_dtype,
    }


def from_gguf_metadata(metadata: Mapping[str, Any], *, tied: bool, **changes: Any) -> DecoderConfig:
    """Returns the decoder that the metadata of a GGUF file describes.

    Args:
      metadata: the file's keys and values.
      tied: whether the file has no `output.weight`; the metadata doesn't say.
      **changes: fields of DecoderConfig that the file doesn't decide, such as dtype and remat.
    """
    architecture = metadata.get("general.architecture", "none")
    _check_architecture(architecture, GGUF_ARCHITECTURES)
    get = lambda name, *default: _metadata(metadata, f"{architecture}.{name}", *default)
    hidden, heads = get("embedding_length"), get("attention.head_count")
    head_dim = get("attention.key_length", hidden // heads)
    for name, supported in (
        ("rope.dimension_count", head_dim),
        ("attention.value_length", head_dim),
        ("rope.scaling.type", "none"),
        ("expert_count", 0),
    ):
        if (value := get(name, supported)) != supported:
            raise ValueError(
                f"GGUF metadata {architecture}.{name} = {value!r}; the decoder supports only {supported!r}; "
                "load the model's Hugging Face folder instead"
            )
    return DecoderConfig(
        vocab_size=get("vocab_size", len(metadata.get("tokenizer.ggml.tokens", ()))),
        hidden=hidden,
        layers=get("block_count"),
        heads=heads,
        kv_heads=get("attention.head_count_kv", heads),
        head_dim=head_dim,
        mlp=get("feed_forward_length"),
        max_positions=get("context_length"),
        rope_theta=get("rope.freq_base", 10000.0),
        norm_eps=get("attention.layer_norm_rms_epsilon"),
        tied=tied,
        **changes,
    )


def _check_architecture(name: str, known: tuple[str, ...]) -> None:
    if name not in known:
        raise ValueError(f"unsupported architecture {name!r}{did_you_mean(name, known)}")


def _metadata(metadata: Mapping[str, Any], key: str, *default: Any) -> Any:
    if key not in metadata and not default:
        raise ValueError(f"GGUF metadata has no {key!r}; the file is incomplete: fetch or convert it again")
    return metadata.get(key, *default)


def _rope_scaling(rope: Mapping[str, Any]) -> Llama3Scaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ROPE_TYPES:
        raise ValueError(f"unsupported rope scaling {kind!r}{did_you_mean(kind, ROPE_TYPES)}")
    if kind == "default":
        return None
    return Llama3Scaling(
        factor=rope["factor"],
        low_freq_factor=rope["low_freq_factor"],
        high_freq_factor=rope["high_freq_factor"],
        original_max_positions=rope["original_max_position_embeddings"],
    )
