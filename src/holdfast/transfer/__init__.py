"""Live movement of sharded trees between processes: prepared, batched, verified."""

from holdfast.transfer.endpoint import Endpoint
from holdfast.transfer.futures import Transfer, TransferResult
from holdfast.transfer.manifest import PublishedTree
from holdfast.transfer.plan import TransferPlan
from holdfast.transfer.publication import Publication
from holdfast.transfer.shards import Shard

__all__ = ["Endpoint", "Publication", "PublishedTree", "Shard", "Transfer", "TransferPlan", "TransferResult"]
