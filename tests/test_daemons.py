"""What becomes of threads when the process ends: none of ours takes it down, or holds it up for long."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch

from rayxfer import WeightTransferConfig
from rayxfer.daemons import _running, daemon
from rayxfer.testing import LocalController, ProcessWorker

MODES = ["in_place", "staged", "mapped"]


def run(code: str, *arguments: str, errors: str = "") -> list[str]:
    """What a process with this code printed; it ends well. `errors`: how its other output ends."""
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip().endswith(errors) if errors else not done.stderr
    return done.stdout.split()


SYNCS = """
    import sys, threading, time, torch
    from rayxfer import ControllerClosed, WeightTransferConfig
    from rayxfer.testing import LocalController

    backend, load_mode, verify, how = sys.argv[1:]

    def model():
        return torch.nn.ParameterList(torch.randn(200_000) for _ in range(60))

    mine, config = model(), WeightTransferConfig(backend=backend, load_mode=load_mode, verify=verify)
    controller = LocalController([model(), model()], config)
    controller.sync_weights(mine)

    def on_and_on():
        try:
            while True:
                controller.sync_weights(mine)
        except ControllerClosed:
            pass

    if how == "under way":
        threading.Thread(target=on_and_on, daemon=True).start()
        time.sleep(0.3)
    print("over")
"""


@pytest.mark.parametrize("load_mode", MODES)
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_process_ends_well_in_the_middle_of_a_round(backend: str, load_mode: str) -> None:
    assert run(SYNCS, backend, load_mode, "off", "under way") == ["over"]


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_process_ends_well_just_after_a_commit(backend: str) -> None:
    """A mapped worker cleans up behind it then."""
    assert run(SYNCS, backend, "mapped", "digest", "done") == ["over"]


def model() -> torch.nn.Module:
    return torch.nn.ParameterList(torch.randn(200_000) for _ in range(60))


@pytest.mark.parametrize("load_mode", MODES)
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_worker_ends_well_in_the_middle_of_a_round(backend: str, load_mode: str) -> None:
    config = WeightTransferConfig(backend=backend, load_mode=load_mode, stall_timeout_s=3.0)  # type: ignore[arg-type]
    worker, mine = ProcessWorker(model), model()
    errors: list[Exception] = []
    with LocalController([worker], config) as controller:
        controller.sync_weights(mine)

        def on_and_on() -> None:
            try:
                while True:
                    controller.sync_weights(mine)
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=on_and_on, daemon=True)
        thread.start()
        time.sleep(0.2)
        worker.close()
        thread.join(30)
        assert len(errors) == 1
    assert worker._process.exitcode == 0


HOLDS = """
    import atexit, time
    from rayxfer import daemons

    daemons._END_S, daemons._CLOSE_S = 1.0, 0.5
    called = []
    daemons.daemon(lambda: time.sleep(60), "stuck", {call_off})
    began = time.monotonic()
    atexit._run_exitfuncs()
    print(time.monotonic() - began, *called)
"""


@pytest.mark.parametrize(
    ("call_off", "waits_s", "called", "errors"),
    [
        ("None", 0.5, [], ""),
        ("lambda: called.append('off')", 1.0, ["off"], ""),
        ("lambda: 1 / 0", 1.0, [], "ZeroDivisionError: division by zero"),
    ],
)
def test_who_is_stuck_does_not_hold_the_end_up(
    call_off: str, waits_s: float, called: list[str], errors: str
) -> None:
    seconds, *said = run(HOLDS.format(call_off=call_off), errors=errors)
    assert waits_s <= float(seconds) < waits_s + 10
    assert said == called


NESTED = """
    import threading, time
    from rayxfer.daemons import daemon, ending

    off = threading.Event()

    def closes():
        time.sleep(0.2)
        print("closed")

    def works():
        off.wait(60)
        assert ending()
        time.sleep(0.2)
        print("ended")
        daemon(closes, "closes")

    daemon(works, "works", off.set)
    print("over")
"""


def test_what_is_called_off_may_close_what_it_had_open() -> None:
    assert run(NESTED) == ["over", "ended", "closed"]


def test_whoever_is_done_is_forgotten() -> None:
    thread = daemon(lambda: None, "short")
    thread.join(10)
    assert thread.daemon
    assert thread not in _running


def test_a_forked_child_calls_nothing_off() -> None:
    """It shares its parent's sockets, so it would end the parent's connections."""
    go_on = threading.Event()
    thread = daemon(lambda: go_on.wait(30), "parents", go_on.set)
    assert thread in _running
    if not (child := os.fork()):
        os._exit(len(_running))
    try:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert not go_on.is_set()
    finally:
        go_on.set()
        thread.join(10)
