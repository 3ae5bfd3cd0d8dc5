"""One rank of the demo's gang: every rank tells rank 0 who it is; rank 0 checks that all ranks of the world came."""

import os
import socket
import sys
import time

record = sys.argv[1]
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
name = " ".join(os.environ[f"MOORAGE_{key}"] for key in ("JOB", "REPLICA", "ATTEMPT", "FENCE"))
assert os.environ["LOCAL_RANK"] == "0"
assert int(os.environ["MOORAGE_REPLICA"]) == rank
uuids = os.environ["MOORAGE_GPU_UUIDS"]


def tell(what: str) -> None:
    with open(record, "a") as file:
        file.write(f"{what}\n")


tell(f"start {name} {time.time_ns()} {uuids}")
if rank == 0:
    with socket.create_server(address) as server:
        server.settimeout(20)
        ranks = {0}
        while len(ranks) < world:
            peer, _ = server.accept()
            with peer:
                said = peer.makefile().readline().split()
                assert int(said[1]) == world, f"rank {said[0]} believes in a world of {said[1]}"
                ranks.add(int(said[0]))
    assert ranks == set(range(world)), ranks
else:
    deadline = time.monotonic() + 20
    while True:
        try:
            with socket.create_connection(address, timeout=5) as peer:
                peer.sendall(f"{rank} {world}\n".encode())
            break
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)  # rank 0 may not listen yet
tell(f"end {name} {time.time_ns()} 0")
