"""Feature processors: learnable weights of ids, by the place of an id in its bag.

A processor takes a batch of ids and gives the same ids with weights;
`FeatureProcessedEmbeddingBagCollection` puts one before a weighted collection. The weights are
ordinary dense parameters of a few floats per feature, so gradients reach them through the pooling.
Names and parameter names are TorchRec's. One difference: a feature without a processor keeps its
weights, or has weight 1 when there are none.

Cost: one pass over the ids for their places and one gather. An id beyond the last place is an
error, never a silent reuse of a weight.

    # F keys, N ids, L places of a feature
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from rayrec.errors import ConfigError, InputError
from rayrec.layout.tables import EmbeddingBagConfig
from rayrec.modules.embedding_bag import EmbeddingBagCollection
from rayrec.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from rayrec.sparse.ops import offsets_of, to_device


def places_in_bags(offsets: Tensor, num_ids: int) -> Tensor:
    """The place of each id in its bag.

    Args:
        offsets: (bags + 1,) integers from 0 to num_ids.
        num_ids: N, so that no host sync is needed.
    Returns:
        (N,) int64, 0 for the first id of each bag.
    """
    starts = torch.repeat_interleave(
        offsets[:-1].long(), offsets.diff().long(), output_size=num_ids
    )
    return torch.arange(num_ids, device=offsets.device) - starts


class PositionWeightedModule(nn.Module):
    """One weight, at first 1, per place in a bag: parameter `position_weight` (L,).

    Args:
        max_feature_length: L, the longest bag.
    Raises:
        ConfigError: max_feature_length is below 1.
    """

    def __init__(self, max_feature_length: int, device: torch.device | str | None = None) -> None:
        super().__init__()
        if max_feature_length < 1:
            raise ConfigError(f"max_feature_length={max_feature_length} must be at least 1.")
        self.position_weight = nn.Parameter(torch.empty(max_feature_length, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight of every place to 1."""
        nn.init.ones_(self.position_weight)

    def forward(self, features: JaggedTensor) -> JaggedTensor:
        """Return the same bags, each id with the weight of its place.

        Raises:
            InputError: a bag is longer than the places (on CPU; on CUDA an assertion in the
                kernel).
        """
        ids = features.values()
        _check_longest(features.lengths(), len(self.position_weight), "a feature")
        weights = self.position_weight.index_select(
            0, places_in_bags(features.offsets(), ids.numel())
        )
        return JaggedTensor(ids, weights, features.lengths(), features.offsets())


