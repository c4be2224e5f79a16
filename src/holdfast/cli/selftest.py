"""A small test of transfers between two processes of this machine: `holdfast transfer bench`.

As a program of its own it is the other process: it publishes until its input ends.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from holdfast.cli import terminal
from holdfast.errors import IntegrityError, TransferError
from holdfast.transfer import Endpoint

TRANSPORTS: Final = ("memfd", "tcp")
_NAME: Final = "selftest"
_DEADLINE_S: Final = 300.0

_Tree = dict[str, NDArray[np.uint32]]


@dataclass(frozen=True, slots=True)
class Row:
    """What one transport did."""

    transport: str
    checked: bool
    seconds: tuple[float, ...]
    nbytes: int

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def rate(self) -> float:
        """GB/s at the median."""
        return self.nbytes / self.median_s / 1e9


def run(*, nbytes: int, num_arrays: int, rounds: int, json_: bool) -> None:
    """Measure every transport with and without checksums, compare what came, and print it.

    Fails: IntegrityError if other bytes came than were sent; TransferError.
    """
    rows: list[Row] = []
    sent = _tree(nbytes, num_arrays)
    with subprocess.Popen(
        [sys.executable, "-m", "holdfast.cli.selftest", str(nbytes), str(num_arrays)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as source:
        assert source.stdin is not None
        assert source.stdout is not None
        try:
            address = source.stdout.readline().strip()
            if not address:
                raise TransferError(
                    f"the other process ended with exit code {source.wait(_DEADLINE_S)}",
                    hint="its own error output is above",
                )
            for transport in TRANSPORTS:
                rows += _measured(address, transport, sent, rounds)
        finally:
            source.stdin.close()
    if json_:
        terminal.say_json(
            {
                "bytes": nbytes,
                "arrays": num_arrays,
                "rows": [
                    {
                        "transport": row.transport,
                        "checked": row.checked,
                        "seconds": list(row.seconds),
                        "gb_per_s": row.rate,
                    }
                    for row in rows
                ],
            }
        )
        return
    columns = [
        terminal.Column("TRANSPORT"),
        terminal.Column("CHECKSUMS"),
        terminal.Column("MEDIAN", right=True),
        terminal.Column("GB/S", right=True),
    ]
    terminal.say_table(
        columns,
        [
            (row.transport, "yes" if row.checked else "no", f"{row.median_s * 1e3:.1f} ms", f"{row.rate:.2f}")
            for row in rows
        ],
    )


def _measured(address: str, transport: str, sent: _Tree, rounds: int) -> list[Row]:
    rows = []
    nbytes = sum(array.nbytes for array in sent.values())
    with Endpoint("127.0.0.1:0", transports=(transport,)) as endpoint:
        plan = endpoint.prepare(address, _NAME)
        try:
            for checked in (True, False):
                seconds = []
                with terminal.progress(transport, (rounds + 1) * nbytes) as advance:
                    for number in range(rounds + 1):
                        result = plan.run(deadline_s=_DEADLINE_S, checked=checked).result()
                        seconds.append(result.seconds)
                        advance((number + 1) * nbytes)
                        _compare(result.tree, sent, transport)
                        del result  # or the next run would need memory of its own
                rows.append(Row(transport, checked, tuple(seconds[1:]), nbytes))
        finally:
            plan.close()
    return rows


def _compare(found: _Tree, sent: _Tree, transport: str) -> None:
    wrong = [name for name in sent if not np.array_equal(found[name], sent[name])]
    if wrong:
        raise IntegrityError(
            f"{transport}: other bytes came than were sent, in {', '.join(wrong[:5])}",
            hint="the memory or the network of this machine alters what it carries; test them",
        )


def _tree(nbytes: int, num_arrays: int) -> _Tree:
    """The same in both processes."""
    words = np.arange(nbytes // 4, dtype=np.uint32)
    return {f"a{number:05}": part for number, part in enumerate(np.array_split(words, num_arrays))}


def main() -> None:
    """Publish the tree, say where, and wait until the input ends."""
    nbytes, num_arrays = map(int, sys.argv[1:])
    with (
        suppress(KeyboardInterrupt),  # Ctrl-C goes to both processes; the other one says so
        Endpoint("127.0.0.1:0") as endpoint,
        endpoint.publish(_NAME, _tree(nbytes, num_arrays), 0),
    ):
        print(endpoint.address, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
