"""Errors, latency percentiles, and memory of the search server under load on the loopback interface.

Command: python benchmarks/serving.py --index INDEX --seconds 20 --clients 4
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

import numpy as np

QUERIES = ["a dog runs", "a man talks", "someone cooks", "a car on a road", "children play", "music on a stage"]

MOST_GROWTH = 1.1
"""Maximum ratio of memory after and before the load; a larger one indicates a leak."""


def resident(process):
    """Return the resident memory of a process in MiB."""
    status = Path(f"/proc/{process}/status").read_text(encoding="ascii")
    return int(re.findall(r"VmRSS:\s+(\d+)", status)[0]) / 1024


def client(port, until, took, statuses, number):
    """Send requests until a time. A broken connection counts as status 0 and ends the client."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        try:
            ask(connection, until, took, statuses, number)
        except (OSError, http.client.HTTPException):
            statuses["connection", 0] += 1


def ask(connection, until, took, statuses, number):
    video = None
    turn = number
    while time.monotonic() < until:
        paths = [f"/api/search?top=10&query={quote(QUERIES[turn % len(QUERIES)])}"]
        if video:
            paths += [f"/api/videos/{video}/image?time=1", f"/api/videos/{video}/file"]
        path = paths[turn % len(paths)]
        began = time.perf_counter()
        connection.request("GET", path)
        answer = connection.getresponse()
        body = answer.read()
        kind = "search" if path.startswith("/api/search") else path.partition("?")[0].rpartition("/")[2]
        took.append((kind, 1000 * (time.perf_counter() - began)))
        statuses[kind, answer.status] += 1
        if kind == "search" and answer.status == 200:
            video = json.loads(body)["results"][0]["id"]
        turn += 1


def answers(port):
    """Return whether the server accepts connections."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except ConnectionRefusedError:
        return False
    finally:
        connection.close()


def load(port, clients, seconds):
    """Send requests from several clients; return (kind, milliseconds) of each request, and counts by status."""
    took, statuses = [], Counter()
    until = time.monotonic() + seconds
    threads = [threading.Thread(target=client, args=(port, until, took, statuses, n)) for n in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return took, statuses


def start(index, port):
    """Start `tvr serve` with an index, and wait until it responds."""
    command = [sys.executable, "-m", "tvr_lightning.cli", "serve", "--index", str(index), "--port", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    while not answers(port):
        if server.poll() is not None:
            raise SystemExit(f"The server exited with status {server.returncode}.")
        time.sleep(0.2)
    return server


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--index", required=True)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--port", type=int, default=8397)
    options = parser.parse_args()
    server = start(options.index, options.port)
    try:
        load(options.port, options.clients, options.seconds / 2)  # fills the caches before memory is compared
        before = resident(server.pid)
        took, statuses = load(options.port, options.clients, options.seconds)
        after = resident(server.pid)
    finally:
        server.terminate()
        ended = server.wait(30)
    print("| request | number | p50 ms | p95 ms | p99 ms |\n|---|---|---|---|---|")
    for kind in sorted({kind for kind, _ in took}):
        values = [ms for k, ms in took if k == kind]
        p = np.percentile(values, [50, 95, 99])
        print(f"| {kind} | {len(values)} | {p[0]:.1f} | {p[1]:.1f} | {p[2]:.1f} |")
    print("statuses:", dict(statuses))
    print(f"memory: {before:.0f} MiB before, {after:.0f} MiB after")
    print("ended by signal" if ended < 0 else "exit status", abs(ended))
    wrong = {status for _, status in statuses} - {200}
    if not took or wrong or after > MOST_GROWTH * before:
        raise SystemExit(f"Failed: {len(took)} requests, other statuses {wrong}, memory ratio {after / before:.2f}")


if __name__ == "__main__":
    main()
