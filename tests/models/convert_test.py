import json

import chex
import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from jaxrl_llm.models.convert import from_hf, params_from_gguf, params_from_hf, tiny_model, to_hf
from jaxrl_llm.models.decoder import Llama3Scaling, decoder
from jaxrl_llm.models.families import from_hf_config, tiny, to_hf_config
from jaxrl_llm.models.policy import Block

LENGTHS = (1, 17, 257)
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def logits_of(config, params, tokens):
    """Logits `[N, T, V]` of sequences `[N, T]`."""
    policy = decoder(config)

    @jax.jit
    def run(params, tokens):
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[-1]), tokens.shape)
        return policy.head(params, policy.apply(params, [Block(tokens, positions)])[0].hidden)[:, 0]

    return run(params, tokens[:, None])


def draw_tokens(length, vocab_size=99):
    return np.random.default_rng(0).integers(0, vocab_size, (2, length))


def published(folder, *, tied, rope=None, dtype=None, **save):
    """A small random Llama checkpoint, written by transformers."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=99,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,
        tie_word_embeddings=tied,
        **({"rope_parameters": rope} if rope else {}),
    )
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():  # norms that do something
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.add_(0.3 * torch.randn_like(weight))
    model.to(dtype or torch.float32).save_pretrained(folder, **save)
    return model


def published_logits(model, tokens):
    import torch

    with torch.no_grad():
        return model(torch.tensor(tokens)).logits.float().numpy()


@pytest.mark.parametrize(("tied", "rope"), [(True, None), (False, None), (False, LLAMA3)])
def test_from_hf_gives_the_logits_of_transformers(tmp_path, tied, rope):
    model = published(tmp_path, tied=tied, rope=rope)
    config, params = params_from_hf(tmp_path)
    assert config.tied == tied and (config.rope_scaling is not None) == (rope is not None)
    for length in LENGTHS:
        tokens = draw_tokens(length)
        np.testing.assert_allclose(
            logits_of(config, params, tokens), published_logits(model, tokens), atol=1e-4
        )


@pytest.mark.parametrize("tied", [True, False])
def test_to_hf_exports_what_transformers_loads_with_equal_logits(tmp_path, tied):
    """Pitfall 30: the tied head is neither lost nor written twice; a padded vocabulary is cut."""
    transformers = pytest.importorskip("transformers")
    config = tiny(
        99, layers=3, tied=tied, padded_vocab_size=128, rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 64)
    )
    params = jax.jit(decoder(config).init)(jax.random.key(3))
    to_hf(tmp_path / "out", config, params)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    tokens = draw_tokens(70)
    want = published_logits(model.eval(), tokens)
    np.testing.assert_allclose(logits_of(config, params, tokens)[..., :99], want, atol=1e-4)
    again, loaded = params_from_hf(tmp_path / "out", padded_vocab_size=128)
    assert again == config
    cut = lambda tree: jax.tree.map(lambda x: x[:99] if x.shape[0] == 128 else x, tree)
    chex.assert_trees_all_equal(cut(loaded), cut(jax.device_get(params)))


def test_from_hf_reads_shards_and_bfloat16(tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    published(tmp_path, tied=False, dtype=torch.bfloat16, max_shard_size="20KB")
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 2
    tokens = draw_tokens(17)
    want = published_logits(model, tokens)
    np.testing.assert_allclose(logits_of(*params_from_hf(tmp_path), tokens), want, atol=1e-4)
    _, narrow = params_from_hf(tmp_path, dtype="bfloat16", param_dtype="bfloat16")
    assert {x.dtype for x in jax.tree.leaves(narrow)} == {jnp.bfloat16.dtype}
    shards[1].unlink()
    with pytest.raises(
        FileNotFoundError, match=f"1 of the {len(shards)} files .* are missing.*fetch them again"
    ):
        params_from_hf(tmp_path)


def test_from_hf_reads_the_rope_fields_of_transformers_4_and_5():
    config = tiny(99, rope_theta=5e5, rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 64))
    old = to_hf_config(config)
    assert from_hf_config(old) == config
    new = {k: v for k, v in old.items() if k not in ("rope_theta", "rope_scaling")}
    new["rope_parameters"] = {**old["rope_scaling"], "rope_theta": 5e5}
    assert from_hf_config(new) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["LlamaForCausaLM"]}, "'LlamaForCausaLM'; did you mean 'LlamaForCausalLM'"),
        ({"architectures": ["MambaModel"]}, "'MambaModel'; known: LlamaForCausalLM"),
        ({"attention_bias": True}, "attention_bias = True; the decoder supports only False"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'; the decoder supports only 'silu'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "unsupported rope scaling 'yarn'"),
    ],
)
def test_from_hf_refuses_a_config_that_it_does_not_compute(change, message):
    with pytest.raises(ValueError, match=message):
        from_hf_config(to_hf_config(tiny(99)) | change)


def test_from_hf_refuses_broken_folders(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config.json: give a folder"):
        params_from_hf(tmp_path)
    config = tiny(99, layers=1)
    (tmp_path / "config.json").write_text(json.dumps(to_hf_config(config)))
    with pytest.raises(FileNotFoundError, match=r"neither model.safetensors nor"):
        params_from_hf(tmp_path)
    to_hf(tmp_path, config, decoder(config).init(jax.random.key(0)))
    (tmp_path / "config.json").write_text(json.dumps(to_hf_config(tiny(99, layers=2))))
    with pytest.raises(ValueError, match=r"9 of 20 tensors missing .*fetch or convert it again"):
        params_from_hf(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(to_hf_config(tiny(98, layers=1))))
    with pytest.raises(ValueError, match=r"embed_tokens.weight has shape \(99, 64\), .* \(98, 64\)"):
        params_from_hf(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match="cut short or not safetensors"):
        params_from_hf(tmp_path)


def write_gguf(path, config, params, architecture="llama", extra=(), omit=()):
    """Writes a GGUF file as llama.cpp's converter does: rotary pairs side by side in query and key rows."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden)
    writer.add_block_count(config.layers)
    writer.add_feed_forward_length(config.mlp)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope_theta)

    def pairs(weight, heads):
        return weight.reshape(heads, 2, -1, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)

    tensors = {"token_embd": params["embed"]["weight"], "output_norm": params["norm"]["scale"]}
    if not config.tied:
        tensors["output"] = params["head"]["weight"]
    for i in range(config.layers):
        layer = jax.tree.map(lambda x, i=i: x[i], params["layers"])
        attention, mlp = layer["attention"], layer["mlp"]
        tensors |= {
            f"blk.{i}.attn_norm": layer["attention_norm"]["scale"],
            f"blk.{i}.attn_q": pairs(attention["query"]["weight"], config.heads),
            f"blk.{i}.attn_k": pairs(attention["key"]["weight"], config.kv_heads),
            f"blk.{i}.attn_v": attention["value"]["weight"],
            f"blk.{i}.attn_output": attention["output"]["weight"],
            f"blk.{i}.ffn_norm": layer["mlp_norm"]["scale"],
            f"blk.{i}.ffn_gate": mlp["gate"]["weight"],
            f"blk.{i}.ffn_up": mlp["up"]["weight"],
            f"blk.{i}.ffn_down": mlp["down"]["weight"],
        }
    for name, tensor in (tensors | dict(extra)).items():
        if name not in omit:
            writer.add_tensor(f"{name}.weight", np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tiny_params(**changes):
    config = tiny(99, layers=2, **changes)
    return config, jax.device_get(jax.jit(decoder(config).init)(jax.random.key(0)))


@pytest.mark.parametrize("tied", [True, False])
def test_from_gguf_reads_what_was_written(tmp_path, tied):
    config, params = tiny_params(tied=tied)
    got_config, got = params_from_gguf(write_gguf(tmp_path / "m.gguf", config, params), padded_vocab_size=128)
    assert got_config.rope_theta == config.rope_theta and got_config.tied == tied
    assert got["embed"]["weight"].shape == (128, 64) and not np.any(got["embed"]["weight"][99:])
    cut = lambda x: x[:99] if x.shape[0] == 128 else x
    chex.assert_trees_all_equal(jax.tree.map(cut, got), params)


def test_from_gguf_refuses_missing_foreign_and_truncated_files(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no model file .*bash launch/fetch_model.sh"):
        params_from_gguf(tmp_path / "none.gguf")
    (tmp_path / "foreign.gguf").write_bytes(b"PK\x03\x04 a zip file")
    with pytest.raises(ValueError, match=r"starts with b'PK\\x03\\x04', not b'GGUF'"):
        params_from_gguf(tmp_path / "foreign.gguf")
    whole = write_gguf(tmp_path / "m.gguf", *tiny_params()).read_bytes()
    for size in (6, 12, 20, 100, 700, len(whole) // 2, len(whole) - 4):
        (tmp_path / "cut.gguf").write_bytes(whole[:size])
        with pytest.raises(ValueError, match=f"cut short or corrupt: its {size} bytes .* fetch it again"):
            params_from_gguf(tmp_path / "cut.gguf")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"omit": ("blk.1.ffn_up",)}, r"1 of 20 tensors missing \(blk.1.ffn_up.weight\)"),
        (
            {"extra": {"blk.0.attn_q_norm": np.ones(16, np.float32)}.items()},
            "1 tensors that the decoder doesn't",
        ),
        ({"extra": {"rope_freqs": np.ones(8, np.float32)}.items()}, "load the model's Hugging Face folder"),
        ({"extra": {"blk.0.ffn_norm": np.ones(63, np.float32)}.items()}, r"has shape \(63,\), .* \(64,\)"),
        ({"architecture": "lama"}, "unsupported architecture 'lama'; did you mean 'llama'"),
    ],
)
def test_from_gguf_refuses_another_model(tmp_path, changes, message):
    path = write_gguf(tmp_path / "m.gguf", *tiny_params(), **changes)
    with pytest.raises(ValueError, match=message):
        params_from_gguf(path)


