"""Vectors computed independently with numpy; the official code's values among them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from solo_ext.clustering import cluster_concentration
from solo_ext.losses import info_nce_loss_func, proto_nce_loss_func
from solo_ext.memory.features import FeatureBank, FeatureQueue

VECTORS = json.loads((Path(__file__).parent.parent / "oracles" / "pcl.json").read_text())
DTYPES = pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-5)], ids=["fp64", "fp32"]
)


def cases(group: str) -> Any:
    return pytest.mark.parametrize("case", VECTORS[group]["cases"], ids=lambda c: c["name"])


def proto_nce(given: dict[str, Any], query: Tensor, dtype: torch.dtype, collisions: str) -> Tensor:
    return proto_nce_loss_func(
        query,
        torch.tensor(given["prototypes"], dtype=dtype),
        torch.tensor(given["phi"], dtype=dtype),
        torch.tensor(given["positive_ids"]),
        torch.tensor(given["negative_ids"], dtype=torch.long),
        collisions,  # type: ignore[arg-type]
    )


def close(found: Any, expected: Any, tolerance: float) -> None:
    torch.testing.assert_close(
        torch.as_tensor(found, dtype=torch.float64),
        torch.as_tensor(expected, dtype=torch.float64),
        rtol=tolerance,
        atol=tolerance,
    )


@DTYPES
@cases("pcl_infonce")
def test_info_nce(case: dict[str, Any], dtype: torch.dtype, tolerance: float) -> None:
    given = case["inputs"]
    query, key, queue = (torch.tensor(given[n], dtype=dtype) for n in ("q", "k", "queue_dxr"))
    loss = info_nce_loss_func(query, key, queue.T, given["temperature"])
    assert loss.dtype == dtype
    close(loss, case["expected"]["loss"], tolerance)


@DTYPES
@cases("pcl_protonce_single_set")
def test_proto_nce(case: dict[str, Any], dtype: torch.dtype, tolerance: float) -> None:
    query = torch.tensor(case["inputs"]["q"], dtype=dtype)
    expected = case["expected"]
    if "loss" in expected:
        close(proto_nce(case["inputs"], query, dtype, "paper"), expected["loss"], tolerance)
        return
    official = proto_nce(case["inputs"], query, dtype, "paper")
    close(official, expected["loss_official"], tolerance)
    merged = proto_nce(case["inputs"], query, dtype, "merge")
    close(merged, expected["loss_if_duplicate_columns_are_merged"], tolerance)


@DTYPES
@cases("pcl_total")
def test_total(case: dict[str, Any], dtype: torch.dtype, tolerance: float) -> None:
    given, expected = case["inputs"], case["expected"]
    query, key, queue = (torch.tensor(given[n], dtype=dtype) for n in ("q", "k", "queue_dxr"))
    info = info_nce_loss_func(query, key, queue.T, given["temperature"])
    proto = [proto_nce(one, query, dtype, "paper") for one in given["sets"]]
    close(torch.stack(proto), expected["protonce"], tolerance)
    close(info + torch.stack(proto).mean(), expected["total"], tolerance)
    close(info, expected["total_during_warmup"], tolerance)


@DTYPES
@cases("pcl_concentration")
def test_concentration(case: dict[str, Any], dtype: torch.dtype, tolerance: float) -> None:
    given = case["inputs"]
    by_cluster = given["distances_by_cluster"]
    distances = torch.tensor([d for members in by_cluster for d in members], dtype=dtype)
    sizes = torch.tensor([len(members) for members in by_cluster])
    assignments = torch.arange(len(by_cluster)).repeat_interleave(sizes)
    found = cluster_concentration(
        distances, assignments, len(by_cluster), given["temperature"], given["alpha"]
    )
    assert found.dtype == dtype
    expected = case["expected"]["phi"]
    if None in expected or any(value != value for value in expected):
        # The official formula is 0 / 0 here; every prototype gets the temperature instead.
        expected = [given["temperature"]] * len(by_cluster)
    close(found, expected, tolerance)


@DTYPES
@cases("pcl_feature_gather")
def test_padded_samples_count_once(
    case: dict[str, Any], dtype: torch.dtype, tolerance: float
) -> None:
    """A sample that two ranks embedded is overwritten by an equal row, not added to."""
    bank = FeatureBank(2).to(dtype)
    bank.resize_(3)
    for rows in case["inputs"].values():
        indices = torch.tensor([int(i) for i in rows])
        bank.update_(indices, torch.tensor(list(rows.values()), dtype=dtype))
    close(bank.value, case["expected"]["fixed"], tolerance)
    assert bank.filled.all()


@DTYPES
@cases("moco_queue")
def test_queue(case: dict[str, Any], dtype: torch.dtype, tolerance: float) -> None:
    queue = FeatureQueue(4, 1).to(dtype)
    queue.value.copy_(torch.tensor(case["inputs"]["initial_queue"]).T)
    for keys, expected in zip(case["inputs"]["keys_per_step"], case["expected"], strict=True):
        queue.update_(torch.tensor(keys, dtype=dtype).unsqueeze(1))
        assert torch.equal(queue.value, torch.tensor(expected["queue"], dtype=dtype).T)
        assert queue.pointer == expected["ptr"]
