"""SmolLM2-135M-Instruct computes what `transformers` computes from the same file."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models.convert import DEFAULT_GGUF, from_gguf
from jaxrl_llm.models.policy import Block, Part

MODEL = Path(__file__).parents[2] / DEFAULT_GGUF
pytestmark = pytest.mark.skipif(not MODEL.is_file(), reason=f"no {MODEL}; run `bash launch/fetch_model.sh`")

PROMPTS = (
    "What is 79 + 36? Answer with just the number.",
    "Write a haiku about the sea.",
    "def fibonacci(n):",
    "Translate to French: The cat sleeps on the warm stone.",
    "List three uses of a brick.",
    "Why is the sky blue? Explain it to a child in two sentences.",
    "Continue the sequence: 2, 4, 8, 16,",
    "¿Cuál es la capital de Perú?",
    "Summarize: Photosynthesis turns light, water and carbon dioxide into sugar and oxygen.",
    "A train travels 60 km in 45 minutes. What is its speed in km/h?",
    "Give me a JSON object with the keys name and age.",
    "Is 91 a prime number?",
    "Write a SQL query that counts the rows of the table orders.",
    "🙂 Reply with one emoji.",
    "Who wrote Pride and Prejudice?",
    "Sort these words: pear, apple, fig, cherry.",
    "x",
    "Explain recursion, and then explain it again.",
    "Compute (12 * 7) - 15.",
    "Tell a very short story that begins with: The lighthouse keeper had not slept for three days.",
)


@pytest.fixture(scope="module")
def ours():
    loaded = from_gguf(MODEL)
    return loaded._replace(params=jax.device_put(loaded.params))


@pytest.fixture(scope="module")
def theirs():
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    file = load_gguf_checkpoint(
        str(MODEL), return_tensors=True, model_to_load=model, torch_dtype=torch.float32
    )
    model.load_state_dict(file["tensors"], strict=False)
    model.tie_weights()
    return model


@functools.partial(jax.jit, static_argnums=(0, 4))
def greedy(loaded_policy, params, tokens, lengths, count):
    """Decodes `count` tokens with a cache; returns them `[B, count]` with their logits `[B, count, V]`."""
    apply, head = loaded_policy
    rows, width = tokens.shape
    mask = (jnp.arange(width) < lengths[:, None])[:, None]
    positions = jnp.broadcast_to(jnp.arange(width), mask.shape)
    [prompt] = apply(params, [Block(tokens[:, None], positions, mask)])
    last = jnp.take_along_axis(prompt.hidden, (lengths - 1)[:, None, None, None], axis=2)
    own = jnp.zeros((*prompt.keys.shape[:3], count, *prompt.keys.shape[4:]))

    def step(state, t):
        keys, values, hidden = state
        logits = head(params, hidden[:, 0, 0])
        token = jnp.argmax(logits, axis=-1)
        seen = jnp.broadcast_to(jnp.arange(count) < t, (rows, 1, count))
        past = (Part(prompt.keys, prompt.values, mask), Part(keys, values, seen))
        [out] = apply(params, [Block(token[:, None, None], (lengths + t)[:, None, None])], past)
        write = lambda cache, new: jax.lax.dynamic_update_slice_in_dim(cache, new, t, axis=3)
        return (write(keys, out.keys), write(values, out.values), out.hidden), (token, logits)

    _, (tokens, logits) = jax.lax.scan(step, (own, own, last), jnp.arange(count))
    return tokens.T, logits.swapaxes(0, 1)


def their_logits(model, prompt, response):
    """Logits `[T, V]` from which each token of the response would be drawn; nothing is cached."""
    import torch

    with torch.no_grad():
        return model(torch.tensor([[*prompt, *response[:-1]]])).logits[0, len(prompt) - 1 :].numpy()


def check_parity(ours, theirs, prompts, count):
    ids = [ours.tokenizer.prompt(prompt) for prompt in prompts]
    lengths = np.array([len(i) for i in ids])
    padded = np.zeros((len(ids), lengths.max()), np.int32)
    for row, i in zip(padded, ids):
        row[: len(i)] = i
    policy = (ours.policy.apply, ours.policy.head)
    tokens, logits = jax.device_get(greedy(policy, ours.params, padded, lengths, count))
    for i, prompt in enumerate(prompts):
        want = their_logits(theirs, ids[i], tokens[i])
        np.testing.assert_allclose(logits[i], want, atol=2e-3, rtol=0, err_msg=prompt)
        # Greedy decoding with transformers draws these: each is its choice after those before it.
        assert tokens[i].tolist() == want.argmax(-1).tolist(), prompt


def test_from_gguf_gives_the_logits_and_greedy_tokens_of_transformers(ours, theirs):
    check_parity(ours, theirs, PROMPTS[:3], count=16)


@pytest.mark.slow
def test_from_gguf_gives_64_greedy_tokens_of_transformers_on_20_prompts(ours, theirs):
    check_parity(ours, theirs, PROMPTS, count=64)