def write_tokenizer(folder, size):
    """A `tokenizer.json` of `size` words whose end token is t2."""
    words = {f"t{i}": i for i in range(size)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="t0")).save(
        str(folder / "tokenizer.json")
    )
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "t2"}))


def test_from_hf_of_what_to_hf_wrote_keeps_stop_ids_and_refuses_a_larger_tokenizer(tmp_path):
    config, params = tiny_params()
    to_hf(tmp_path, config, params)
    write_tokenizer(tmp_path, 99)
    loaded = from_hf(tmp_path)
    assert loaded.tokenizer.stop_ids == {2}
    chex.assert_trees_all_equal(loaded.params, params)
    loaded.tokenizer.stop_ids = frozenset({2, 7})
    to_hf(tmp_path, config, params, loaded.tokenizer)
    assert from_hf(tmp_path).tokenizer.stop_ids == {2, 7}
    write_tokenizer(tmp_path, 120)
    with pytest.raises(ValueError, match="tokenizer has 120 ids, the model's vocabulary only 99"):
        from_hf(tmp_path)


def test_tiny_model_is_a_function_of_its_seed():
    one, same, other = tiny_model(seed=1), tiny_model(seed=1), tiny_model(seed=2)
    assert one.policy is same.policy and one.policy.vocab_size == one.tokenizer.vocab_size
    chex.assert_trees_all_equal(one.params, same.params)
    assert np.any(one.params["embed"]["weight"] != other.params["embed"]["weight"])
