"""The private parts of jaxlib that a world is made of: checked before use, and refused with a clear word.

JAX has no public way to host its coordination service outside the workers. Both calls have been the same
from 0.10 to 0.11; should one change, it fails here, at start, and not in the middle of a run.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol

# What JAX itself does first: without it jaxlib tells of each connection on standard error.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")

from jaxlib import _jax
from jaxlib.version import __version__ as _VERSION

from holdfast.errors import WorldError

_HINT = "use jax 0.10 or 0.11, or run with --workers-per-replica 1"


class Service(Protocol):
    """JAX's coordination service."""

    def shutdown(self) -> None: ...


class Client(Protocol):
    """A worker's side of it."""

    def connect(self) -> object: ...

    def shutdown(self) -> None: ...


def parameters(signature: str) -> frozenset[str]:
    """The names of the parameters in the first line of a nanobind docstring."""
    inside = signature.partition("\n")[0].partition("(")[2]
    return frozenset(re.findall(r"(?:^|, )(\w+): ", inside))


def call(function: str, given: Mapping[str, Any], *, module: object = _jax) -> Any:
    """What jaxlib's `function` gives for these arguments. Fails: WorldError where it does not take them."""
    found: Callable[..., Any] | None = getattr(module, function, None)
    if found is None:
        raise WorldError(f"jaxlib {_VERSION} has no {function}", hint=_HINT)
    strange = set(given) - parameters(found.__doc__ or "")
    if strange:
        raise WorldError(
            f"{function} of jaxlib {_VERSION} does not take {', '.join(sorted(strange))}", hint=_HINT
        )
    return found(**given)


def make_service(address: str, workers: int, *, heartbeat_s: int, register_s: int) -> Service:
    """A coordination service at `address` that outlives its clients' deaths."""
    service: Service = call(
        "get_distributed_runtime_service",
        {
            "address": address,
            "num_nodes": workers,
            "heartbeat_timeout": heartbeat_s,
            "cluster_register_timeout": register_s,
            "shutdown_timeout": 5,
            "recoverable": True,
        },
    )
    return service


def make_client(address: str, index: int, *, heartbeat_s: int, init_s: int) -> Client:
    """A client that is not connected yet, and that says no goodbye when it is thrown away."""
    client: Client = call(
        "get_distributed_runtime_client",
        {
            "address": address,
            "node_id": index,
            "init_timeout": init_s,
            "heartbeat_timeout": heartbeat_s,
            "shutdown_on_destruction": False,
            "use_compression": True,
        },
    )
    return client
