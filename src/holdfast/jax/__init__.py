"""JAX below the framework line: arrays in and out of devices."""

from holdfast.jax.adapter import ADAPTER

__all__ = ["ADAPTER"]
