import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.cache.pages import PagePool
from minisgl.cache.radix import RadixCache


def ids(*values):
    return np.array(values, dtype=np.int32)


def add(cache, tokens, pages):
    return cache.insert(cache.root, np.array(tokens, dtype=np.int32), np.array(pages, dtype=np.int32))


@pytest.mark.parametrize("page_size", [1, 4, 64])
@given(seed=st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_random_use_agrees_with_a_dictionary_of_prefixes(page_size, seed):
    rng = random.Random(seed)
    cache, pool, locked = RadixCache(page_size), PagePool(40), []
    model: dict[tuple[int, ...], int] = {}  # whole-page prefix to its last page
    for _ in range(120):
        tokens = np.array([rng.randrange(2) for _ in range(rng.randrange(6 * page_size + 2))], dtype=np.int32)
        if page_size > 1:  # few distinct pages, so that prefixes are shared
            tokens = tokens // 2 + np.repeat(ids(*[rng.randrange(2) for _ in range(7)]), page_size)[: len(tokens)]
        full = len(tokens) // page_size
        prefixes = [tuple(tokens[: (i + 1) * page_size].tolist()) for i in range(full)]
        known = next((i for i, p in enumerate(prefixes) if p not in model), full)
        action = rng.random()
        if action < 0.4:
            node, pages = cache.match(tokens)
            assert pages.tolist() == [model[p] for p in prefixes[:known]]
            assert cache.match_length(tokens) == known * page_size
            if rng.random() < 0.5:
                cache.lock(node)
                locked.append((node, prefixes[:known]))
        elif action < 0.7 and pool.free >= full:
            fresh = pool.take(full)
            _, there = cache.insert(cache.root, tokens[: full * page_size], fresh)
            assert there == known
            pool.give(fresh[:there])
            model |= dict(zip(prefixes[there:], fresh[there:].tolist(), strict=True))
        elif action < 0.85 and locked:
            node, _ = locked.pop(rng.randrange(len(locked)))
            cache.unlock(node)
        else:
            want, before = rng.randrange(8), cache.evictable
            gone = cache.evict(want)
            assert len(gone) == min(want, before)
            pool.give(gone)
            model = {p: page for p, page in model.items() if page not in set(gone.tolist())}
        for _, held in locked:
            assert all(p in model for p in held), "a locked page was evicted"
        assert all(p[:-page_size] in model for p in model if len(p) > page_size), "a page went before its successor"
        assert sorted(cache.check([n for n, _ in locked]).tolist()) == sorted(model.values())
        pool.check()
        assert pool.free + cache.cached == 40


def test_the_least_recently_used_leaf_goes_first_and_page_by_page():
    cache = RadixCache(2)
    add(cache, [1, 1, 2, 2, 3, 3], [0, 1, 2])
    add(cache, [5, 5, 6, 6], [3, 4])
    cache.match(ids(1, 1, 2, 2, 3, 3))
    assert cache.evict(1).tolist() == [4]
    assert cache.evict(3).tolist() == [3, 1, 2]
    assert cache.evict(9).tolist() == [0]
    assert cache.cached == cache.evictable == 0


def test_a_prompt_shorter_than_a_page_matches_nothing_and_inserts_nothing():
    cache = RadixCache(64)
    assert cache.match(np.zeros(63, dtype=np.int32))[1].tolist() == []
    add(cache, [0] * 64, [7])
    assert cache.match(np.zeros(127, dtype=np.int32))[1].tolist() == [7]
    assert cache.match(np.empty(0, dtype=np.int32))[1].tolist() == []


def test_a_lock_follows_its_node_through_a_split():
    cache = RadixCache(1)
    node, _ = add(cache, [1, 2, 3, 4], [0, 1, 2, 3])
    cache.lock(node)
    add(cache, [1, 2, 9], [4, 5, 6])
    assert cache.evict(9).tolist() == [6]
    cache.check([node])
    cache.unlock(node)
    assert sorted(cache.evict(9).tolist()) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "damage",
    [
        lambda c, node: setattr(c, "cached", c.cached + 1),
        lambda c, node: setattr(c, "evictable", 0),
        lambda c, node: setattr(node, "pages", node.pages * 0),
        lambda c, node: setattr(node, "locks", 1),
        lambda c, node: setattr(node, "queued", False),
    ],
)
def test_check_sees_a_damaged_tree(damage):
    cache = RadixCache(1)
    node, _ = add(cache, [1, 2, 3], [0, 1, 2])
    cache.check([])
    damage(cache, node)
    with pytest.raises(AssertionError):
        cache.check([])


def test_the_pool_refuses_a_page_twice():
    pool = PagePool(4)
    pages = pool.take(2)
    pool.give(pages)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.give(pages)
