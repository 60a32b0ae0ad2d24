"""HSTU as a click model: one sequence for each row, whose last token is the candidate.

The sequence of a row has first its context, a token for each pooled feature and one for the dense
columns; then a token for each event of the history, made of the event's rows of all tables (an
item, its artist, what the user did); and last the candidate, of the same tables' rows. Attention is
causal, so the candidate sees all of it. Its state, times what an MLP makes of the candidate's rows
alone, goes through an MLP to the logits. All is done on the tokens that there are; the host waits
for nothing, and no loop goes over rows.

    # B rows, T events of all of them, C tokens of context, D width of the encoder
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from rayrec.data.batch import keys_of
from rayrec.errors import ConfigError, InputError
from rayrec.models.din import aligned_offsets, summed
from rayrec.models.dlrm_parts import ClickBatch, DenseArch, Device, OverArch
from rayrec.modules import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    HSTUEncoder,
    SwishLayerNorm,
    get_embedding_names_by_table,
)
from rayrec.modules.jagged_rows import JaggedOffsets
from rayrec.sparse import JaggedTensor, KeyedJaggedTensor


class TimedBatch(ClickBatch, Protocol):
    """Batch of a model that reads times: a click batch with sequences of the same rows."""

    @property
    def sequences(self) -> Mapping[str, JaggedTensor]: ...


class HSTURanking(nn.Module):
    """HSTU for ranking: (B, I), ids -> logits (B, over_arch_layer_sizes[-1]).

    Args:
        embedding_collections: tables of histories and candidates, a collection for each width.
        histories: history -> its candidate, both outputs of the collections. None stands for a
            history alone, such as what the user did at each event, which is not known of the
            candidate: its place in the candidate's token is zeros. All histories of a row have
            equally many events. A candidate of several ids is the sum of their rows, of none zeros.
        encoder: of D columns, and of sequences of C + 1 tokens beside the longest history.
        over_arch_layer_sizes: layers of the MLP behind the product; the last is 1 for one logit.
        embedding_bag_collection: pooled tables of any widths, or None.
        dense_in_features: I; 0 for none.
        dense_arch_layer_sizes: layers of an MLP of the dense columns before their token.
        hidden: width of the hidden layer of the MLP that makes an event's token; D unless given.
        times: sequence of the batch with the time of each event, for an encoder with a bias of
            time; None for one without.
        candidate_time: sequence of the batch with one time for each row, the candidate's; where it
            is None the candidate has the time of the last event. The context has the candidate's.
    Raises:
        ConfigError: there is no history or no candidate, or it is not looked up, or times and
            encoder do not fit.
    Source: Zhai et al., Actions Speak Louder than Words (HSTU), ICML 2024, and the ranking model of
    MLPerf Training's recommendation benchmark, v4 (mlcommons/training, f9353f6).
    Differences: those of `HSTUEncoder`; one dropout; the hour and the day of the week of a row are
    features of its context like others, and the MLP before the logits has ReLU.
    """

    def __init__(
        self,
        embedding_collections: Sequence[EmbeddingCollection],
        histories: Mapping[str, str | None],
        encoder: HSTUEncoder,
        over_arch_layer_sizes: Sequence[int],
        embedding_bag_collection: EmbeddingBagCollection | None = None,
        dense_in_features: int = 0,
        dense_arch_layer_sizes: Sequence[int] = (),
        hidden: int | None = None,
        times: str | None = None,
        candidate_time: str | None = None,
        dense_device: Device = None,
    ) -> None:
        super().__init__()
        self.histories, self.times, self.candidate_time = dict(histories), times, candidate_time
        self.candidates = list(dict.fromkeys(one for one in histories.values() if one is not None))
        self._widths = _widths(embedding_collections)
        self._check(encoder)
        self.embedding_collections = nn.ModuleList(embedding_collections)
        self.embedding_bag_collection = embedding_bag_collection
        dim, device = encoder.dim, dense_device
        self.dense_arch: nn.Module | None = None
        self._context_widths = []
        if dense_in_features:
            self.dense_arch = nn.Identity()
            if dense_arch_layer_sizes:
                self.dense_arch = DenseArch(dense_in_features, dense_arch_layer_sizes, device)
            self._context_widths.append([dense_in_features, *dense_arch_layer_sizes][-1])
        if embedding_bag_collection is not None:
            tables = embedding_bag_collection.embedding_bag_configs()
            self._context_widths += [t.embedding_dim for t in tables for _ in t.feature_names]
        # a name of a feature may not name a module, so they are numbered
        self.contexts = nn.ModuleList(
            nn.Linear(width, dim, device=device) for width in self._context_widths
        )
        of_event = sum(self._widths[name] for name in self.histories)
        of_candidate = sum(self._widths[name] for name in self.candidates)
        self.event_arch = _token_arch(of_event, hidden or dim, dim, device)
        self.candidate_arch = _token_arch(of_candidate, dim, dim, device)
        self.encoder = encoder
        self.over_arch = OverArch(dim, over_arch_layer_sizes, device)

    def _check(self, encoder: HSTUEncoder) -> None:
        named = [*self.histories, *self.candidates]
        missing = [name for name in named if name not in self._widths]
        if missing or not self.candidates:
            what = f"histories name {missing[0]!r}" if missing else "no history has a candidate"
            raise ConfigError(
                f"{what}; histories and candidates are outputs of the EmbeddingCollections, which "
                f"are {sorted(self._widths)}."
            )
        if (self.times is None) == bool(encoder.time_buckets):
            raise ConfigError(
                f"times={self.times!r} and an encoder with time_buckets={encoder.time_buckets}; "
                "name the sequence of times, or make the encoder with time_buckets=0."
            )
        if self.times is None and self.candidate_time is not None:
            raise ConfigError(
                f"candidate_time={self.candidate_time!r} without times; name the times of the "
                "events, too, or leave it out."
            )

    def forward_batch(self, batch: TimedBatch) -> Tensor:
        """Return the logits of a batch, with its times, and dropout by its place in the run."""
        names = self.times, self.candidate_time
        events, own = (None if name is None else batch.sequences[name] for name in names)
        keys = keys_of(batch) if self.training else None
        logits: Tensor = self(batch.dense_features, batch.sparse_features, events, own, keys)
        return logits

    def forward(
        self,
        dense_features: Tensor,
        sparse_features: KeyedJaggedTensor,
        times: JaggedTensor | None = None,
        candidate_times: JaggedTensor | None = None,
        keys: Tensor | None = None,
    ) -> Tensor:
        """Score rows.

        Args:
            dense_features: (B, I).
            sparse_features: ids of B rows; B may be 0. All histories may have one bag, that of a
                user whose candidates the rows are, and times one row, too; then the context is that
                of the first row, and the history is encoded once, without dropout.
            times, candidate_times: seconds of the events, and one for each row.
            keys: (B,) int64 of `row_keys`, for dropout that does not depend on ranks.
        Returns:
            (B, over_arch_layer_sizes[-1]) logits.
        Raises:
            InputError: histories of a row differ in length, or times are not one for each (seen on
                CPU; elsewhere where their sums differ); or the encoder's.
        """
        rows: dict[str, JaggedTensor] = {}
        for collection in self.embedding_collections:
            rows |= collection(sparse_features)
        past = {name: rows[name] for name in self.histories}
        offsets = aligned_offsets(past | ({} if times is None else {"times": times}))
        candidates = {name: summed(rows[name]) for name in self.candidates}
        events = torch.cat([one.values() for one in past.values()], dim=1)
        context = self._context(dense_features, sparse_features)
        places = _places(offsets, len(events), len(self.contexts))
        of_candidates = torch.cat(list(candidates.values()), dim=1)
        tokens = self.event_arch(torch.cat([events, self._last(candidates, events)]))
        # the encoder multiplies by the root of D, which is meant for the small rows of tables
        tokens = tokens * self.encoder.dim**-0.5
        seconds = None
        if times is not None:
            own = _own_times(places, times, candidate_times, self.candidate_time)
            seconds = torch.cat([*[own] * len(context), times.values(), own])
        if len(offsets) == 2 and len(of_candidates) != 1:
            before, targets = tokens.tensor_split([len(events)])
            before = torch.cat([*(one[:1] for one in context), before])
            if seconds is not None:
                seconds = torch.cat([seconds, seconds[-1:].expand(len(targets) - 1)])
            last = self.encoder.encode_targets(before, targets, seconds)
        else:
            sequence = places.join(torch.cat([*context, tokens]))
            seconds = None if seconds is None else places.join(seconds)
            states = self.encoder(sequence, places.offsets, seconds, keys)
            last = states.index_select(0, places.last)
        return self.over_arch(last * self.candidate_arch(of_candidates))

    def _context(self, dense_features: Tensor, ids: KeyedJaggedTensor) -> list[Tensor]:
        """C tokens of context, (B, D) each."""
        columns = [] if self.dense_arch is None else [self.dense_arch(dense_features)]
        if self.embedding_bag_collection is not None:
            pooled = self.embedding_bag_collection(ids).values()
            columns += pooled.split(self._context_widths[len(columns) :], dim=1)
        return [layer(own) for layer, own in zip(self.contexts, columns, strict=True)]

    def _last(self, candidates: dict[str, Tensor], events: Tensor) -> Tensor:
        """Rows of the candidates in the order of those of the events, (B, their columns)."""
        rows = len(next(iter(candidates.values())))
        parts = [
            events.new_zeros(rows, self._widths[history])
            if candidate is None
            else candidates[candidate]
            for history, candidate in self.histories.items()
        ]
        return torch.cat(parts, dim=1)


class _Places(NamedTuple):
    """The places of the tokens in their sequences.

    Attributes:
        events: sequences of the T events.
        offsets: (B + 1,) of all tokens.
        contexts: C.
        order: places of the tokens where they come by kind: C times the context of B rows, T
            events, B candidates.
        last: (B,) places of the candidates.
    """

    events: JaggedOffsets
    offsets: Tensor
    contexts: int
    order: Tensor
    last: Tensor

    def join(self, by_kind: Tensor) -> Tensor:
        """Bring what comes by kind into the sequences."""
        return torch.empty_like(by_kind).index_copy(0, self.order, by_kind)


def _places(offsets: Tensor, events: int, contexts: int) -> _Places:
    own = JaggedOffsets(offsets, events)
    joined = own.offsets + (contexts + 1) * torch.arange(len(offsets), device=offsets.device)
    first, last = joined[:-1], joined[1:] - 1
    number = torch.arange(events, device=offsets.device)
    of_events = number + own.row * (contexts + 1) + contexts
    of_context = [first + place for place in range(contexts)]
    return _Places(own, joined, contexts, torch.cat([*of_context, of_events, last]), last)


def _own_times(
    places: _Places, times: JaggedTensor, candidate_times: JaggedTensor | None, name: str | None
) -> Tensor:
    """The time of each candidate, (B,)."""
    events, rows = times.values(), len(places.last)
    if candidate_times is None:
        ends, lengths = places.events.offsets[1:], places.events.lengths
        # without an event any time will do: the row has no other
        padded = torch.cat([events, events.new_zeros(1)])
        return padded.index_select(0, torch.where(lengths > 0, ends - 1, len(events)))
    own, lengths = candidate_times.values(), candidate_times.lengths()
    wrong = (lengths != 1).nonzero() if lengths.is_cpu else lengths[:0]
    if len(wrong):
        row = int(wrong[0])
        raise InputError(
            f"the candidate in row {row} of the batch has {int(lengths[row])} times, in {name!r}; "
            "each row needs one."
        )
    if len(own) != rows:
        raise InputError(
            f"the candidates of {rows} rows have {len(own)} times, in {name!r}; each row needs one."
        )
    return own


def _widths(collections: Sequence[EmbeddingCollection]) -> dict[str, int]:
    """Return the columns of each output of some collections."""
    widths: dict[str, int] = {}
    for collection in collections:
        names = get_embedding_names_by_table(collection.embedding_configs())
        own = {name: collection.embedding_dim() for of_table in names for name in of_table}
        if twice := own.keys() & widths.keys():
            raise ConfigError(f"two EmbeddingCollections look up {min(twice)!r}; leave one out.")
        widths |= own
    return widths


def _token_arch(columns: int, hidden: int, dim: int, device: Any) -> nn.Module:
    return nn.Sequential(
        nn.Linear(columns, hidden, device=device),
        SwishLayerNorm(hidden, device),
        nn.Linear(hidden, dim, device=device),
        nn.LayerNorm(dim, device=device),
    )
