"""Tables trade places so that a rank holds neighbours in the collection's order of tables.

A rank's columns are then few wide runs of the output instead of many narrow ones, which are joined
and cut 1.3 to 1.5 times as fast where rows travel and matrices outgrow the caches. That is not
priced, so the slowest rank may get 1% more of what is; bytes stay within the limits. Standard
library only.
"""

from __future__ import annotations

from collections.abc import Sequence

from rayrec.planner.packing import Choice, Packing

MORE = 1.01


def seat_neighbours(packing: Packing, more: float = MORE) -> list[Choice]:
    """The choices, with single-rank items that may lie on the same ranks seated in order.

    Items with rivals keep their place. Where no seats near that order keep the slowest rank about
    as fast, a group stays as it was.

    Args:
        packing: a place for every item; it stays as it is.
        more: times the seconds of the slowest rank that it may take then.
    """
    locality = packing.locality
    choices = [packing.choices[item] for item in range(len(packing.items))]
    groups: dict[object, list[int]] = {}
    for i, (item, choice) in enumerate(zip(packing.items, choices, strict=True)):
        if choice.option.num_ranks == 1 and not choice.option.replicated and not item.rivals:
            key = choice.option.sites, locality[choice.ranks[0]], choice.option.home_bytes
            groups.setdefault(key, []).append(i)
    seated = list(choices)
    loads = packing.loads
    used = [own + packing.home_bytes for own in packing.used]
    top = max(loads) * more
    # A rank that is over its limit already gets no more.
    most = [max(limit, old) for limit, old in zip(packing.limits, used, strict=True)]
    for group in groups.values():
        near = locality[choices[group[0]].ranks[0]]
        seats = _Seats(
            [choices[i].option.seconds[near][0] for i in group],
            [choices[i].ranks[0] for i in group],
            loads,
        )
        seats.sort()
        seats.even_out(top)
        after = list(used)
        for i, rank in zip(group, seats.ranks, strict=True):
            after[choices[i].ranks[0]] -= choices[i].option.num_bytes[0]
            after[rank] += choices[i].option.num_bytes[0]
        fits = all(new <= limit for new, limit in zip(after, most, strict=True))
        if max(seats.loads) <= top and fits:
            loads, used = seats.loads, after
            for i, rank in zip(group, seats.ranks, strict=True):
                seated[i] = Choice(choices[i].option, (rank,))
    return seated


class _Seats:
    """The ranks of one group of items, with what every item costs wherever it is."""

    def __init__(
        self, seconds: Sequence[float], ranks: Sequence[int], loads: Sequence[float]
    ) -> None:
        self.seconds, self.ranks, self.loads = seconds, list(ranks), list(loads)

    def sort(self) -> None:
        """Items in order take ranks in order; every rank gets about the seconds it had."""
        shares = dict.fromkeys(sorted(set(self.ranks)), 0.0)
        for rank, value in zip(self.ranks, self.seconds, strict=True):
            shares[rank] += value
        left = list(shares.items())
        for i, value in enumerate(self.seconds):
            # A rank is full when less than half of the item fits: its rest goes to the next rank.
            while len(left) > 1 and left[0][1] < value / 2:
                (_, rest), (rank, share) = left[:2]
                left[:2] = [(rank, share + rest)]
            self._move(i, left[0][0])
            left[0] = (left[0][0], left[0][1] - value)

    def even_out(self, top: float) -> None:
        """Exchange single items until no rank has more than `top` seconds, or no exchange helps.

        Each turn takes the slowest rank and trades one of its items for a cheaper one elsewhere. It
        prefers the trade that comes nearest to what the rank has too much.
        """
        on_rank: dict[int, list[int]] = {}
        for i, rank in enumerate(self.ranks):
            on_rank.setdefault(rank, []).append(i)
        # A trade may leave the rank still over `top`, so the turns are bounded: two for each rank.
        for _ in range(2 * len(on_rank)):
            worst = max(on_rank, key=lambda rank: self.loads[rank])
            over = self.loads[worst] - top
            if over <= 0:
                return
            best: tuple[float, int, int] | None = None
            for other, theirs in on_rank.items():
                room = top - self.loads[other]
                if other == worst or room <= 0:
                    continue
                for i in on_rank[worst]:
                    for j in theirs:
                        gain = self.seconds[i] - self.seconds[j]
                        # The other rank takes the gain over, so it must have room for it below
                        # `top`.
                        if 0 < gain <= room and (best is None or abs(gain - over) < best[0]):
                            best = abs(gain - over), i, j
            if best is None:
                return
            _, i, j = best
            there = self.ranks[j]
            self._move(i, there)
            self._move(j, worst)
            on_rank[worst] = [k for k in on_rank[worst] if k != i] + [j]
            on_rank[there] = [k for k in on_rank[there] if k != j] + [i]

    def _move(self, item: int, rank: int) -> None:
        self.loads[self.ranks[item]] -= self.seconds[item]
        self.loads[rank] += self.seconds[item]
        self.ranks[item] = rank
