"""Between which optimizers of a table a checkpoint's tree is rewritten, and what is said if not."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, Optimizer

from recpoint.trainer_plugin import mismatches
from recpoint.trainer_plugin.fused_optimizers import TableOptimizers, adopt, lacks
from recpoint.trainer_plugin.mismatches import Mismatch
from recpoint.trainer_plugin.state.optimizers import OptimizerState
from recpoint.trainer_plugin.tables import find_tables

TABLES = ("a", "b")
#: What FBGEMM's modules say of a table.
FUSED: dict[str, Any] = {
    "optimizer": "exact_adagrad", "iter": 7, "lr": torch.tensor(0.1).item(), "group_lr": 0.1,
    "eps": 1e-8, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.0, "max_gradient": 0.0,
    "max_norm": 0.0,
}  # fmt: skip


class Model(nn.Module):
    """Two tables and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Embedding(4, 2), nn.Embedding(5, 2)
        self.over = nn.Linear(2, 1)


def trained(make: Callable[[Model], Sequence[Optimizer]]) -> Sequence[Mapping[str, Any]]:
    """What is captured of such optimizers after a step of every parameter."""
    model = Model()
    optimizers = make(model)
    known = {id(p) for one in optimizers for group in one.param_groups for p in group["params"]}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in known)  # others would be fused
        parameter.grad = torch.ones_like(parameter)
    for one in optimizers:
        one.step()
    tables = find_tables(model, optimizers).tables
    return OptimizerState(model, optimizers, tables).capture()


def tree(optimizers: Sequence[Mapping[str, Any]], *fused: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "optimizers": optimizers,
        "other_optimizers": [],
        "sources": {"torchrec": list(fused)} if fused else {},
        "batches_done": 7,
    }


def here(
    optimizers: Sequence[Mapping[str, Any]],
    fused: Mapping[str, Any] | None = None,
    *,
    tables: Sequence[str] = TABLES,
    elsewhere: Sequence[str] = (),
) -> TableOptimizers:
    sources = {} if fused is None else {"torchrec": fused}
    return TableOptimizers(optimizers, sources, tables, elsewhere)


def dense(model: Model) -> list[Optimizer]:
    return [SGD(model.over.parameters(), lr=0.5)]


def tables_too(
    kind: type[Optimizer] = Adagrad, **hyperparameters: Any
) -> Callable[[Model], list[Optimizer]]:
    """An optimizer of the dense layer and one of the tables."""
    own = {"lr": 0.1, "eps": 1e-8} | hyperparameters
    own = {name: value for name, value in own.items() if value is not None}

    def make(model: Model) -> list[Optimizer]:
        parameters = [model.a.weight, model.b.weight]
        return [*dense(model), kind(parameters, **own)]

    return make


def test_a_tree_that_fits_stays_what_it_is() -> None:
    for saved, trainers in (
        (tree(trained(tables_too())), here(trained(tables_too()))),
        (
            tree(trained(dense), {"a": FUSED, "b": FUSED}),
            here(trained(dense), dict.fromkeys(TABLES, FUSED)),
        ),
    ):
        found, differences = adopt(saved, trainers)
        assert found["optimizers"] is saved["optimizers"] and found == saved
        assert not differences and not lacks(saved, trainers)


def test_from_torch_to_fused() -> None:
    saved = tree(trained(tables_too(lr=0.3, eps=1e-6)))
    states = {table: FUSED | {"iter": 0} for table in TABLES}
    found, differences = adopt(saved, here(trained(dense), states))
    assert not differences
    assert [one["class"] for one in found["optimizers"]] == ["torch.optim.sgd.SGD"]
    expected = FUSED | {"iter": 1, "lr": 0.3, "group_lr": 0.3, "eps": 1e-6}
    assert found["sources"] == {"torchrec": [{"a": expected, "b": expected}]}
    assert len(saved["optimizers"]) == 2, "what was read stays as it is"


def test_from_fused_to_torch_of_two_ranks() -> None:
    # As one rank of an elder plan counted less: its module was left out of batches.
    saved = tree(trained(dense), {"a": FUSED}, {"a": FUSED | {"iter": 6}, "b": FUSED})
    assert lacks(tree(trained(dense), {"a": FUSED}), here(trained(tables_too())))
    found, differences = adopt(saved, here(trained(tables_too(lr=3.0, eps=3.0))))
    assert not differences and found["sources"] == {}
    of_dense, of_tables = found["optimizers"]
    assert of_dense["groups"] == saved["optimizers"][0]["groups"]
    (group,) = of_tables["groups"]
    assert (group["lr"], group["eps"]) == (0.1, 1e-8)
    assert group["params"] == ["a.weight", "b.weight"]
    for entry in of_tables["state"].values():
        assert entry["keys"] == ["step", "sum"] and entry["values"] == {"step": torch.tensor(7.0)}


