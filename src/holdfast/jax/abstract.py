"""Meshes without devices: what a parked process can trace for, before its world has started."""

from __future__ import annotations

from collections.abc import Mapping

from jax.sharding import AbstractDevice, AbstractMesh, AxisType


def abstract_mesh(
    axes: Mapping[str, int], *, platform: str = "cpu", device_kind: str = "cpu", num_cores: int | None = None
) -> AbstractMesh:
    """The mesh that `Mesh(devices, axes)` will be once there are devices; touches none.

    A parked process of a replica with several workers may not touch a device: its world has not started. But
    it can trace, which is most of what is left to do once executables come out of bundles:

        def rehearse():
            mesh = abstract_mesh({"x": 2})
            step.trace(*shapes(mesh))  # jax.ShapeDtypeStruct(..., sharding=NamedSharding(mesh, ...))

    What was traced is found again when the same function is lowered for arrays on a mesh of real devices, if
    platform, kind and cores (`core_count` of a GPU) are those of the devices; if not, it is traced again.
    """
    device = AbstractDevice(device_kind=device_kind, num_cores=num_cores, platform=platform)
    # As for `Mesh`; without it newer versions of JAX take the axes for explicit ones.
    types = (AxisType.Auto,) * len(axes)
    return AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=types, abstract_device=device)
