"""Names, dtypes, layouts and plans of trees of arrays; knows no framework, disk or network."""

from holdfast.arrays.buckets import BucketLayout, BucketRules, FlatArray, Piece
from holdfast.arrays.dtypes import TABLE, DType, dtype, stored_shape
from holdfast.arrays.layout import ArrayLayout, Holders, Layout, cuts
from holdfast.arrays.names import flatten, join, match, split, unflatten
from holdfast.arrays.numpy_adapter import NUMPY
from holdfast.arrays.plan import ArrayPlan, Plan, PlanCache, cached_plan, plan
from holdfast.arrays.protocols import (
    Adapter,
    Bytes1D,
    Copying,
    Description,
    DeviceCopy,
    FlatTree,
    HostMemory,
    Landing,
    Memory,
    Placement,
    Sink,
    Stager,
    adapters,
    landed,
)
from holdfast.arrays.scalars import decode_scalar, encode_scalar
from holdfast.arrays.strided import Move, coalesce, move
from holdfast.arrays.template import Rename, Selection, Template, Wanted
from holdfast.arrays.trees import adapter_of, flatten_tree
from holdfast.arrays.writers import spread

__all__ = [
    "NUMPY",
    "TABLE",
    "Adapter",
    "ArrayLayout",
    "ArrayPlan",
    "BucketLayout",
    "BucketRules",
    "Bytes1D",
    "Copying",
    "DType",
    "Description",
    "DeviceCopy",
    "FlatArray",
    "FlatTree",
    "Holders",
    "HostMemory",
    "Landing",
    "Layout",
    "Memory",
    "Move",
    "Piece",
    "Placement",
    "Plan",
    "PlanCache",
    "Rename",
    "Selection",
    "Sink",
    "Stager",
    "Template",
    "Wanted",
    "adapter_of",
    "adapters",
    "cached_plan",
    "coalesce",
    "cuts",
    "decode_scalar",
    "dtype",
    "encode_scalar",
    "flatten",
    "flatten_tree",
    "join",
    "landed",
    "match",
    "move",
    "plan",
    "split",
    "spread",
    "stored_shape",
    "unflatten",
]
