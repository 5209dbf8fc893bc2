# SPDX-License-Identifier: Apache-2.0
"""Which algorithm is the quickest over links, by size and ranks, and is it what `choose` picks?

    python -m benchmarks.thresholds                  2 to 16 ranks on this host, by loopback links
    python -m benchmarks.thresholds --place tcp      2 to 8 hosts at 1 Gbit/s; as root

Every algorithm of a call takes turns with the others; times are medians of the rounds. One that
takes several times as long as the quickest is left out after a few tries. The table names the
quickest, what `commute.plan.choose` picks, how many times as long that takes, and which share of
the CPU others had: above 4% a row is measured again, three times at most. A size is that of the
whole array, as in workers/calls.py, a block one rank's part of it.
"""

import argparse
import contextlib
import json
import secrets
import signal
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import network, noise, record
from benchmarks.failure import BenchError
from benchmarks.jobs import Job, Program, Turn, scratch_folder, worker
from benchmarks.network import Hosts
from benchmarks.rounds import BATCH_BYTES_MAX, size_text, time_text
from benchmarks.session import columns, commute_command
from benchmarks.workers.calls import bytes_given
from commute.plan import candidates, choose

KB, MB = 1 << 10, 1 << 20
CALLS = (
    *("allreduce", "broadcast", "reduce", "allgather", "reduce_scatter"),
    *("alltoall", "gather", "scatter", "barrier"),
)
SIZES = (64, 1 * KB, 4 * KB, 16 * KB, 64 * KB, 256 * KB, 1 * MB, 4 * MB, 16 * MB)
RANKS = {"loopback": (2, 4, 8, 16), "tcp": (2, 4, 8)}
# More takes long, and shows nothing new.
LARGEST = {"tcp": {2: 4 * MB, 4: 4 * MB, 8: 4 * MB}, "loopback": {8: 4 * MB, 16: 1 * MB}}
FLOAT_BYTES = 4
ROUNDS = 7
TURN_SECONDS = 0.005
TRIES = 3
STEPS_MAX = 32
# A cell is measured in half a second, in which 2% would be two ticks of /proc.
NOISE_MAX = 0.04
ATTEMPTS = 3
HOPELESS = 3.0  # times the quickest
WORST = 12
RENDEZVOUS_PORT = 29400


