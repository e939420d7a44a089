"""The block pool: what a prefix hit may and may not be, and that nothing leaks."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from sluice_worker.scheduling.blocks import BlockPool, OutOfBlocks

SIZE = 2


def sealed(pool: BlockPool, tokens: list[int], salt: str = "") -> list[int]:
    """Blocks that hold `tokens`, all full ones findable."""
    matched = pool.match(tokens, salt)
    pool.acquire(matched)
    blocks = matched + pool.allocate(-(-len(tokens) // SIZE) - len(matched))
    parent: int | str = salt
    for index in range(len(tokens) // SIZE):
        content = tuple(tokens[index * SIZE : (index + 1) * SIZE])
        parent = pool.cache_block(blocks[index], parent, content)
    return blocks


def test_prefix_is_found_after_release_and_leaves_one_token() -> None:
    pool = BlockPool(8, SIZE)
    blocks = sealed(pool, [1, 2, 3, 4, 5])
    pool.release(blocks)
    assert pool.match([1, 2, 3, 4, 9, 9], "") == blocks[:2]
    assert pool.match([1, 2, 3, 4], "") == blocks[:1]
    assert pool.match([9, 2, 3, 4, 5], "") == []


def test_same_tokens_after_another_prefix_are_another_content() -> None:
    pool = BlockPool(8, SIZE)
    sealed(pool, [1, 2, 7, 7])
    assert pool.match([3, 4, 7, 7, 0], "") == []


def test_salt_separates_tenants() -> None:
    pool = BlockPool(8, SIZE)
    sealed(pool, [1, 2, 3], salt="a")
    assert pool.match([1, 2, 3], "b") == []
    assert len(pool.match([1, 2, 3], "a")) == 1


class Colliding(int):
    """A token whose hash equals every other's."""

    def __hash__(self) -> int:
        return 1


def test_hash_collision_never_serves_another_content() -> None:
    pool = BlockPool(8, SIZE)
    sealed(pool, [Colliding(1), Colliding(2), Colliding(3)])
    assert hash((Colliding(1),)) == hash((Colliding(5),))
    assert pool.match([Colliding(5), Colliding(6), Colliding(3)], "") == []


def test_oldest_chain_is_given_up_from_its_end() -> None:
    pool = BlockPool(4, SIZE)
    pool.release(sealed(pool, [1, 2, 3, 4]))
    pool.release(sealed(pool, [5, 6, 7, 8]))
    pool.allocate(1)
    assert len(pool.match([1, 2, 3, 4, 0], "")) == 1
    assert len(pool.match([5, 6, 7, 8, 0], "")) == 2


def test_more_than_there_is_raises_and_changes_nothing() -> None:
    pool = BlockPool(2, SIZE)
    with pytest.raises(OutOfBlocks):
        pool.allocate(3)
    assert (pool.num_available, pool.num_used) == (2, 0)


def test_integrity_names_a_leak_and_a_double_free() -> None:
    pool = BlockPool(4, SIZE)
    blocks = pool.allocate(2)
    assert pool.check_integrity([blocks]) is None
    assert "has 1 references, but 0 owners" in str(pool.check_integrity([blocks[:1]]))
    pool.release(blocks)
    pool.release(blocks)
    assert pool.check_integrity([]) is not None


class Pool(RuleBasedStateMachine):
    """Random sequences that start, share, grow and end."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12, SIZE)
        self.held: list[list[int]] = []
        self.contents: list[list[int]] = []
        self.given: set[int] = set()

    @rule(tokens=st.lists(st.integers(0, 2), min_size=1, max_size=9), salt=st.sampled_from("ab"))
    def start(self, tokens: list[int], salt: str) -> None:
        matched = self.pool.match(tokens, salt)
        needed = -(-len(tokens) // SIZE) - len(matched)
        available = self.pool.num_available
        fits = self.pool.num_lacking(matched, needed) <= 0
        assert fits or available < needed + len(matched)
        if fits:
            self.held.append(sealed(self.pool, tokens, salt))
            self.contents.append(tokens)

    @precondition(lambda self: self.held and self.pool.num_available)
    @rule(which=st.integers(0, 100))
    def grow(self, which: int) -> None:
        self.held[which % len(self.held)] += self.pool.allocate(1)

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 100))
    def end(self, which: int) -> None:
        self.contents.pop(which % len(self.held))
        self.pool.release(self.held.pop(which % len(self.held)))

    @invariant()
    def books_balance(self) -> None:
        pool = self.pool
        assert pool.check_integrity(self.held) is None
        held = {block for blocks in self.held for block in blocks}
        assert pool.num_used == len(held) == pool.num_total - pool.num_available
        self.given |= held
        assert pool.first_unused == len(self.given)

    def teardown(self) -> None:
        for blocks in self.held:
            self.pool.release(blocks)
        assert self.pool.num_used == 0
        assert self.pool.check_integrity([]) is None


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40)
