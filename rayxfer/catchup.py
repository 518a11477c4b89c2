"""How a worker that joins, or was restarted, gets the committed version without the trainer.

A peer that holds it becomes the sender of one ordinary round to one worker, over the same engines and
with the same proof. Exact by construction: either both models have the same fingerprint, and raw
tensors are copied by name; or both load by name with the default loader and the peer itself got every
tensor uncast, so that what it holds is what travelled; or the peer is a keeper, which holds just that.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from rayxfer.config import WeightTransferConfig
from rayxfer.errors import TransferError
from rayxfer.report import WorkerState
from rayxfer.sender import Sender
from rayxfer.source import WeightSource

__all__ = ["donate"]


def donate(source: WeightSource, message: dict[str, Any]) -> None:
    """Run in the peer: send `source` to the newcomer as version `message["version"]`.

    Raises:
        TransferError and what else a sync raises; the newcomer is as a failed round leaves it.
    """
    sender = Sender(_OneRound(message))
    try:
        report = sender.sync(source, version=message["version"], partial=False)
    finally:
        sender.close()
    row = report.workers[0]
    if row.state != WorkerState.READY:
        raise TransferError(f"the newcomer is {row.state} after catching up", phase="connect")


class _OneRound:
    """Stands in for the controller: it has granted this round already and holds its lock."""

    def __init__(self, message: dict[str, Any]) -> None:
        self._message = message

    def begin(self, request: dict[str, Any]) -> dict[str, Any]:
        config: WeightTransferConfig = self._message["config"]
        member = self._message["newcomer"]
        raw = {"is_checkpoint_format": False} if self._message["raw"] else {}
        return {
            "round_id": self._message["round_id"],
            "version": self._message["version"],
            "base": 0,
            "versions": {member["rank"]: 0},
            "lost": {},
            "roster": "",
            "owner": self._message["owner"],
            "config": dataclasses.replace(
                config,
                backend="auto",
                # for one worker and one round there is nothing to share
                load_mode="staged" if config.load_mode == "mapped" else config.load_mode,
                init_info={},
                trainer_args={},
                update_info=raw,
                on_worker_failure="raise",
            ),
            "members": [{**member, "backend": "auto"}],
        }

    def renew(self, claim: dict[str, Any]) -> None:
        """Nothing to do: the controller waits for this very call."""

    def commit(
        self, claim: dict[str, Any], rows: list[dict[str, Any]], message: dict[str, Any]
    ) -> dict[str, Any]:
        """Nothing to record: the version was committed before."""
        return {"answers": {}, "settled": False}

    def settle(self, claim: dict[str, Any], rows: list[dict[str, Any]]) -> None:
        """Nothing to settle: the controller asks the newcomer itself."""
