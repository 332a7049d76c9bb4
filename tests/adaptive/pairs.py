"""Cases that two joined processes compute in turns, and the answers of both."""

import os
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from repro.adaptive import join_processes


def run_cases(rank, port, folder, todo):
    """Join the other process; save the result, or the error's text, of each (key, function)."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    reports = {"joined": [join_processes("cpu", 60), join_processes("cpu", 60)]}
    for key, run in todo(rank):
        try:
            reports[key] = run()
        except Exception:
            reports[key] = traceback.format_exc()
    torch.save(reports, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def answers(both, *key):
    """Return both processes' answers to a case, neither of which is an error's text."""
    found = [answer[key if len(key) > 1 else key[0]] for answer in both]
    for each in found:
        assert not isinstance(each, str), each
    return found


def assert_close(got, wanted, tolerance=1e-12):
    assert len(got) == len(wanted)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
