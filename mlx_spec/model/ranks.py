"""A target over several machines: rank 0 decides, the other ranks repeat its passes on their shards.

`mlx.launch` starts a process on each machine, a rank. All load one target and keep a part of it (`shard`).
Rank 0 alone has drafters, policies, samplers and the program. Its targets announce each operation over a
socket; the others do it, too, on the tokens that rank 0 broadcasts (`Ranks.follow`). So nothing depends on
the logits or the clock of another rank.

Collectives have to come in the same order on all ranks. Therefore a pass is handed to the device whole,
although rank 0 may never read it, and an operation that rank 0 began and could not end ends all ranks.
"""

from __future__ import annotations

import json
import os
import queue
import secrets
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple
from typing import Any, BinaryIO, NoReturn, Protocol, cast, runtime_checkable

import mlx.core as mx
import mlx.nn as nn

from mlx_spec.batch.target import SharedTarget, sharing
from mlx_spec.errors import BadCheckpoint, InvalidValue, SpecError
from mlx_spec.hub.files import one_line
from mlx_spec.model.hooks import parts_of
from mlx_spec.model.target import LMTarget
from mlx_spec.types import CacheState, Features, FeatureSpec, TargetParts

BACKENDS = ("ring", "jaccl")  # of mx.distributed: TCP everywhere, and RDMA between Macs
BEAT_S = 1.0  # seconds between two signs of life
SILENCE_S = 7.0  # without one a rank is lost; every rank is to end within 10 seconds
START_S = 60.0  # until all ranks are connected: each imports MLX first, and a remote one logs in
PRINT_S = 0.5  # for the others to print an error, too: mlx.launch ends all as soon as one has ended
CONNECT_S = 2.0  # for one address of rank 0; it may have some that cannot be reached
GREETING = 2048  # bytes of the collective that carries the addresses of rank 0


@runtime_checkable
class Shardable(Protocol):
    """A model of mlx-lm that can be split over ranks."""

    def shard(self, group: mx.distributed.Group) -> None:
        """Keep the part of this rank."""


