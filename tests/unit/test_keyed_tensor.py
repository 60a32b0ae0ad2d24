"""KeyedTensor against a dictionary of tensors."""

from __future__ import annotations

import random

import pytest
import torch
from torch.utils import _pytree as pytree

from rayrec.errors import InputError, ShapeError
from rayrec.sparse import KeyedTensor, UnknownKeyError


def random_tensors(seed: int, prefix: str, rows: int) -> dict[str, torch.Tensor]:
    rng, generator = random.Random(f"{seed}{prefix}"), torch.Generator().manual_seed(seed)
    return {
        f"{prefix}{i}": torch.rand(rows, rng.randint(1, 5), generator=generator)
        for i in range(rng.randint(1, 4))
    }


@pytest.mark.seeds(range(10))
@pytest.mark.parametrize("rows", [0, 3])
def test_keys_give_back_their_tensors(seed, rows):
    tensors = random_tensors(seed, "f", rows)
    kt = KeyedTensor.from_tensor_list(list(tensors), list(tensors.values()))
    assert kt.keys() == list(tensors) and kt.offset_per_key()[-1] == kt.values().shape[1]
    for key, tensor in tensors.items():
        assert torch.equal(kt[key], tensor) and torch.equal(kt.to_dict()[key], tensor)
    doubled = pytree.tree_map(lambda t: t * 2, kt)
    assert torch.equal(doubled.values(), kt.values() * 2) and doubled.keys() == kt.keys()
    assert torch.equal(kt.to("cpu").values(), kt.values())


def test_keys_may_lie_along_the_first_dimension():
    kt = KeyedTensor.from_tensor_list(
        ["a", "b"], [torch.ones(2, 3), torch.zeros(1, 3)], key_dim=0, cat_dim=0
    )
    assert kt["a"].shape == (2, 3) and kt["b"].tolist() == [[0, 0, 0]]
    assert pytree.tree_map(torch.clone, kt).key_dim() == 0


@pytest.mark.seeds(range(20))
def test_regroup_equals_concatenation_and_its_gradient(seed):
    rng = random.Random(seed)
    first, second = random_tensors(seed, "f", 3), random_tensors(seed + 99, "g", 3)
    tensors = {key: tensor.requires_grad_() for key, tensor in (first | second).items()}
    kts = [
        KeyedTensor.from_tensor_list(list(part), [tensors[key] for key in part])
        for part in (first, second)
    ]
    names = list(tensors)
    groups = [names[:], [rng.choice(names) for _ in range(3)], names[1:2] or names[:1]]
    got = KeyedTensor.regroup_as_dict(kts, groups, ["all", "some", "one"])
    want = [torch.cat([tensors[key] for key in group], dim=1) for group in groups]
    for one, two in zip(got.values(), want, strict=True):
        assert torch.equal(one, two)
    loss = [(group * torch.arange(group.shape[1])).sum() for group in got.values()]
    grads = torch.autograd.grad(sum(loss), list(tensors.values()), retain_graph=True)
    loss = [(group * torch.arange(group.shape[1])).sum() for group in want]
    for one, two in zip(grads, torch.autograd.grad(sum(loss), list(tensors.values())), strict=True):
        torch.testing.assert_close(one, two)  # sums of a few small integers in another order


def test_a_group_of_neighbours_is_a_view():
    kt = KeyedTensor(["a", "b", "c"], [1, 2, 3], torch.rand(4, 6))
    whole, middle = KeyedTensor.regroup([kt], [["a", "b", "c"], ["b", "c"]])
    gap, reverse = KeyedTensor.regroup([kt], [["a", "c"], ["c", "b", "a"]])
    assert torch.equal(gap, torch.cat([kt["a"], kt["c"]], 1)) and torch.equal(
        reverse, torch.cat([kt["c"], kt["b"], kt["a"]], 1)
    )
    assert whole.data_ptr() == kt.values().data_ptr() and middle.data_ptr() == kt["b"].data_ptr()


def test_text_shows_keys_and_rows():
    kt = KeyedTensor(["a", "b"], [1, 2], torch.tensor([[1.0, 2.0, 3.0]]))
    assert (
        str(kt) == 'KeyedTensor({\n    "a": [[1.0]],\n    "b": [[2.0, 3.0]]\n})\n'
        and str(KeyedTensor([], [], torch.empty(1, 0))) == "KeyedTensor()\n"
    )
    assert (
        repr(kt) == "KeyedTensor({'a': 1, 'b': 2}, values=(1, 3) float32, key_dim=1, device='cpu')"
    )


def test_mistakes_raise_typed_errors():
    kt = KeyedTensor(["a"], [1], torch.rand(1, 1))
    with pytest.raises(UnknownKeyError, match="no key 'b'"):
        kt["b"]
    with pytest.raises(UnknownKeyError, match="'b'"):
        KeyedTensor.regroup([kt], [["b"]])
    with pytest.raises(InputError, match="no KeyedTensor"):
        KeyedTensor.regroup([], [[]])
    with pytest.raises(ShapeError, match="2 keys and 1 tensors"):
        KeyedTensor.from_tensor_list(["a", "b"], [torch.rand(1, 1)])
    with pytest.raises(ShapeError, match="1 groups and 2 keys"):
        KeyedTensor.regroup_as_dict([kt], [["a"]], ["x", "y"])


def test_a_group_without_keys_has_no_columns():
    kt = KeyedTensor(["a"], [1], torch.rand(3, 1))
    nothing, one = KeyedTensor.regroup([kt], [[], ["a"]])
    assert nothing.shape == (3, 0) and torch.equal(one, kt.values())
    assert KeyedTensor.regroup_as_dict([KeyedTensor([], [], torch.empty(2, 0))], [[]], ["x"])[
        "x"
    ].shape == (2, 0)
    assert KeyedTensor.regroup([KeyedTensor(["a"], [2], torch.rand(2, 5), key_dim=0)], [[]])[
        0
    ].shape == (0, 5)


@pytest.mark.parametrize(
    "groups",
    [
        [["a", "c"], ["b"]],
        [["c", "a"], [], ["a", "b"]],
        [["a", "b", "c"]],
        [["b"], ["b", "c"], ["a", "b", "c"]],
    ],
)
def test_regroup_passes_gradients_to_the_columns_they_come_from(groups):
    widths = {"a": 2, "b": 3, "c": 1}
    values = torch.rand(4, 6, requires_grad=True)
    found = KeyedTensor.regroup([KeyedTensor(list(widths), list(widths.values()), values)], groups)
    scales = [torch.rand(out.shape) for out in found]
    torch.autograd.backward(found, scales)
    want = torch.zeros(4, 6)
    starts = {"a": 0, "b": 2, "c": 5}
    for group, scale in zip(groups, scales, strict=True):
        for key, part in zip(group, scale.split([widths[key] for key in group], 1), strict=True):
            want[:, starts[key] : starts[key] + widths[key]] += part
    torch.testing.assert_close(values.grad, want)


@pytest.mark.parametrize("widths", [[3], [3, 2], [3, 1, 1], [5, -1]])
def test_widths_that_are_not_those_of_the_values_are_refused(widths):
    tensor = KeyedTensor(["a", "b"], widths, torch.zeros(2, 4))
    for read in (tensor.to_dict, lambda: tensor["a"], tensor.offset_per_key):
        with pytest.raises(ShapeError, match=r"2 keys .* Give each key its width"):
            read()
