"""A target over several machines: rank 0 decides, the other ranks repeat its passes on their shards.

`mlx.launch` starts a process on each machine, a rank. All load one target and keep a part of it (shard.py).
Rank 0 alone has drafters, policies, samplers and the program. Its targets announce each operation over a
socket. The other ranks repeat it with the tokens that rank 0 broadcasts (`Ranks.follow`). So nothing depends
on the logits or the clock of another rank.

Collectives must come in the same order on all ranks. So the whole pass is handed to the device, although rank
0 may never read it. An operation that rank 0 began and could not complete ends all ranks.
"""

from __future__ import annotations

import json
import os
import queue
import secrets
import select
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import astuple
from functools import wraps
from typing import Any, NoReturn, TypeVar, cast

import mlx.core as mx
import mlx.nn as nn

from mlx_spec.checkpoint.files import one_line
from mlx_spec.device import Stay
from mlx_spec.device.awake import Awake
from mlx_spec.distributed.shard import shard
from mlx_spec.errors import InvalidValue, SpecError
from mlx_spec.model.hooks import parts_of
from mlx_spec.model.row_class import RowClass
from mlx_spec.model.target import LMTarget
from mlx_spec.model.target_batch import BatchSupport, TargetBatch, probe_batch
from mlx_spec.types import CacheState, FeatureSpec

BEAT_S = 1.0  # seconds between two signs of life
SILENCE_S = 7.0  # seconds of silence after which a rank counts as lost; all ranks end within 10 seconds

Method = TypeVar("Method", bound=Callable[..., Any])


def join() -> Ranks | None:
    """Return the ranks of `mlx.launch`; None if this process was not launched as one of several.

    Raises InvalidValue if they cannot connect. If a rank is missing, the process ends with one line.
    """
    # Each rank imports MLX before it connects, and a remote one logs in.
    late = threading.Timer(60.0, _end, ["ranks are missing after 60 s: start all again"])
    late.daemon = True
    late.start()
    try:
        # The backends of mx.distributed: TCP everywhere, and RDMA between Macs.
        for backend in ("ring", "jaccl"):
            if mx.distributed.is_available(backend):
                group = mx.distributed.init(backend=backend)
                if group.size() > 1:
                    return Ranks(group)
    except (RuntimeError, ValueError) as error:
        raise InvalidValue(f"the ranks cannot connect ({one_line(error)}): check the hostfile") from error
    finally:
        late.cancel()
    return None


