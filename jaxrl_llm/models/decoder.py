"""The Llama family of decoders: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

The modules are flax.nnx and never leave this file: `decoder` wraps them in pure functions over a nested dict.
Weights are `[out, in]`, as in published checkpoints, and used transposed: with few rows, as in decoding, that
product is faster on CPU than with `[in, out]`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxrl_llm.models.attention import attend
from jaxrl_llm.models.policy import Block, Output, Params, Part, Policy
from jaxrl_llm.signature import did_you_mean

DTYPES = ("bfloat16", "float16", "float32", "float64")
PADDED_LOGIT = -1e30  # of ids that only fill the vocabulary up; finite, so that 0 * logit is 0


@dataclass(frozen=True)
class Llama3Scaling:
    """Rotary frequencies of Llama 3.1 and later: long wavelengths are stretched by `factor`.

    Wavelengths over `original_max_positions / low_freq_factor` are stretched, those under
    `original_max_positions / high_freq_factor` are kept, and the ones between are interpolated.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class DecoderConfig:
    """Shape and arithmetic of a decoder."""

    vocab_size: int  # ids that exist
    hidden: int  # D
    layers: int  # L
    heads: int  # H
    kv_heads: int  # K
    head_dim: int  # Dh
    mlp: int  # width of the feed-forward layer
    max_positions: int
    padded_vocab_size: int | None = None  # V; None: vocab_size
    rope_theta: float = 10000.0
    rope_scaling: Llama3Scaling | None = None
    norm_eps: float = 1e-5
    tied: bool = True  # the head is the embedding
    dtype: str = "float32"  # of activations, keys and values
    param_dtype: str = "float32"
    remat: bool = False  # keep only each layer's input for the backward pass, not its matrix products too

    def __post_init__(self):
        for name in ("dtype", "param_dtype"):
            value = getattr(self, name)
            if value not in DTYPES:
                raise ValueError(f"unknown {name} {value!r}{did_you_mean(value, DTYPES)}")
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} query heads don't divide among {self.kv_heads} key/value heads")
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd; rotary positions turn pairs of dimensions")
        if self.rows < self.vocab_size:
            raise ValueError(f"padded_vocab_size {self.rows} is less than vocab_size {self.vocab_size}")

    @property
    def rows(self) -> int:
        """V, the padding included: rows of the embedding and of the head."""
        return self.vocab_size if self.padded_vocab_size is None else self.padded_vocab_size


@functools.cache
def decoder(config: DecoderConfig) -> Policy:
    """Returns the pure functions of a decoder; equal configs give the same ones, for jit's cache."""
    return Policy(
        init=functools.partial(_init, config),
        apply=functools.partial(_apply, config),
        head=functools.partial(_head, config),
        axes=_axes(config),
        vocab_size=config.rows,
        max_positions=config.max_positions,
    )


def param_shapes(config: DecoderConfig) -> Params:
    """Returns the tree of parameters as `jax.ShapeDtypeStruct`s, without making any."""
    return jax.eval_shape(functools.partial(_init, config), jax.eval_shape(lambda: jax.random.key(0)))


