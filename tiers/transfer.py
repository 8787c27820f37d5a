"""Moving bytes between a device pool and the host, behind a small interface.

A transfer copies pages and decides nothing: who calls it has chosen both sides, with equal owners
page by page. Calls return a ticket at once; transfers finish in the order of the calls.
"""

from __future__ import annotations

from typing import Protocol

from alloc import PageIds


class TransferError(RuntimeError):
    """A transfer was refused and copied nothing; every rank of a group must refuse it alike."""


class Ticket(Protocol):
    """A transfer that has been started."""

    def is_done(self) -> bool:
        """Say whether all bytes have arrived; never waits."""

    def fence(self) -> None:
        """Make later work of the current stream wait for the transfer; the host goes on."""


class Transfer(Protocol):
    """Copies pages between one rank's device pool and its host pool."""

    def store(self, device_pages: PageIds, host_pages: PageIds) -> Ticket:
        """Start copying device pages to the host, behind the work that writes them.

        Args:
            device_pages: int64[n] pages of the device pool.
            host_pages: int64[n] pages of the host pool, page by page of the same owner.

        Raises:
            TransferError: refused; nothing was copied.
            ValueError: the owners differ: the rows would come back on a rank that lacks them.
        """

    def load(self, host_pages: PageIds, device_pages: PageIds) -> Ticket:
        """Start copying host pages to the device, layer by layer; see ``store`` for the rest."""

    def wait_layer(self, layer_id: int) -> None:
        """Make the current stream wait until every load so far has filled a layer.

        Later layers may still be on their way.
        """

    def drain(self) -> None:
        """Wait on the host until every transfer so far is done."""


class _Done:
    """The ticket of a transfer that is over before it is returned."""

    __slots__ = ()

    def is_done(self) -> bool:
        """Return True."""
        return True

    def fence(self) -> None:
        """Do nothing."""


DONE: Ticket = _Done()


class NullTransfer:
    """Moves no bytes: for a replay, which has pages and no KV."""

    __slots__ = ()

    def store(self, device_pages: PageIds, host_pages: PageIds) -> Ticket:
        """Return at once."""
        return DONE

    def load(self, host_pages: PageIds, device_pages: PageIds) -> Ticket:
        """Return at once."""
        return DONE

    def wait_layer(self, layer_id: int) -> None:
        """Return at once."""

    def drain(self) -> None:
        """Return at once."""