def join() -> Ranks | None:
    """Return the ranks of `mlx.launch`; None if this process was not launched as one of several.

    Raises InvalidValue if they cannot connect. If one is missing, the process ends with one line.
    """
    late = threading.Timer(START_S, _end, [f"ranks are missing after {START_S:.0f} s: start all again"])
    late.daemon = True
    late.start()
    try:
        for backend in BACKENDS:
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
    while a rank is idle, loads or waits in a collective.
    """

    def __init__(self, group: mx.distributed.Group) -> None:
        self.group = group
        self.rank, self.size = group.rank(), group.size()
        self.parts: TargetParts | None = None  # of the whole target, for drafters of rank 0
        self._sending, self._failing = threading.Lock(), threading.Lock()
        self._received: queue.Queue[tuple[int, list[Any]]] = queue.Queue()
        self._dropped: list[int] = []  # targets that rank 0 no longer has
        self._count = 0  # of targets
        self._is_inside = False  # an announced operation runs
        self._last_pass = mx.array([])
        self._has_ended = False
        if self.rank:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 decides what Ctrl-C means
        self._peers = self._connect()
        for rank, peer in self._peers.items():
            peer.socket.settimeout(SILENCE_S)
            self._start(self._listen, rank, peer)
        self._start(self._beat)

    def compare(self, own: Mapping[str, str]) -> None:
        """End all ranks unless they have the same `identity`. Rank 0 waits until all have sent theirs."""
        if self.rank:
            return self.send("identity", own)
        for _ in range(self.size - 1):
            rank, (_, other) = self._received.get()
            for name, value in own.items():
                if other[name] != value:
                    self.fail(
                        f"rank {rank} has another {name} ({other[name]}) than rank 0 ({value}): copy it"
                    )

    def shard(self, model: nn.Module) -> None:
        """Keep this rank's part of a model whose weights were not read yet. Raises BadCheckpoint."""
        if not isinstance(model, Shardable):
            raise BadCheckpoint("mlx-lm cannot split this kind of model over ranks: use one machine")
        self.parts = parts_of(model)
        try:
            model.shard(self.group)
        except (AssertionError, ValueError) as error:
            raise BadCheckpoint(f"it cannot be split over {self.size} ranks ({one_line(error)})") from error
        mx.eval(model.parameters())

    def share(self, tokens: mx.array) -> mx.array:
        """Return the tokens of rank 0, [T] int32, on every rank. The others give as many zeros."""
        return mx.distributed.all_sum(tokens.astype(mx.int32), group=self.group)

    def start_pass(self, logits: mx.array) -> None:
        """Hand a pass to the device, all of it."""
        mx.async_eval(logits)
        self._last_pass = logits

    def receive(self) -> list[Any]:
        """Wait for a message of another rank."""
        return self._received.get()[1]

    def send(self, *message: Any) -> None:
        """Send a message to rank 0, or from rank 0 to all others."""
        line = json.dumps(message).encode() + b"\n"
        with self._sending:
            for peer in self._peers.values():
                with suppress(OSError):  # the thread that listens to this rank reports its end
                    peer.socket.sendall(line)

    def fail(self, text: str) -> NoReturn:
        """End this process with one line and status 1, and the other ranks with the same line."""
        self._failing.acquire()  # for ever: the first error counts
        self._has_ended = True
        self.send("error", text)
        _end(text, PRINT_S)

    def lead(self, run: Callable[[], int]) -> int:
        """Return the exit status of `run`. The other ranks end with the same."""
        try:
            status = run()
            mx.eval(self._last_pass)  # the other ranks take part in it
        except SpecError as error:
            self.fail(f"rank 0: {error}")
        except BaseException as error:
            self._failing.acquire()
            self.send("error", f"rank 0: {one_line(error)}")
            raise
        self._has_ended = True
        self.send("end", status)
        return status

    @contextmanager
    def announced(self, *command: Any) -> Iterator[None]:
        """Let the other ranks do what the body does. Operations within the body are part of it.

        A refusal (SpecError) comes before any pass and is the same on all ranks. Other errors end all ranks.
        """
        if self.rank or self._is_inside:
            yield
            return
        self._is_inside = True
        while self._dropped:
            self.send("drop", self._dropped.pop())
        self.send(*command)
        try:
            yield
        except SpecError:
            raise
        except BaseException as error:
            self.fail(f"rank 0 failed in a pass ({one_line(error) or type(error).__name__})")
        finally:
            self._is_inside = False

    def announce_new(self, target: RankTarget | RankSharedTarget, kind: str, *facts: Any) -> int:
        """Return the number of a new target. When rank 0 has no use for it, the others drop it, too."""
        self._count += 1
        if not self.rank:
            weakref.finalize(target, self._dropped.append, self._count).atexit = False
        with self.announced(kind, self._count, *facts):
            return self._count

    def follow(self, model: nn.Module) -> NoReturn:
        """Do what rank 0 announces until it ends. Then this process ends with the status of rank 0."""
        targets: dict[int, RankTarget] = {}
        groups: dict[int, RankSharedTarget] = {}
        while True:
            with suppress(SpecError):  # rank 0 has it, too, and answers for it
                match self.receive():
                    case ["target", id, [layers, *others], kv_bits]:
                        needs = FeatureSpec(tuple(layers), *others)
                        targets[id] = RankTarget(self, model, needs, kv_bits=kv_bits)
                    case ["group", id, [layers, *others]]:
                        groups[id] = RankSharedTarget(self, model, FeatureSpec(tuple(layers), *others))
                    case ["drop", id]:
                        targets.pop(id, None)
                        groups.pop(id, None)
                    case ["sharing"]:
                        sharing(model)
                    case ["prefill", id, tokens]:
                        targets[id].prefill(tokens)
                    case ["verify", id, rows, size]:
                        if targets[id].size != size:
                            raise RuntimeError(f"{targets[id].size} tokens where rank 0 has {size}")
                        targets[id].verify(mx.zeros((rows,), mx.int32))
                    case ["verify_tree", id, parents]:
                        targets[id].verify_tree(mx.zeros((len(parents) + 1,), mx.int32), tuple(parents))
                    case ["commit", id, keep]:
                        targets[id].commit(keep)
                    case ["commit_path", id, rows]:
                        targets[id].commit_path(rows)
                    case ["rewind", id, size]:
                        targets[id].rewind(size)
                    case ["join", id, home]:
                        groups[id].join(targets[home])
                    case ["leave", id, index, keep]:
                        groups[id].leave(index, keep=keep)
                    case ["verify_all", id, rows]:
                        groups[id].verify(mx.zeros((sum(rows),), mx.int32), rows)
                    case ["commit_all", id, keep]:
                        groups[id].commit(keep)
                    case ["end", status]:
                        os._exit(status)  # nothing is left to do, and MLX may wait for a rank that has ended

    def _connect(self) -> dict[int, _Peer]:
        """Return the connections by rank. A collective tells the others where rank 0 listens, and a key."""
        given, server = b"", None
        if self.rank == 0:
            server = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
            name, port = socket.gethostname(), server.getsockname()[1]
            given = json.dumps([name, _addresses(name), port, secrets.token_hex(16)]).encode()
        codes = mx.array([*given.ljust(GREETING, b"\0")], dtype=mx.int32)
        codes = mx.distributed.all_sum(codes, group=self.group, stream=mx.cpu)
        name, addresses, port, key = json.loads(bytes(cast(list[int], codes.tolist())).rstrip(b"\0"))
        peers: dict[int, _Peer] = {}
        if server is not None:
            while len(peers) < self.size - 1:
                with suppress(OSError, ValueError):
                    peer = _Peer(server.accept()[0])
                    match json.loads(peer.lines.readline()):
                        case [word, int(rank)] if word == key:
                            peer.exchange_ids()
                            peers[rank] = peer
            server.close()
            return peers
        for address in addresses:
            with suppress(OSError, ValueError):
                peer = _Peer(socket.create_connection((address, port), CONNECT_S))
                peer.socket.sendall(json.dumps([key, self.rank]).encode() + b"\n")
                peer.exchange_ids()
                return {0: peer}
        raise InvalidValue(f"rank {self.rank} cannot reach rank 0 at {name}, port {port}: check the firewall")

    def _listen(self, rank: int, peer: _Peer) -> None:
        """Receive from a rank, and notice its end."""
        reason = "its process ended"
        try:
            for line in peer.lines:
                match json.loads(line):
                    case ["beat"]:
                        continue
                    case ["error", text]:
                        self.fail(text)
                    case message:
                        self._received.put((rank, message))
        except TimeoutError:
            reason = f"nothing was heard of it for {SILENCE_S:.0f} s"
            if peer.sibling is not None:  # it was stopped, and their parent, mlx.launch, waits for its end
                os.kill(peer.sibling, signal.SIGKILL)
        except (OSError, ValueError):
            pass  # it ended in the middle of a line
        if not self._has_ended:
            self.fail(f"rank {rank} was lost: {reason}")

    def _beat(self) -> None:
        while not self._has_ended:
            self.send("beat")
            time.sleep(BEAT_S)

    def _start(self, work: Callable[..., object], *arguments: Any) -> None:
        threading.Thread(target=work, args=arguments, name="mlx_spec ranks", daemon=True).start()