class Ranks:
    """This process and the other ranks, connected. An error of one ends all, with one line on each.

    The connection is a star around rank 0. It carries commands, errors, and a sign of life each second, also
    while a rank loads or waits.
    """

    def __init__(self, group: mx.distributed.Group) -> None:
        self.group = group
        self.rank, self.size = group.rank(), group.size()
        self._sending, self._failing = threading.Lock(), threading.Lock()
        self._received: queue.Queue[tuple[int, list[Any]]] = queue.Queue()
        self._dropped: list[int] = []  # numbers of objects that rank 0 no longer has
        self._count = 0  # of objects with a number
        self.last_pass = mx.array([])  # logits of the last pass
        self._has_ended = False  # True once the work of this rank has ended or failed
        self._parent = [socket.gethostname(), os.getppid()]  # the `mlx.launch` of this process
        if self.rank:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 decides what Ctrl-C means
        self._peers = self._connect()
        for rank, peer in self._peers.items():
            peer.settimeout(SILENCE_S)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._start(self._listen, rank, peer)
        self._start(self._beat)

    def compare(self, identity: Mapping[str, str]) -> None:
        """End all ranks unless they have the same `identity`. Rank 0 waits until all have sent theirs."""
        if self.rank:
            return self.send(identity)
        for _ in range(self.size - 1):
            rank, (other,) = self._received.get()
            for name in [*identity, *other]:
                if (here := identity.get(name)) != (there := other.get(name)):
                    self.fail(f"rank {rank} has another {name} ({there}) than rank 0 ({here}): copy it")

    def shard(self, model: nn.Module, config: Mapping[str, Any]) -> None:
        """Keep this rank's part of a model whose weights were not read yet. Raises BadCheckpoint."""
        self.model, self.parts = model, parts_of(model)
        shard(model, config, self.group)

    def receive(self, on_silence: Callable[[], None] = lambda: None) -> list[Any]:
        """Wait for a message of another rank and return it; empty once this rank's work has ended.

        `on_silence` is called whenever none has come for a second.
        """
        while not self._has_ended:
            try:
                return self._received.get(timeout=BEAT_S)[1]
            except queue.Empty:
                on_silence()
        return []

    def send(self, *message: Any) -> None:
        """Send a message to rank 0, or from rank 0 to all others. Of an array only the size is sent."""
        line = json.dumps(message, default=_described).encode() + b"\n"
        with self._sending:
            for peer in self._peers.values():
                with suppress(OSError):  # the thread that listens to this rank reports its end
                    peer.sendall(line)

    def fail(self, text: str) -> NoReturn:
        """End this process with one line and status 1, and the other ranks with the same line."""
        self._failing.acquire()  # forever: the first error counts
        self._has_ended = True
        self.send("error", text)
        # The others have half a second to print an error, too: mlx.launch ends all as soon as one has ended.
        _end(text, 0.5)

    def run(self, work: Callable[[], int]) -> int:
        """Return the exit status of this rank's work. When rank 0's work ends, the others end with it.

        Meanwhile the machine does not sleep: the others would count it as lost.
        """
        try:
            with Awake():
                status = work()
            if self.rank:
                os._exit(status)  # nothing is left to do, and MLX may wait for a rank that has ended
            mx.eval(self.last_pass)  # the other ranks take part in it
        except Exception as error:
            _await_loss()
            self.fail(f"rank {self.rank}: {one_line(error)}")
        self._has_ended = True
        self.send("end", status)
        return status

    @contextmanager
    def announce(self, *command: Any) -> Iterator[None]:
        """Let the other ranks do what the body does.

        A refusal (SpecError) comes before any pass and is the same on all ranks. Other errors end all ranks.
        """
        if not self.rank:
            self.send(*command)
        try:
            yield
        except SpecError:
            raise
        except BaseException as error:
            _await_loss()
            self.fail(f"rank {self.rank} failed in a pass ({one_line(error)})")

    def number(self, owner: object) -> int:
        """Return a number for an object. When rank 0 frees the object, the other ranks drop theirs."""
        self._count += 1
        if not self.rank:
            weakref.finalize(owner, self._dropped.append, self._count).atexit = False
        return self._count

    def batch_support(self) -> BatchSupport:
        with self.announce("batch_support"):
            return probe_batch(self.model)

    def open_target(self, needs: FeatureSpec, kv_bits: int | None, rows: RowClass) -> RankTarget:
        target = RankTarget(self, needs, kv_bits=kv_bits)
        target.rows = rows
        return target

    def open_batch(self, needs: FeatureSpec, *, takes_drafts: bool, rows: RowClass) -> RankTargetBatch:
        targets = RankTargetBatch(self, needs, takes_drafts=takes_drafts)
        targets.rows = rows
        return targets

    def follow(self) -> int:
        """Do what rank 0 announces until it ends. Return its exit status."""
        targets: dict[int, Any] = {}

        def received(argument: Any) -> Any:
            match argument:
                case {"tokens": int(size)}:
                    return mx.zeros((size,), mx.int32)
                case {"target": int(number)}:
                    return targets[number]
            return tuple(argument) if isinstance(argument, list) else argument

        classes: dict[str, Callable[..., RankTarget | RankTargetBatch]]
        classes = {"target": RankTarget, "group": RankTargetBatch}
        stay = Stay()
        while True:
            message = self.receive(stay.release)
            stay.hold()
            with suppress(SpecError):  # rank 0 raises the same error and reports it
                match message:
                    case ["end", int(status)]:
                        return status
                    case ["batch_support"]:
                        self.batch_support()
                    case ["drop", number]:
                        targets.pop(number, None)
                    case ["new", number, role, needs, options]:
                        targets[number] = classes[role](self, FeatureSpec(*map(received, needs)), **options)
                    case [number, method, arguments, options]:
                        getattr(targets[number], method)(*map(received, arguments), **options)

    def _connect(self) -> dict[int, socket.socket]:
        """Return the connections by rank. A collective carries the addresses and the key of rank 0."""
        message, server = b"", None
        if self.rank == 0:
            server = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
            name, port = socket.gethostname(), server.getsockname()[1]
            message = json.dumps([name, _addresses(name), port, secrets.token_hex(16)]).encode()
        # The collective carries 2048 bytes, which hold the addresses of rank 0.
        codes = mx.array([*message.ljust(2048, b"\0")], dtype=mx.int32)
        codes = mx.distributed.all_sum(codes, group=self.group, stream=mx.cpu)
        name, addresses, port, key = json.loads(bytes(cast(list[int], codes.tolist())).rstrip(b"\0"))
        peers: dict[int, socket.socket] = {}
        if server is not None:
            while len(peers) < self.size - 1:
                with suppress(OSError, ValueError):
                    peer = server.accept()[0]
                    peer.settimeout(2.0)  # so that no other program can keep rank 0 from the others
                    match json.loads(peer.makefile("rb", 0).readline()):
                        case [word, int(rank)] if word == key:
                            peers[rank] = peer
            server.close()
            return peers
        for address in addresses:
            with suppress(OSError):
                peer = socket.create_connection((address, port), timeout=2.0)  # some cannot be reached
                peer.sendall(json.dumps([key, self.rank]).encode() + b"\n")
                return {0: peer}
        raise InvalidValue(f"rank {self.rank} cannot reach rank 0 at {name}, port {port}: check the firewall")

    def _listen(self, rank: int, peer: socket.socket) -> None:
        """Receive from a rank, and notice its end."""
        reason, sibling = "its process ended", None
        try:
            for line in _lines(peer):
                match json.loads(line):
                    case ["beat", parent, process]:
                        sibling = process if parent == self._parent else None
                    case ["error", text]:
                        self.fail(text)
                    case message:
                        self._received.put((rank, message))
                        if message[:1] == ["end"]:
                            return  # its process may end before this one has read that
        except TimeoutError:
            reason = f"nothing was heard of it for {SILENCE_S:.0f} s"
            if sibling is not None:  # it was stopped, and their parent, mlx.launch, waits for its end
                os.kill(sibling, signal.SIGKILL)
        except (OSError, ValueError):
            pass  # it ended in the middle of a line
        if not self._has_ended:
            self.fail(f"rank {rank} was lost: {reason}")

    def _beat(self) -> None:
        while not self._has_ended:
            self.send("beat", self._parent, os.getpid())
            while self._dropped:
                self.send("drop", self._dropped.pop())
            time.sleep(BEAT_S)

    def _start(self, work: Callable[..., object], *arguments: Any) -> None:
        threading.Thread(target=work, args=arguments, name="mlx_spec ranks", daemon=True).start()