def test_one_table_changes_and_the_other_stays() -> None:
    """In a group of its own, or in one with others that have the same rate."""

    def a_alone(model: Model) -> list[Optimizer]:
        return [Adagrad([{"params": [model.a.weight], "lr": 0.1, "eps": 1e-8},
                         {"params": model.over.parameters(), "lr": 0.5}])]  # fmt: skip

    def groups(model: Model) -> list[Optimizer]:
        return [Adagrad([{"params": [model.a.weight], "lr": 0.1, "eps": 1e-8},
                         {"params": [model.b.weight], "lr": 9.0},
                         {"params": model.over.parameters(), "lr": 0.5}])]  # fmt: skip

    def together(model: Model) -> list[Optimizer]:
        return [Adagrad([{"params": [model.b.weight, model.a.weight], "lr": 0.1, "eps": 1e-8},
                         {"params": model.over.parameters(), "lr": 0.5}])]  # fmt: skip

    for make in (groups, together):
        wanted = trained(make)
        found, differences = adopt(tree(trained(a_alone), {"b": FUSED}), here(wanted, {}))
        assert not differences
        (one,) = found["optimizers"]
        assert [group["params"] for group in one["groups"]] == [
            group["params"] for group in wanted[0]["groups"]
        ]
        rates = {name: group["lr"] for group in one["groups"] for name in group["params"]}
        assert (rates["a.weight"], rates["b.weight"], rates["over.bias"]) == (0.1, 0.1, 0.5)
        assert one["state"].keys() == {"a.weight", "b.weight", "over.weight", "over.bias"}
        # And back.
        (back,) = adopt(tree(wanted, {}), here(trained(a_alone), {"b": FUSED}))[0]["optimizers"]
        assert [group["params"] for group in back["groups"]] == [
            ["a.weight"], ["over.weight", "over.bias"],
        ]  # fmt: skip
        assert "b.weight" not in back["state"]


def test_a_table_that_another_rank_holds_now_leaves_the_groups() -> None:
    trainers = here(trained(dense), {"a": FUSED}, tables=["a"], elsewhere=["b"])
    found, differences = adopt(tree(trained(tables_too())), trainers)
    assert not differences
    assert [one["class"] for one in found["optimizers"]] == ["torch.optim.sgd.SGD"]
    assert found["sources"]["torchrec"][0].keys() == {"a"}


def test_a_table_of_another_rank_comes_with_its_group_and_state() -> None:
    def last_alone(model: Model) -> list[Optimizer]:
        return [SGD([{"params": model.over.parameters(), "lr": 0.5}])]

    def last_too(model: Model) -> list[Optimizer]:
        groups = [
            {"params": model.over.parameters(), "lr": 0.5},
            {"params": [model.b.weight], "lr": 0.25, "momentum": 0.9},
        ]
        return [SGD(groups)]

    saved = tree(trained(last_alone)) | {"other_optimizers": [trained(last_too)]}
    trainers = here(trained(last_too), tables=["b"], elsewhere=["a"])
    assert lacks(tree(trained(last_alone)), trainers) and not lacks(saved, trainers)
    found, differences = adopt(saved, trainers)
    assert not differences
    (one,) = found["optimizers"]
    settings = {name: group for group in one["groups"] for name in group["params"]}
    assert (settings["b.weight"]["lr"], settings["b.weight"]["momentum"]) == (0.25, 0.9)
    assert one["state"]["b.weight"]["keys"] == ["momentum_buffer"]
    # Where it was it goes from the groups; and a fused one takes its rate from that rank too.
    without = here(trained(last_alone), tables=[], elsewhere=["b"])
    (left,) = adopt(tree(trained(last_too)), without)[0]["optimizers"]
    assert [group["params"] for group in left["groups"]] == [["over.weight", "over.bias"]]
    others = tree(trained(last_alone)) | {"other_optimizers": [trained(tables_too(lr=0.3))]}
    fused = here(trained(last_alone), {"b": FUSED}, tables=["b"], elsewhere=["a"])
    assert lacks(tree(trained(last_alone)), fused)
    found, differences = adopt(others, fused)
    assert not differences and found["sources"]["torchrec"][0]["b"]["lr"] == 0.3
    _, differences = adopt(others, here(trained(last_too), tables=["b"]))
    assert [one.found for one in differences] == [
        "table 'b' is trained by torch.optim.sgd.SGD here and by torch.optim.adagrad.Adagrad in "
        "the checkpoint",
    ]