class _Peer:
    """A connection to another rank."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        connected.settimeout(CONNECT_S)  # so that nobody else can keep rank 0 from the others
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.lines: BinaryIO = connected.makefile("rb")
        self.sibling: int | None = None  # its process, if that has the same parent

    def exchange_ids(self) -> None:
        """Tell both sides which process of `mlx.launch` the other one is, if it is on the same machine."""
        self.socket.sendall(json.dumps([os.getpid(), os.getppid()]).encode() + b"\n")
        process, parent = json.loads(self.lines.readline())
        is_here = self.socket.getpeername()[0] == self.socket.getsockname()[0]
        self.sibling = process if is_here and parent == os.getppid() else None


class RankTarget(LMTarget):
    """A target of which each rank has a part."""

    def __init__(
        self, ranks: Ranks, model: nn.Module, needs: FeatureSpec, *, kv_bits: int | None = None
    ) -> None:
        super().__init__(model, needs, kv_bits=kv_bits)
        assert ranks.parts is not None, "the model was sharded by these ranks"
        self.parts = ranks.parts
        self._ranks = ranks
        self.number = ranks.announce_new(self, "target", astuple(needs), kv_bits)

    def prefill(self, tokens: list[int]) -> Features:
        with self._ranks.announced("prefill", self.number, tokens):
            return super().prefill(tokens)

    def verify(self, tokens: mx.array) -> mx.array:
        with self._ranks.announced("verify", self.number, tokens.size, self.size):
            logits = super().verify(self._ranks.share(tokens))
            self._ranks.start_pass(logits)
        return logits

    def verify_tree(self, tokens: mx.array, parents: tuple[int, ...]) -> mx.array:
        with self._ranks.announced("verify_tree", self.number, parents):
            logits = super().verify_tree(self._ranks.share(tokens), parents)
            self._ranks.start_pass(logits)
        return logits

    def commit(self, keep: int) -> Features:
        with self._ranks.announced("commit", self.number, keep):
            return super().commit(keep)

    def commit_path(self, rows: Sequence[int]) -> Features:
        with self._ranks.announced("commit_path", self.number, list(rows)):
            return super().commit_path(rows)

    def rewind(self, size: int) -> int:
        with self._ranks.announced("rewind", self.number, size):
            return super().rewind(size)

    def state(self) -> CacheState:
        raise InvalidValue("each rank has a part of the caches: they cannot be saved")


class RankSharedTarget(SharedTarget):
    """Targets that decode in one pass, of which each rank has a part."""

    def __init__(
        self, ranks: Ranks, model: nn.Module, needs: FeatureSpec, *, takes_drafts: bool = True
    ) -> None:
        super().__init__(model, needs, takes_drafts=takes_drafts)
        self._ranks = ranks
        self._number = ranks.announce_new(self, "group", astuple(needs))

    def join(self, home: LMTarget) -> None:
        assert isinstance(home, RankTarget)
        with self._ranks.announced("join", self._number, home.number):
            super().join(home)

    def leave(self, index: int, *, keep: bool) -> None:
        with self._ranks.announced("leave", self._number, index, keep):
            super().leave(index, keep=keep)

    def verify(self, tokens: mx.array, sizes: Sequence[int]) -> mx.array:
        with self._ranks.announced("verify_all", self._number, list(sizes)):
            logits = super().verify(self._ranks.share(tokens), sizes)
            self._ranks.start_pass(logits)
        return logits

    def commit(self, keep: Sequence[int]) -> list[Features]:
        with self._ranks.announced("commit_all", self._number, list(keep)):
            return super().commit(keep)


def _addresses(name: str) -> list[str]:
    """Return where other processes may find this machine: by its name, its addresses, or on it."""
    found = [name]
    with suppress(OSError):
        found += [str(info[4][0]) for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    return [*found, "127.0.0.1"]


def _end(text: str, wait_s: float = 0.0) -> NoReturn:
    with suppress(OSError):  # nobody may read it any more
        sys.stdout.flush()
    line = f"\nmlx-spec: {text}\n"  # one write on a new line, because MLX prints errors in pieces meanwhile
    os.write(2, line.encode())
    time.sleep(wait_s)
    os._exit(1)  # the main thread may wait in a collective for ever