def _announced(method: Method) -> Method:
    """Return a method that all ranks call with the tokens of rank 0: the others add zeros to them."""

    @wraps(method)
    def call(self: RankTarget | RankTargetBatch, *arguments: Any, **options: Any) -> Any:
        with self.ranks.announce(self.number, method.__name__, arguments, options):
            first, *others = arguments
            if isinstance(first, mx.array):  # tokens
                first = mx.distributed.all_sum(first.astype(mx.int32), group=self.ranks.group)
            result = method(self, first, *others, **options)
            if isinstance(result, mx.array):  # logits
                mx.async_eval(result)  # the whole pass, although rank 0 may never read it
                self.ranks.last_pass = result
            return result

    return cast(Method, call)


class RankTarget(LMTarget):
    """A target that is split over the ranks."""

    def __init__(self, ranks: Ranks, needs: FeatureSpec, *, kv_bits: int | None = None) -> None:
        super().__init__(ranks.model, needs, kv_bits=kv_bits)
        self.ranks, self.number, self.parts = ranks, ranks.number(self), ranks.parts
        with ranks.announce("new", self.number, "target", astuple(needs), {"kv_bits": kv_bits}):
            pass

    prefill = _announced(LMTarget.prefill)
    verify = _announced(LMTarget.verify)
    verify_tree = _announced(LMTarget.verify_tree)
    commit = _announced(LMTarget.commit)
    commit_path = _announced(LMTarget.commit_path)
    rewind = _announced(LMTarget.rewind)
    fork_from = _announced(LMTarget.fork_from)
    pin_at = _announced(LMTarget.pin_at)
    drop_rewind_point = _announced(LMTarget.drop_rewind_point)
    trim = _announced(LMTarget.trim)

    @property
    def prefill_parts(self) -> int:
        """Return 1: other passes between two layers would mix the collectives of the ranks."""
        return 1

    def state(self) -> CacheState:
        raise InvalidValue("each rank has a part of the caches: they cannot be saved")


