"""What a rank has worked out once for a set of collections: who owns what, how outputs are put
together, what a key list sends.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from rayrec.distributed.program.slots import SlotTable
from rayrec.distributed.program.spans import CombinePlan, plan_combine
from rayrec.distributed.steps.compact import CompactPlan
from rayrec.distributed.steps.route import SendPlan, plan_send
from rayrec.sparse import KeyedJaggedTensor


@dataclass(frozen=True)
class Compiled:
    """Slots and plans of one set of collections on one rank.

    Attributes:
        sends, compact: by key list, filled as they are met.
    """

    slots: SlotTable
    combine: CombinePlan
    device: torch.device
    sends: dict[tuple[str, ...], SendPlan] = field(default_factory=dict)
    compact: dict[tuple[str, ...], CompactPlan] = field(default_factory=dict)

    @classmethod
    def of(cls, slots: SlotTable, rank: int, device: torch.device) -> Compiled:
        """Compile for `rank`, whose tensors lie on `device`."""
        return cls(slots, plan_combine(slots, rank, device), device)

    def send_plan(self, kjt: KeyedJaggedTensor) -> SendPlan:
        """How the features of a KJT are sent."""
        keys = tuple(kjt.keys())
        if keys not in self.sends:
            self.sends[keys] = plan_send(self.slots, keys, self.device)
        return self.sends[keys]

    def compact_plan(self, kjt: KeyedJaggedTensor) -> CompactPlan:
        """Which rows of those features may come home without some bags."""
        keys = tuple(kjt.keys())
        if keys not in self.compact:
            self.compact[keys] = CompactPlan.of(self.slots, self.send_plan(kjt), self.device)
        return self.compact[keys]
