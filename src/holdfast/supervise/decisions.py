"""What goes into the policy beside the agents' reports, and what comes out of it.

    Policy.step(happening, now=...) -> list[Decision]

The edge (`conductor.py`) carries decisions out in order and makes none itself:

    StartAgent   start the agent of a node. It says AgentUp, or the edge says AgentDown.
    KillAgent    end an agent at once; the edge says AgentDown when it is gone, always.
    Tell         give a command to an agent, in order. An agent that is gone needs no telling.
    Noted        append the event to the journal.
    End          the run is over; nothing comes after it.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from holdfast.journal import Event
from holdfast.supervise.messages import Command, Report

DONE_CODE = 0
RETRY_CODE = 75
NO_RETRY_CODE = 78
POISON_CODE = 79
SPENT_CODE = 80


class Tick(NamedTuple):
    """The moment that `Policy.wake_at` named has come."""


class AgentDown(NamedTuple):
    """The agent of `node` is gone, and its workers with it; or it could not be started."""

    node: int
    reason: str


class NodeOffered(NamedTuple):
    """There is a node to be used: a new one, or one that was away."""

    node: int


class Resize(NamedTuple):
    """The user wants so many replicas from now on."""

    replicas: int


class StopAsked(NamedTuple):
    """The user wants the run to end: saved and in order, or `at_once`."""

    reason: str
    at_once: bool = False


Happening: TypeAlias = Report | Tick | AgentDown | NodeOffered | Resize | StopAsked


class StartAgent(NamedTuple):
    node: int


class KillAgent(NamedTuple):
    node: int
    reason: str


class Tell(NamedTuple):
    node: int
    command: Command


class Noted(NamedTuple):
    event: Event


class End(NamedTuple):
    code: int
    message: str


Decision: TypeAlias = StartAgent | KillAgent | Tell | Noted | End