class Linear(nnx.Module):
    """`x W^T` with the weight `[out, in]`, drawn with standard deviation `scale / sqrt(in)`."""

    def __init__(
        self, inputs: int, outputs: int, config: DecoderConfig, *, scale: float = 1.0, rngs: nnx.Rngs
    ):
        std = scale * inputs**-0.5
        self.weight = nnx.Param(std * jax.random.normal(rngs.params(), (outputs, inputs), config.param_dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        return _product(x, self.weight[...])


class RMSNorm(nnx.Module):
    """`scale x / sqrt(mean(x^2) + eps)` over the last axis, in float32 at least."""

    def __init__(self, config: DecoderConfig):
        self.eps = config.norm_eps
        self.scale = nnx.Param(jnp.ones(config.hidden, config.param_dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        return _rms_norm(x, self.scale[...], self.eps)


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.size = config.head_dim
        queries, keys = config.heads * self.size, config.kv_heads * self.size
        self.query = Linear(config.hidden, queries, config, rngs=rngs)
        self.key = Linear(config.hidden, keys, config, rngs=rngs)
        self.value = Linear(config.hidden, keys, config, rngs=rngs)
        self.output = Linear(queries, config.hidden, config, scale=(2 * config.layers) ** -0.5, rngs=rngs)

    def __call__(self, x, rotation, masks, past):
        split = lambda y: y.reshape(*y.shape[:-1], -1, self.size)
        queries = _rotate(split(self.query(x)), rotation)
        keys = _rotate(split(self.key(x)), rotation)
        values = split(self.value(x))
        of_blocks = list(zip(*(_unpack(y, masks) for y in (queries, keys, values))))
        mixed, seen = [], tuple(past)
        for (q, k, v), mask in zip(of_blocks, masks, strict=True):
            mixed.append(attend(q, k, v, mask, seen))
            seen += (Part(k, v, mask),)
        keys_values = [(k, v) for _, k, v in of_blocks]
        return self.output(_pack(mixed).reshape(*x.shape[:-1], -1)), keys_values


class MLP(nnx.Module):
    """SwiGLU: `down(silu(gate(x)) up(x))`."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.gate = Linear(config.hidden, config.mlp, config, rngs=rngs)
        self.up = Linear(config.hidden, config.mlp, config, rngs=rngs)
        self.down = Linear(config.mlp, config.hidden, config, scale=(2 * config.layers) ** -0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Layer(nnx.Module):
    """One layer. The parameters of all layers are stacked on a leading axis L, and this is scanned.

    Tokens of all blocks are rows of `x [B, N, D]`; `masks` has a `[B, G, T]` for each block.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = RMSNorm(config)
        self.mlp = MLP(config, rngs=rngs)

    def __call__(self, x, rotation, masks, past):
        mixed, keys_values = self.attention(self.attention_norm(x), rotation, masks, past)
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x)), keys_values


def _init(config: DecoderConfig, key: jax.Array) -> Params:
    """Random parameters; logits of the fresh model have a standard deviation of about 1."""
    embed_key, head_key, layers_key = jax.random.split(key, 3)
    rows = (config.rows, config.hidden)
    draw = lambda k: config.hidden**-0.5 * jax.random.normal(k, rows, config.param_dtype)
    layer = lambda k: nnx.to_pure_dict(nnx.state(Layer(config, rngs=nnx.Rngs(k))))
    params = {
        "embed": {"weight": draw(embed_key)},
        "layers": jax.vmap(layer)(jax.random.split(layers_key, config.layers)),
        "norm": {"scale": jnp.ones(config.hidden, config.param_dtype)},
    }
    if not config.tied:
        params["head"] = {"weight": draw(head_key)}
    return params


@functools.cache
def _layer_graph(config: DecoderConfig) -> nnx.GraphDef:
    return nnx.graphdef(nnx.eval_shape(lambda: Layer(config, rngs=nnx.Rngs(0))))


def _apply(
    config: DecoderConfig,
    params: Params,
    blocks: Sequence[Block],
    past: Sequence[Part] = (),
) -> tuple[Output, ...]:
    for block in blocks:
        chex.assert_rank(block.tokens, 3)
        chex.assert_equal_shape([x for x in block if x is not None])
    masks = [jnp.ones(b.tokens.shape, bool) if b.mask is None else b.mask for b in blocks]
    rotation = _rotation(config, _pack([block.positions for block in blocks]))
    graph = _layer_graph(config)

    def layer(x, of_layer):
        weights, keys_values = of_layer
        parts = tuple(Part(k, v, part.mask) for (k, v), part in zip(keys_values, past, strict=True))
        return nnx.merge(graph, weights)(x, rotation, masks, parts)

    # Normalisation, rotation, softmax and silu are recomputed in the backward pass in any case: on CPU that
    # is a tenth faster than keeping them, at a third of the memory. prevent_cse is not needed inside scan.
    policies = jax.checkpoint_policies
    kept = policies.nothing_saveable if config.remat else policies.dots_with_no_batch_dims_saveable
    layer = jax.checkpoint(layer, policy=kept, prevent_cse=False)
    tokens = _pack([block.tokens for block in blocks])
    x = jnp.take(params["embed"]["weight"], tokens, axis=0, mode="clip").astype(config.dtype)
    past_layers = tuple((part.keys, part.values) for part in past)
    x, keys_values = jax.lax.scan(layer, x, (params["layers"], past_layers))
    hidden = _unpack(_rms_norm(x, params["norm"]["scale"], config.norm_eps), masks)
    return tuple(Output(h, k, v) for h, (k, v) in zip(hidden, keys_values, strict=True))


def _pack(of_blocks: Sequence[jax.Array]) -> jax.Array:
    """Returns the tokens of all blocks `[B, G, T, ...]` as rows `[B, N, ...]`."""
    return jnp.concatenate([x.reshape(x.shape[0], -1, *x.shape[3:]) for x in of_blocks], axis=1)


def _unpack(rows: jax.Array, masks: Sequence[jax.Array]) -> list[jax.Array]:
    """Undoes `_pack`; blocks have the sizes of their masks."""
    ends = np.cumsum([mask[0].size for mask in masks])[:-1]
    of_blocks = jnp.split(rows, ends, axis=1)
    return [x.reshape(*mask.shape, *x.shape[2:]) for x, mask in zip(of_blocks, masks, strict=True)]


def _head(config: DecoderConfig, params: Params, hidden: jax.Array) -> jax.Array:
    weight = (params["embed"] if config.tied else params["head"])["weight"]
    logits = _product(hidden, weight, jnp.promote_types(config.param_dtype, jnp.float32))
    if config.rows == config.vocab_size:
        return logits
    return jnp.where(jnp.arange(config.rows) < config.vocab_size, logits, PADDED_LOGIT)


def _product(x: jax.Array, weight: jax.Array, out_dtype: Any = None) -> jax.Array:
    """Returns `x W^T` over the last axis: one matrix product with the leading axes as rows."""
    rows = x.reshape(-1, x.shape[-1])
    contract = (((1,), (1,)), ((), ()))
    y = jax.lax.dot_general(
        rows, weight.astype(x.dtype), contract, preferred_element_type=out_dtype or x.dtype
    )
    return y.reshape(*x.shape[:-1], weight.shape[0])


def _rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    wide = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + eps)
    return (wide * scale).astype(x.dtype)


def _frequencies(config: DecoderConfig) -> np.ndarray:
    """Radians a position, `[Dh / 2]`: theta^(-2 i / Dh), stretched as the config says."""
    frequencies = config.rope_theta ** -(np.arange(0, config.head_dim, 2) / config.head_dim)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)  # in the original context
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = np.clip(keep, 0, 1)
    return frequencies * (keep + (1 - keep) / scaling.factor)


