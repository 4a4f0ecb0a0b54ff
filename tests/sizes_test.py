"""Which microbatch is visited at which static size."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.sizes import Size, plan, static_sizes, visit_all


def visited(needed, sizes, microbatch):
    """Runs a plan; returns the prompts and the size of each visit, in order."""
    needed = jnp.asarray(needed)
    count = needed.shape[0] // microbatch

    def visit(size, prompts, carry):
        n, seen = carry
        return n + 1, seen.at[n].set(jnp.array([*size, *prompts]))

    start = (jnp.int32(0), jnp.zeros((count, 2 + microbatch), jnp.int32))
    run = jax.jit(lambda needed: visit_all(plan(needed, sizes, microbatch), sizes, visit, start))
    n, seen = run(needed)
    return [(Size(*row[:2]), row[2:]) for row in np.asarray(seen)[: int(n)].tolist()]


def test_static_sizes_are_few_multiples_of_16_and_end_with_the_whole():
    sizes = lambda tokens: [size.tokens for size in static_sizes(8, tokens, halve_samples=False)]
    assert sizes(5) == [5] and sizes(16) == [16]
    assert sizes(32) == [16, 32]
    assert sizes(64) == [16, 32, 64]
    assert sizes(100) == [32, 64, 100]
    assert sizes(1024) == [256, 512, 1024]
    assert static_sizes(8, 64, halve_samples=True) == ((4, 32), (4, 64), (8, 32), (8, 64))
    assert static_sizes(5, 8, halve_samples=True) == ((3, 8), (5, 8))
    assert static_sizes(1, 8, halve_samples=True) == ((1, 8),)


def test_plan_puts_long_prompts_together_and_leaves_idle_ones_out():
    sizes = static_sizes(2, 64, halve_samples=False)
    needed = [[3, 9], [64, 1], [0, 0], [17, 16], [0, 33], [0, 0], [2, 2], [0, 0]]
    # By length: 1 (64 tokens) and 4 (33), 3 (17) and 0 (9), 6 (2) with an idle one; then only idle ones.
    assert visited(needed, sizes, 2) == [((2, 16), [6, 2]), ((2, 32), [3, 0]), ((2, 64), [1, 4])]


def test_plan_visits_nothing_if_nothing_is_needed():
    assert visited(np.zeros((4, 2), int), static_sizes(2, 64, halve_samples=False), 2) == []


def test_plan_takes_the_smallest_size_that_covers_samples_and_tokens():
    sizes = static_sizes(4, 64, halve_samples=True)
    needed = [[40, 2, 0, 0], [9, 9, 9, 0], [5, 0, 0, 0], [64, 1, 1, 1]]
    got = visited(needed, sizes, 1)
    assert sorted(got) == sorted([((2, 64), [0]), ((4, 32), [1]), ((2, 32), [2]), ((4, 64), [3])])


def test_plan_covers_every_prompt_of_a_microbatch():
    rng = np.random.default_rng(0)
    sizes = static_sizes(4, 64, halve_samples=True)
    for _ in range(5):
        kept = rng.integers(0, 5, 12)
        needed = np.where(np.arange(4) < kept[:, None], rng.integers(1, 65, (12, 4)), 0)
        got = visited(needed, sizes, 3)
        for size, prompts in got:
            assert needed[prompts].max() <= size.tokens and kept[prompts].max() <= size.samples
        left = set(range(12)) - {p for _, prompts in got for p in prompts}
        assert not needed[sorted(left)].any()