@pytest.mark.parametrize("apart", [False, True])
def test_ranks_that_build_their_optimizers_alike_have_empty_places(apart: bool) -> None:
    def built(*tables: str) -> Callable[[Model], list[Optimizer]]:
        def make(model: Model) -> list[Optimizer]:
            rows = [getattr(model, name).weight for name in tables]
            own = {"params": rows, "lr": 0.25, "eps": 1e-8}
            other = {"params": list(model.over.parameters()), "lr": 0.5}
            return [Adagrad([own]), Adagrad([other])] if apart else [Adagrad([other, own])]

        return make

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an optimizer of nothing
        without, with_b = trained(built()), trained(built("b"))
    comes = tree(without) | {"other_optimizers": [with_b]}
    for saved, now, tables in (
        (comes, with_b, ["b"]),  # from the rank that had it
        (tree(with_b), without, []),  # to another one
        (tree(without, {"b": FUSED | {"lr": 0.25, "group_lr": 0.25}}), with_b, ["b"]),
    ):
        elsewhere = [] if tables else ["b"]
        fused: dict[str, Any] | None = None if tables and not saved["sources"] else {}
        found, differences = adopt(saved, here(now, fused, tables=tables, elsewhere=elsewhere))
        assert not differences
        assert [one["class"] for one in found["optimizers"]] == [one["class"] for one in now]
        for one, expected in zip(found["optimizers"], now, strict=True):
            assert [g["params"] for g in one["groups"]] == [g["params"] for g in expected["groups"]]
            assert [g["lr"] for g in one["groups"]] == [g["lr"] for g in expected["groups"]]
            assert one["state"].keys() == expected["state"].keys()


@pytest.mark.parametrize(
    ("fused", "torch_side", "expected"),
    [
        ({}, tables_too(Adam), "torch.optim.adam.Adam here; only torch.optim.adagrad.Adagrad"),
        ({"optimizer": "adam"}, tables_too(), "no optimizer of torch does the same"),
        ({"optimizer": "exact_sgd"}, tables_too(), "only torch.optim.sgd.SGD"),
        ({}, tables_too(lr_decay=0.1), "with lr_decay: updates differ"),
        ({}, tables_too(weight_decay=0.1), "with weight_decay: updates differ"),
        ({"weight_decay": 0.1}, tables_too(), "with a fused weight_decay: updates differ"),
        ({"max_gradient": 1e-4}, tables_too(), "with a fused max_gradient: updates differ"),
        ({"max_norm": 1.0}, tables_too(), "with a fused max_norm: updates differ"),
        (
            {"optimizer": "exact_sgd"},
            tables_too(SGD, eps=None, momentum=0.9),
            "with momentum: updates differ",
        ),
    ],
)
def test_another_update_is_named(
    fused: dict[str, Any], torch_side: Callable[[Model], list[Optimizer]], expected: str
) -> None:
    states = dict.fromkeys(TABLES, FUSED | fused)
    _, to_torch = adopt(tree(trained(dense), states), here(trained(torch_side)))
    _, to_fused = adopt(tree(trained(torch_side)), here(trained(dense), states))
    for differences in (to_torch, to_fused):
        assert len(differences) == 2
        for table, one in zip(TABLES, sorted(differences), strict=True):
            assert f"table {table!r} is trained by the fused " in one.found
            assert one.next_step == mismatches.OTHER_UPDATE
    assert expected in to_torch[0].found
    assert "in the checkpoint and by" in to_torch[0].found
    assert "here and by" in to_fused[0].found


def test_what_no_optimizer_trains_here_and_groups_of_other_rates_are_named() -> None:
    saved = tree(trained(dense), {"a": FUSED, "b": FUSED | {"group_lr": 0.2, "lr": 0.2}})
    _, found = adopt(saved, here(trained(dense), {}))
    assert [one.found[-23:] for one in found] == ["and by no optimizer here"[-23:]] * 2
    _, found = adopt(saved, here(trained(tables_too())))
    text = "'b.weight' was trained with lr=0.2 in the checkpoint, and its group has 0.1"
    assert found == [Mismatch(text, mismatches.OWN_GROUP)]
