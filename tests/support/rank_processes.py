"""Start ranks on this machine as `mlx.launch` does, which itself takes a core here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from support.ports import free_ports


@contextmanager
def launched(
    folder: Path,
    *commands: Sequence[str],
    environment: Mapping[str, str] = {},
    start: type[subprocess.Popen[str]] = subprocess.Popen,
) -> Iterator[list[subprocess.Popen[str]]]:
    """Run a Python command as each rank."""
    hosts = [[f"127.0.0.1:{port}"] for port in free_ports(len(commands))]
    hostfile = folder / "hosts.json"
    hostfile.write_text(json.dumps(hosts))
    ranks = [
        start(
            [sys.executable, *command],
            env={**os.environ, **environment, "MLX_RANK": str(rank), "MLX_HOSTFILE": str(hostfile)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, command in enumerate(commands)
    ]
    try:
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
