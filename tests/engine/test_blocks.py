"""The ledger agrees with a plain model: free blocks as a list from least to most
recently released, content as a dict.
"""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollweave.engine.blocks import BlockLedger, Key
from tests.support.properties import examples

SIZE = 4


@dataclass
class Model:
    """Finds where each key lives by searching. `idle` is in the order of release."""

    refs: dict[int, int] = field(default_factory=dict)
    content: dict[int, Key] = field(default_factory=dict)
    idle: list[int] = field(default_factory=list)

    def find(self, key: Key) -> int | None:
        return next((block for block, cached in self.content.items() if cached == key), None)


def test_keys_chain_over_the_whole_prefix_and_the_weights() -> None:
    ledger = BlockLedger(blocks=4, block_tokens=SIZE)
    tokens = list(range(11))
    keys = ledger.keys(tokens)
    assert len(keys) == 2  # the third block is not full
    assert ledger.keys(tokens, known=keys[:1]) == keys
    assert ledger.keys([99, *tokens[1:]])[1] != keys[1]  # same second block, other first one
    ledger.retag(7)
    assert not set(ledger.keys(tokens)) & set(keys)


def test_old_weights_are_never_hit() -> None:
    ledger = BlockLedger(blocks=4, block_tokens=SIZE, publication_id=1)
    keys = ledger.keys(list(range(8)))
    blocks = ledger.allocate(2)
    for block, key in zip(blocks, keys, strict=True):
        ledger.commit(block, key)
    assert ledger.match(keys) == blocks
    ledger.retag(2)
    assert ledger.match(keys) == []
    assert ledger.match(ledger.keys(list(range(8)))) == []
    ledger.release(blocks)
    assert ledger.free == 4
    ledger.check()


def test_idle_blocks_are_evicted_least_recently_released_first() -> None:
    ledger = BlockLedger(blocks=3, block_tokens=SIZE)
    keys = ledger.keys(list(range(12)))
    blocks = ledger.allocate(3)
    for block, key in zip(blocks, keys, strict=True):
        ledger.commit(block, key)
    ledger.release(blocks)
    ledger.allocate(1)  # takes the end of the prefix: the rest can still be hit
    assert ledger.match(keys) == blocks[:2]
    ledger.check()


def test_allocating_too_much_changes_nothing() -> None:
    ledger = BlockLedger(blocks=3, block_tokens=SIZE)
    ledger.allocate(2)
    with pytest.raises(ValueError, match="at most the 1 free blocks, got 2"):
        ledger.allocate(2)
    assert ledger.free == 1
    ledger.check()


def test_without_caching_nothing_is_indexed() -> None:
    ledger = BlockLedger(blocks=3, block_tokens=SIZE, caching=False)
    blocks = ledger.allocate(1)
    keys = ledger.keys(list(range(4)))
    ledger.commit(blocks[0], keys[0])
    assert ledger.match(keys) == []
    ledger.check()


@settings(max_examples=examples(60))
@given(st.data())
def test_any_history_agrees_with_the_model(data: st.DataObject) -> None:
    total = data.draw(st.integers(2, 8))
    ledger, model = BlockLedger(blocks=total, block_tokens=1), Model()
    prompts = [[1, 2, 3], [1, 2, 4], [1, 5], [6]]
    tables: list[tuple[list[int], list[Key]]] = []
    for step in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["open", "open", "close", "retag"]))
        if action == "open":
            keys = ledger.keys(data.draw(st.sampled_from(prompts)))
            hit = ledger.match(keys)
            expected = []
            for key in keys:
                model_block = model.find(key)
                if model_block is None:
                    break
                expected.append(model_block)
            assert hit == expected
            if ledger.free - ledger.unused(hit) < len(keys) - len(hit):
                continue
            ledger.share(hit)
            for block in hit:
                model.refs[block] = model.refs.get(block, 0) + 1
                if block in model.idle:
                    model.idle.remove(block)
            fresh = ledger.allocate(len(keys) - len(hit))
            never = total - len(model.refs.keys() | set(model.idle))
            forgotten = model.idle[: max(0, len(fresh) - max(never, 0))]
            for block in forgotten:
                model.idle.remove(block)
                model.content.pop(block)
            assert not any(model.refs.get(block) for block in fresh)
            assert all(block in forgotten or block not in model.content for block in fresh)
            model.refs.update(dict.fromkeys(fresh, 1))
            for block, key in zip(fresh, keys[len(hit) :], strict=True):
                ledger.commit(block, key)
                model.content[block] = key
            tables.append((hit + fresh, keys))
        elif action == "close" and tables:
            blocks, _ = tables.pop(data.draw(st.integers(0, len(tables) - 1)))
            ledger.release(blocks)
            for block in reversed(blocks):
                model.refs[block] -= 1
                if not model.refs[block]:
                    del model.refs[block]
                    if block in model.content:
                        model.idle.append(block)
        elif action == "retag":
            ledger.retag(step)
            model.content.clear()
            model.idle.clear()
        ledger.check()
        assert ledger.used == len(model.refs)
        assert all(ledger.references(block) == count for block, count in model.refs.items())


@given(
    st.lists(
        st.tuples(st.sampled_from(["take", "return", "remove", "restore"]), st.integers(0, 7)),
        max_size=40,
    )
)
def test_absent_blocks_are_neither_held_nor_hit(steps: list[tuple[str, int]]) -> None:
    ledger = BlockLedger(blocks=8, block_tokens=SIZE)
    held: list[int] = []
    absent: set[int] = set()
    for number, (step, block) in enumerate(steps):
        if step == "take" and ledger.free:
            held.extend(ledger.allocate(1))
            ledger.commit(held[-1], ledger.keys([number] * SIZE)[0])
            assert held[-1] not in absent
        elif step == "return" and held:
            ledger.release([held.pop(0)])
        elif step == "remove":
            if block in held or block in absent:
                with pytest.raises(ValueError, match=f"a removed block must be free, got {block}"):
                    ledger.remove([block])
            else:
                ledger.remove([block])
                absent.add(block)
        elif step == "restore":
            if block in absent:
                ledger.restore([block])
                absent.remove(block)
            else:
                with pytest.raises(ValueError, match="restored blocks must be absent"):
                    ledger.restore([block])
        ledger.check()
        assert ledger.free == 8 - len(held) - len(absent)
        assert ledger.used == len(held)
        for earlier in range(number + 1):
            assert not absent & set(ledger.match(ledger.keys([earlier] * SIZE)))