class RankTargetBatch(TargetBatch):
    """Targets that decode in one pass and are split over the ranks."""

    def __init__(self, ranks: Ranks, needs: FeatureSpec, *, takes_drafts: bool = True) -> None:
        super().__init__(ranks.model, needs, takes_drafts=takes_drafts)
        self.ranks, self.number = ranks, ranks.number(self)
        with ranks.announce("new", self.number, "group", astuple(needs), {"takes_drafts": takes_drafts}):
            pass

    join = _announced(TargetBatch.join)
    leave = _announced(TargetBatch.leave)
    prefill = _announced(TargetBatch.prefill)
    verify = _announced(TargetBatch.verify)
    commit = _announced(TargetBatch.commit)


def _lines(peer: socket.socket) -> Iterator[bytes]:
    """Yield the lines that a rank sends until it ends. Raises TimeoutError after SILENCE_S of silence.

    Silent beats are counted, not the clock, so that ranks can be stopped (Ctrl-Z) and continued together.
    """
    events, rest, silence_s = select.poll(), b"", 0.0
    events.register(peer, select.POLLIN)
    while silence_s < SILENCE_S:
        if not events.poll(1000 * BEAT_S):
            silence_s += BEAT_S
            continue
        silence_s = 0.0
        if not (received := peer.recv(2**16)):
            return
        *lines, rest = (rest + received).split(b"\n")
        yield from lines
    raise TimeoutError


def _await_loss() -> None:
    """Give the listening threads a second to notice a lost rank, which may have made an operation fail.

    The second is cut into pieces, because all threads of a stopped process continue at once.
    """
    for _ in range(20):
        time.sleep(0.05)


def _described(argument: mx.array | RankTarget) -> dict[str, int]:
    """Return the JSON for an argument that is not sent: the other ranks have their own."""
    return {"tokens": argument.size} if isinstance(argument, mx.array) else {"target": argument.number}


def _addresses(name: str) -> list[str]:
    """Return the names and addresses under which other processes may reach this machine."""
    addresses = [name]
    with suppress(OSError):
        addresses += [str(info[4][0]) for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    return [*addresses, "127.0.0.1"]


def _end(text: str, wait_s: float = 0.0) -> NoReturn:
    with suppress(OSError):  # it may have no reader any more
        sys.stdout.flush()
    line = f"\nmlx-spec: {text}\n"  # one write on a new line, because MLX prints errors in pieces meanwhile
    os.write(2, line.encode())
    time.sleep(wait_s)
    os._exit(1)  # the main thread may wait in a collective forever