@dataclass(frozen=True)
class Found:
    """The times of all algorithms that were no hopeless cases."""

    place: str
    call: str
    ranks: int
    bytes: int
    seconds: dict[str, float]
    noise: float  # the share of the CPU that others had meanwhile

    @property
    def quickest(self) -> str:
        return min(self.seconds, key=self.seconds.__getitem__)

    @property
    def picked(self) -> str:
        given = bytes_given(self.call, self.bytes, self.ranks)
        return choose(self.call, self.ranks, given, self.place)

    @property
    def ratio(self) -> float:
        return self.seconds[self.picked] / self.seconds[self.quickest]

    def row(self) -> tuple[str, ...]:
        first, *others = sorted(self.seconds.items(), key=lambda item: item[1])
        block = size_text(self.bytes // self.ranks)
        near = ", ".join(f"{name} {seconds / first[1]:.2f}" for name, seconds in others[:3])
        start = (self.call, str(self.ranks), size_text(self.bytes), block, time_text(first[1]))
        return (*start, first[0], self.picked, f"{self.ratio:.2f}", f"{self.noise:.0%}", near)


HEADER = (
    "call",
    "ranks",
    "size",
    "block",
    "time",
    "quickest",
    "picked",
    "ratio",
    "noise",
    "others",
)


def loopback_job(ranks: int) -> Job:
    scratch = scratch_folder()
    argv = (commute_command(), "run", "-n", str(ranks), worker("algorithm_rank.py"))
    program = Program((*argv, Job.socket_in(scratch)), {"COMMUTE_SHARED_MEMORY": "0"})
    return Job("commute", ranks=ranks, programs=[program], scratch=scratch)


def tcp_job(hosts: Hosts) -> Job:
    scratch = scratch_folder()
    endpoint = f"{hosts.address(0)}:{RENDEZVOUS_PORT}"
    options = ("--nnodes", str(hosts.count), "--rdzv-endpoint", endpoint, "--nproc-per-node", "1")
    command = (*options, worker("algorithm_rank.py"), Job.socket_in(scratch))
    token = {"COMMUTE_TOKEN": secrets.token_hex(32)}
    programs = [
        Program(
            (*hosts.inside(host), commute_command(), "run", "--node-rank", str(host), *command),
            token,
        )
        for host in range(hosts.count)
    ]
    return Job("commute", ranks=hosts.count, programs=programs, scratch=scratch)


@contextlib.contextmanager
def started(place: str, ranks: int) -> Iterator[Job]:
    with contextlib.ExitStack() as stack:
        if place == "tcp":
            job = tcp_job(stack.enter_context(Hosts(ranks)))
        else:
            job = loopback_job(ranks)
        yield stack.enter_context(job)


def measure(job: Job, place: str, call: str, bytes: int, rounds: int) -> Found:
    """The quietest of some attempts, or the first that is quiet."""
    attempts: list[tuple[float, Found]] = []
    while len(attempts) < ATTEMPTS:
        before = noise.snapshot()
        seconds = medians(job, place, call, bytes, rounds)
        heard = noise.between(before, noise.snapshot(), ours=job.pids)
        others = heard.stolen + heard.foreign
        attempts.append((others, Found(place, call, job.ranks, bytes, seconds, others)))
        if others < NOISE_MAX:
            break
    return min(attempts, key=lambda attempt: attempt[0])[1]


def medians(job: Job, place: str, call: str, bytes: int, rounds: int) -> dict[str, float]:
    """Of each algorithm that is not hopeless."""
    names = candidates(call, place)
    small = bytes <= BATCH_BYTES_MAX
    step = job.ranks if small else 1  # every rank is the root as often as any other

    def take(name: str, batch: int, samples: int) -> list[float]:
        return job.take(Turn(bytes, batch, samples, variant=name, call=call))

    tried = {name: min(take(name, step, TRIES)) for name in names}
    quickest = min(tried.values())
    given = bytes_given(call, bytes, job.ranks)
    picked = choose(call, job.ranks, given, place)
    kept = [n for n in names if tried[n] < HOPELESS * quickest or n == picked]
    steps = max(1, min(STEPS_MAX, int(TURN_SECONDS / quickest / step)))
    turn = (steps * step, 1) if small else (1, steps)
    times: dict[str, list[float]] = {name: [] for name in kept}
    for number in range(rounds):
        for index in range(len(kept)):
            name = kept[(number + index) % len(kept)]
            times[name] += take(name, *turn)
    return {name: statistics.median(found) for name, found in times.items()}


def sizes_of(call: str, place: str, ranks: int, asked: Sequence[int]) -> Sequence[int]:
    if call == "barrier":
        return (0,)
    largest = LARGEST[place].get(ranks, max(asked))
    return [size for size in asked if FLOAT_BYTES * ranks <= size <= largest]


def measure_all(options: argparse.Namespace) -> list[Found]:
    found: list[Found] = []
    for ranks in options.ranks or RANKS[options.place]:
        with started(options.place, ranks) as job:
            for call in options.calls:
                cells = [
                    measure(job, options.place, call, size, options.rounds)
                    for size in sizes_of(call, options.place, ranks, options.sizes)
                ]
                print("\n".join(columns([HEADER, *(cell.row() for cell in cells)])), flush=True)
                print(flush=True)
                found += cells
    return found


def write(found: Sequence[Found], folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"thresholds-{found[0].place}.json"
    path.write_text(json.dumps([vars(cell) for cell in found], indent=1))
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__))
    parser.add_argument("--place", choices=list(RANKS), default="loopback")
    parser.add_argument("--ranks", type=int, nargs="+", help="of each job; of tcp, hosts")
    parser.add_argument("--calls", nargs="+", choices=CALLS, default=CALLS)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--output", type=Path, default=record.RESULTS, help="folder of the results")
    options = parser.parse_args()
    # An ended bench must still remove its namespaces and jobs.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        if options.place == "tcp":
            network.require_tools()
        print(f"algorithms over {options.place}\n{record.machine_line()}\n", flush=True)
        found = measure_all(options)
    except BenchError as error:
        print(f"\nbenchmark thresholds: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nbenchmark thresholds: interrupted", file=sys.stderr)
        return 130
    worst = sorted(found, key=lambda cell: cell.ratio, reverse=True)[:WORST]
    print("the worst picks:")
    print("\n".join(columns([HEADER, *(cell.row() for cell in worst)])))
    print(f"raw: {write(found, options.output)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