def _rotation(config: DecoderConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of each position's angles, `[B, N, 1, Dh / 2]`, in float32 at least."""
    dtype = jnp.promote_types(config.dtype, jnp.float32)
    angles = positions[..., None, None].astype(dtype) * _frequencies(config).astype(dtype)
    return jnp.cos(angles), jnp.sin(angles)


def _rotate(x: jax.Array, rotation: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Turns the pairs (i, i + Dh / 2) of `x [B, N, heads, Dh]` by their position's angles."""
    cos, sin = rotation
    left, right = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1).astype(x.dtype)


# Logical axes of a parameter's dimensions, by the last two names of its path; parameters of the layers have
# one more in front, "layers".
_AXES = {
    ("embed", "weight"): ("vocab", "embed"),
    ("head", "weight"): ("vocab", "embed"),
    ("norm", "scale"): ("embed",),
    ("attention_norm", "scale"): ("embed",),
    ("query", "weight"): ("heads", "embed"),
    ("key", "weight"): ("kv_heads", "embed"),
    ("value", "weight"): ("kv_heads", "embed"),
    ("output", "weight"): ("embed", "heads"),
    ("mlp_norm", "scale"): ("embed",),
    ("gate", "weight"): ("mlp", "embed"),
    ("up", "weight"): ("mlp", "embed"),
    ("down", "weight"): ("embed", "mlp"),
}


def _axes(config: DecoderConfig) -> Any:
    """A tree like the parameters; leaves are tuples (map with `is_leaf=lambda x: isinstance(x, tuple)`)."""

    def of(path, _):
        names = tuple(entry.key for entry in path)
        stacked = ("layers",) if names[0] == "layers" else ()
        return stacked + _AXES[names[-2:]]

    return jax.tree_util.tree_map_with_path(of, param_shapes(config))