class PositionWeightedModuleCollection(nn.Module):
    """One weight, at first 1, per place in the bags of several features.

    The parameters are `position_weights.<feature>` (L,).

    Args:
        max_feature_lengths: feature -> L, its longest bag.
    Raises:
        ConfigError: a length is below 1, or a feature's name cannot name a parameter.
    """

    def __init__(
        self, max_feature_lengths: Mapping[str, int], device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        for feature, length in max_feature_lengths.items():
            if length < 1:
                raise ConfigError(
                    f"feature {feature!r} has max_feature_length={length}; it must be at least 1."
                )
            _check_name(feature, nn.ParameterDict())
        self.max_feature_lengths = dict(max_feature_lengths)
        self.position_weights = nn.ParameterDict()
        for feature, length in max_feature_lengths.items():
            self.position_weights[feature] = nn.Parameter(torch.empty(length, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight of every place to 1."""
        for weight in self.position_weights.values():
            nn.init.ones_(weight)

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Return the same batch, with the ids of these features weighted by their places.

        Args:
            features: any keys; keys without places keep their weights, or weigh 1.
        Raises:
            InputError: a bag is longer than its feature's places (on CPU; on CUDA an assertion in
                the kernel).
        """
        ids, keys = features.values(), features.keys()
        bags = features.stride_per_key()
        lengths = features.lengths().reshape(-1)
        missing = [feature for feature in self.max_feature_lengths if feature not in keys]
        if missing:
            # every parameter must take part in every step, or DDP would wait for its gradient; so
            # an absent feature is a mistake
            raise InputError(
                f"the batch has no feature {missing[0]!r}, whose places have weights; it has "
                f"{keys}."
            )
        for key, part in zip(keys, lengths.split(bags), strict=True):
            if key in self.max_feature_lengths:
                _check_longest(part, self.max_feature_lengths[key], f"feature {key!r}")
        places = [self.position_weights[feature] for feature in self.max_feature_lengths]
        # the entry behind all places is 1, for keys without places
        *starts, one = offsets_of(self.max_feature_lengths.values())
        firsts = dict(zip(self.max_feature_lengths, starts, strict=True))
        shift = to_device([firsts.get(key, one) for key in keys], ids.device)
        has = to_device([int(key in firsts) for key in keys], ids.device)
        # (2, F) -> (2, bags) -> (2, N): where the key's places begin, and whether it has any;
        # the sizes are known on the host, so no step waits for the device
        per_key = torch.stack([shift, has])
        times = to_device(bags, ids.device)
        per_bag = torch.repeat_interleave(per_key, times, dim=1, output_size=sum(bags))
        per_id = torch.repeat_interleave(per_bag, lengths.long(), dim=1, output_size=ids.numel())
        where = per_id[0] + per_id[1] * places_in_bags(features.offsets(), ids.numel())
        weights = torch.cat([*places, torch.ones(1, device=ids.device)]).index_select(0, where)
        given = features.weights_or_none()
        if given is not None:
            weights = torch.where(per_id[1].bool(), weights, given.to(weights.dtype))
        return features._like(weights=weights)


class FeatureProcessorDictWrapper(nn.Module):
    """Processors of single features as one module from KeyedJaggedTensor to KeyedJaggedTensor.

    Args:
        feature_processors: feature -> module from JaggedTensor to JaggedTensor with weights.
    """

    def __init__(self, feature_processors: nn.ModuleDict) -> None:
        super().__init__()
        self._feature_processors = feature_processors

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """The same batch with weights; keys without a processor keep theirs, or weigh 1.

        Raises:
            InputError: the batch misses a feature that has a processor.
        """
        missing = sorted(set(self._feature_processors) - set(features.keys()))
        if missing:
            raise InputError(
                f"the batch has no feature {missing[0]!r}, which has a processor; it has "
                f"{features.keys()}."
            )
        parts = []
        for key, bags in features.to_dict().items():
            weights = bags.weights_or_none()
            if key in self._feature_processors:
                weights = self._feature_processors[key](bags).weights()
            elif weights is None:
                weights = torch.ones(bags.values().numel(), device=features.device())
            parts.append(weights)
        return features._like(weights=torch.cat(parts))


class FeatureProcessedEmbeddingBagCollection(nn.Module):
    """An embedding bag collection whose ids are weighted by feature processors first.

    Args:
        embedding_bag_collection: weighted, so that it reads the weights.
        feature_processors: feature -> module from JaggedTensor to JaggedTensor with weights, or one
            module from KeyedJaggedTensor to KeyedJaggedTensor with weights, such as
            `PositionWeightedModuleCollection`.
    Raises:
        ConfigError: the collection is not weighted, or a processor's feature is in none of its
            tables.

    Example:
        tables = EmbeddingBagCollection(configs, is_weighted=True)
        places = PositionWeightedModuleCollection({"clicks": 50})
        pooled = FeatureProcessedEmbeddingBagCollection(tables, places)
    """

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        feature_processors: Mapping[str, nn.Module] | nn.Module,
    ) -> None:
        super().__init__()
        if not embedding_bag_collection.is_weighted():
            raise ConfigError(
                "feature processors give weights to ids; make the EmbeddingBagCollection with "
                "is_weighted=True."
            )
        tables = embedding_bag_collection.embedding_bag_configs()
        known = {feature for table in tables for feature in table.feature_names}
        self._embedding_bag_collection = embedding_bag_collection
        self._feature_processors: nn.Module
        if isinstance(feature_processors, Mapping | nn.ModuleDict):
            for feature in feature_processors:
                _check_name(feature, nn.ModuleDict())
            self._feature_processors = nn.ModuleDict(dict(feature_processors.items()))
            named = set(self._feature_processors.keys())
        else:
            self._feature_processors = feature_processors
            named = set(getattr(feature_processors, "max_feature_lengths", ()))
        if named - known:
            raise ConfigError(
                f"a processor is for feature {sorted(named - known)[0]!r}, which no table looks up."
            )

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Weigh the ids, then pool them; as the collection otherwise.

        Raises:
            InputError: see the processors and the collection.
        """
        processors, tables = self.split()
        return tables(processors(features))

    def split(self) -> tuple[nn.Module, EmbeddingBagCollection]:
        """The processors as one module from KeyedJaggedTensor to KeyedJaggedTensor, and the tables.

        Both are live: they share the parameters of this module.
        """
        processors = self._feature_processors
        if isinstance(processors, nn.ModuleDict):
            processors = FeatureProcessorDictWrapper(processors)
        return processors, self._embedding_bag_collection

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The tables, in order."""
        return self._embedding_bag_collection.embedding_bag_configs()

    def is_weighted(self) -> bool:
        """True: ids count times their weights."""
        return True


def _check_name(feature: str, home: nn.Module) -> None:
    if not feature or "." in feature or hasattr(home, feature):
        raise ConfigError(
            f"feature {feature!r} cannot name a part of a torch module: no dots, and not an "
            "attribute of one. Rename it."
        )


def _check_longest(lengths: Tensor, places: int, what: str) -> None:
    # No bag, of those whose `lengths` are given, may have more ids than there are places with
    # weights. On CPU that is an error which names `what`. On CUDA the host would have to wait for
    # the longest length, so an assertion in a kernel makes the rank fail instead.
    if not lengths.numel():
        return
    if lengths.device.type == "cpu":
        longest = int(lengths.max())
        if longest > places:
            raise InputError(
                f"{what} has a bag of {longest} ids, more than the {places} places that have "
                "weights. Cut the bags, or raise its max_feature_length."
            )
    else:
        torch._assert_async((lengths <= places).all())
