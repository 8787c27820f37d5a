"""What `--shards` and the options beside it ask for: how a group of ranks serves requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from replay.errors import ReplayError

LAYOUTS = ("interleave", "owner-lane")
INTERLEAVE, OWNER_LANE = LAYOUTS
ROTATIONS = ("chain", "seam")
DEFAULT_ROTATION = "seam"
MAX_RANKS = 1024
MAX_IN_FLIGHT = 1024


@dataclass(frozen=True, slots=True)
class Schedule:
    """How one group of ranks shares its pool, and how requests overlap on it.

    Attributes:
        ranks: Ranks that share the pool; 1 is a pool that every rank holds a copy of.
        in_flight: Requests that are placed and not inserted yet, at most.
        rotation: `chain` or `seam`; without meaning for one rank or owner lanes.
        use_leases: Under `chain`, give requests in flight that share an uncached first page the
            same base.
        aimed_eviction: Make room class by class; False evicts in policy order alone.
        layout: `interleave` or `owner-lane`; without meaning for one rank.
    """

    ranks: int
    in_flight: int = 1
    rotation: str = DEFAULT_ROTATION
    use_leases: bool = True
    aimed_eviction: bool = True
    layout: str = INTERLEAVE

    @property
    def owner_lanes(self) -> bool:
        """Whether pages lie on the ranks that compute them."""
        return self.ranks > 1 and self.layout == OWNER_LANE


@dataclass(frozen=True, slots=True)
class ShardOptions:
    """The options as the user gave them.

    Attributes:
        shards: Ranks, one number or a comma list; None for no sharding.
        in_flight: Overlapping requests, one number or a comma list; None is 1.
        layout: Where pages lie, one name or a comma list; None is `interleave`.
        rotation: Rotation policies, one name or a comma list; None is `seam`.
        no_leases: Whether leases are off.
        blind_eviction: Whether eviction ignores which classes are short.
    """

    shards: str | None = None
    in_flight: str | None = None
    layout: str | None = None
    rotation: str | None = None
    no_leases: bool = False
    blind_eviction: bool = False

    def schedules(self) -> tuple[Schedule, ...]:
        """Return the schedules to compare, the replicated pool first; none without `--shards`.

        Raises:
            ReplayError: If a list is not of its grammar, or an option has nothing to act on.
        """
        if self.shards is None:
            self._check_unused()
            return ()
        ranks = _numbers("--shards", self.shards, MAX_RANKS, "4,8")
        in_flight = _numbers("--in-flight", self.in_flight, MAX_IN_FLIGHT, "1,8,32")
        layouts = _names("--layout", "layout", self.layout, LAYOUTS, INTERLEAVE)
        rotations = _names("--rotation", "rotation", self.rotation, ROTATIONS, DEFAULT_ROTATION)
        self._check_bases(layouts, rotations)
        replicated = [Schedule(1, k) for k in in_flight]
        sharded = [
            replace(kind, ranks=n, in_flight=k)
            for n in ranks
            if n > 1
            for layout in layouts
            for kind in self._kinds(layout, rotations)
            for k in in_flight
        ]
        return (*replicated, *sharded)

    def _kinds(self, layout: str, rotations: list[str]) -> list[Schedule]:
        """Return the ways to place pages under one layout, whatever the ranks and the overlap."""
        aimed = not self.blind_eviction
        if layout == OWNER_LANE:
            return [Schedule(1, aimed_eviction=aimed, layout=layout)]
        return [Schedule(1, 1, name, not self.no_leases, aimed, layout) for name in rotations]

    def _check_bases(self, layouts: list[str], rotations: list[str]) -> None:
        """Refuse what only rotation bases have where there are none."""
        if INTERLEAVE not in layouts:
            for name, given in (
                ("--rotation", self.rotation is not None),
                ("--no-leases", self.no_leases),
            ):
                if given:
                    raise ReplayError(
                        f"{name}: owner lanes have no rotation bases; leave it out, or add "
                        "--layout interleave"
                    )
        if self.no_leases and "chain" not in rotations:
            raise ReplayError(
                "--no-leases: only the chain rotation has leases; add --rotation chain"
            )

    def _check_unused(self) -> None:
        used = {
            "--in-flight": self.in_flight is not None,
            "--layout": self.layout is not None,
            "--rotation": self.rotation is not None,
            "--no-leases": self.no_leases,
            "--blind-eviction": self.blind_eviction,
        }
        for name, given in used.items():
            if given:
                raise ReplayError(f"{name}: needs a sharded pool; add --shards, such as --shards 8")


def _numbers(option: str, text: str | None, highest: int, example: str) -> list[int]:
    """Read a list of whole numbers from 1 on; 1 if there is none."""
    if text is None:
        return [1]
    numbers: dict[int, None] = {}
    for item in text.split(","):
        word = item.strip()
        # isdecimal alone would take other scripts' digits.
        plain = word.isascii() and word.isdecimal() and len(word) <= len(str(highest))
        if not plain or not 1 <= int(word) <= highest:
            raise ReplayError(
                f"{option} {text!r}: {word!r} is no whole number from 1 to {highest}; give one, or "
                f"a list such as {example}"
            )
        numbers[int(word)] = None
    return list(numbers)


def _names(option: str, kind: str, text: str | None, known: Sequence[str], usual: str) -> list[str]:
    """Read a list of names; the usual one if there is none."""
    if text is None:
        return [usual]
    names = dict.fromkeys(item.strip() for item in text.split(","))
    for name in names:
        if name not in known:
            raise ReplayError(
                f"{option} {text!r}: {name!r} is no {kind}; give {known[0]}, {known[1]} or "
                f"{','.join(known)}"
            )
    return list(names)
