"""Transfers that finish, and fail, when the test says so."""

from radix import EvictParams
from tests.tiers.tier_worlds import make_rank
from tiers import NullTransfer, TransferError

A = [1, 2, 3, 4, 5, 6, 7, 8]


class Hand:
    """A ticket that is done when the test says so."""

    def __init__(self):
        self.done = False
        self.fenced = False

    def is_done(self):
        return self.done

    def fence(self):
        self.fenced = True


class ByHand(NullTransfer):
    """Keeps every transfer's arguments; refuses when told to."""

    def __init__(self, *_):
        self.stores, self.loads, self.refuse = [], [], False

    def _take(self, into, *pages):
        if self.refuse:
            raise TransferError("refused")
        ticket = Hand()
        into.append((*(p.tolist() for p in pages), ticket))
        return ticket

    def store(self, device_pages, host_pages):
        return self._take(self.stores, device_pages, host_pages)

    def load(self, host_pages, device_pages):
        return self._take(self.loads, host_pages, device_pages)


def make(**settings):
    return make_rank(**{"ps": 2, "bytes_too": False, "transfer": ByHand, **settings})


def moves_of(rank):
    return rank.cache.host.transfer


def evict(rank, num_tokens=1000):
    result = rank.cache.evict(EvictParams(num_tokens))
    rank.cache.check_invariants()
    return result
