"""Tools for those who write engines, sources and loaders; without Ray.

`check_engine` runs the conformance kit on an engine. `LocalController` is the whole protocol in one
process, `ProcessWorker` a worker of it in another. `faulty` builds real faults into an engine. `poison`,
`raw_bytes` and `assert_same_bytes` are for honest tests of your own.
"""

from rayxfer.testing.conformance import ConformanceReport, EngineCheckError, check_engine
from rayxfer.testing.faults import Fault, faulty
from rayxfer.testing.local import LocalController
from rayxfer.testing.processes import ProcessWorker
from rayxfer.testing.tensors import assert_same_bytes, poison, raw_bytes

__all__ = [
    "ConformanceReport",
    "EngineCheckError",
    "Fault",
    "LocalController",
    "ProcessWorker",
    "assert_same_bytes",
    "check_engine",
    "faulty",
    "poison",
    "raw_bytes",
]
