"""One thread, one order of calls: races are refused, and whoever asks again gets the same."""

from __future__ import annotations

import threading

from radix import alloc_for_extend
from tests.builders import make_req, make_world


def test_equal_calls_choose_equal_slots_and_victims():
    """V1: ranks broke ties by address or clock, evicted other pages and waited for ever."""
    seen = []
    for noise in (0, 1_000):
        junk = [object() for _ in range(noise)]
        world = make_world(4, 8)
        for i in range(8):
            world.insert([i] * 4)
        world.match([3] * 4)
        chosen = []
        for _ in range(8):
            world.evict(4)
            chosen.append(world.draw(1).tolist())
        seen.append((chosen, world.allocator.state_digest()))
        del junk
    assert seen[0] == seen[1]


def test_room_that_went_between_question_and_draw_is_none():
    """V2: two calls, first asked and then took, and another owner came between them."""
    world = make_world(1, 4)
    assert world.allocator.available_size() == 4
    taken = world.draw(2)
    before = world.allocator.state_digest()
    assert world.allocator.alloc(4) is None
    assert before == world.allocator.state_digest()
    world.insert([1, 2], taken)
    req = make_req(range(50, 54), fill_len=4)
    world.cache.match_req(req)
    placed = alloc_for_extend(world.cache, [req])
    assert placed is not None
    assert (len(placed.pages), placed.num_tokens_evicted) == (4, 2)


def test_a_second_thread_inside_a_commit_is_refused(monkeypatch):
    """V3: a reader in another thread saw a tree in the middle of a change."""
    world = make_world()
    errors: list[str] = []
    adopt = world.core.component.adopt

    def meddle() -> None:
        try:
            world.match([1, 2])
        except RuntimeError as error:
            errors.append(str(error))

    def slow_adopt(node: object) -> None:
        thread = threading.Thread(target=meddle)
        thread.start()
        thread.join()
        adopt(node)

    monkeypatch.setattr(type(world.core.component), "adopt", lambda self, node: slow_adopt(node))
    world.insert([1, 2])
    assert len(errors) == 1
    assert "two threads" in errors[0]
    assert world.peek_len([1, 2]) == 2
    world.check()


def test_a_match_that_lost_its_pages_is_walked_again():
    """V4: a look-up promised pages that were gone when they were used."""
    world = make_world()
    world.insert(range(8))
    match = world.match(range(8))
    world.evict(8)
    result = world.insert(range(8), handle=match.handle)
    assert (result.prefix_len, world.sizes()) == (0, (8, 0))
    world.check()
