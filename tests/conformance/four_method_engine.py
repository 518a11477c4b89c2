"""An engine from the contract alone: four methods, one TCP connection per worker and round.

Each worker listens on a port of its own and leaves it in a directory under its rank. The sender
connects to all of them and writes the tensors' bytes one after the other.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rayxfer import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo


@dataclass
class FourMethodInitInfo(WeightTransferInitInfo):
    directory: str
    timeout_s: float


@dataclass
class FourMethodUpdateInfo(WeightTransferUpdateInfo):
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    greeting: str


class FourMethodEngine(WeightTransferEngine[FourMethodInitInfo, FourMethodUpdateInfo]):
    init_info_cls = FourMethodInitInfo
    update_info_cls = FourMethodUpdateInfo

    _listener: socket.socket | None = None

    def init_transfer_engine(self, init_info: FourMethodInitInfo) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(init_info.timeout_s)
        port = self._listener.getsockname()[1]
        path = Path(init_info.directory) / str(self.parallel_config.rank)
        path.with_suffix(".new").write_text(str(port))
        os.replace(path.with_suffix(".new"), path)

    def receive_weights(
        self,
        update_info: FourMethodUpdateInfo,
        load_weights: Callable[[list[tuple[str, torch.Tensor]]], Any],
    ) -> None:
        assert self._listener is not None
        connection, _ = self._listener.accept()
        with connection, connection.makefile("rb") as stream:
            assert stream.readline().decode().strip() == update_info.greeting
            for name, dtype_name, shape in zip(
                update_info.names, update_info.dtype_names, update_info.shapes, strict=True
            ):
                tensor = torch.empty(shape, dtype=getattr(torch, dtype_name))
                view = memoryview(tensor.view(-1).view(torch.uint8).numpy())
                if stream.readinto(view) != len(view):
                    raise EOFError(f"the sender left before {name!r} was complete")
                self.hand_over(name, tensor, load_weights)

    def hand_over(
        self,
        name: str,
        tensor: torch.Tensor,
        load_weights: Callable[[list[tuple[str, torch.Tensor]]], Any],
    ) -> None:
        load_weights([(name, tensor)])

    def shutdown(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    @staticmethod
    def trainer_send_weights(
        iterator: Iterator[tuple[str, torch.Tensor]], trainer_args: dict[str, Any]
    ) -> None:
        with ExitStack() as stack:
            streams = []
            for rank in range(trainer_args["num_workers"]):
                port = int((Path(trainer_args["directory"]) / str(rank)).read_text())
                connection = socket.create_connection(
                    ("127.0.0.1", port), trainer_args["timeout_s"]
                )
                stack.enter_context(connection)
                streams.append(stack.enter_context(connection.makefile("wb")))
            for stream in streams:
                stream.write(f"{trainer_args['update_info']['greeting']}\n".encode())
            for _, tensor in iterator:
                flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
                for stream in streams:
                    stream.write(memoryview(flat.numpy()))


class Drops(FourMethodEngine):
    """Loses one tensor."""

    def hand_over(self, name: str, tensor: torch.Tensor, load_weights: Any) -> None:
        if name != "layers.1.weight":
            load_weights([(name, tensor)])


class Flips(FourMethodEngine):
    """Changes one bit of one tensor."""

    def hand_over(self, name: str, tensor: torch.Tensor, load_weights: Any) -> None:
        if name == "layers.1.weight":
            tensor.view(-1).view(torch.uint8)[5] ^= 1
        load_weights([(name, tensor)])


class Duplicates(FourMethodEngine):
    """Hands one tensor over twice."""

    def hand_over(self, name: str, tensor: torch.Tensor, load_weights: Any) -> None:
        times = 2 if name == "layers.1.weight" else 1
        for _ in range(times):
            load_weights([(name, tensor.clone())])


class Retypes(FourMethodEngine):
    """Delivers one tensor in another dtype."""

    def hand_over(self, name: str, tensor: torch.Tensor, load_weights: Any) -> None:
        if name == "layers.1.weight":
            tensor = tensor.to(torch.bfloat16)
        load_weights([(name, tensor)])


class Swaps(FourMethodEngine):
    """Exchanges the contents of two tensors of one shape."""

    _first: torch.Tensor | None = None

    def hand_over(self, name: str, tensor: torch.Tensor, load_weights: Any) -> None:
        if name == "layers.0.weight":
            self._first = tensor
        elif name == "layers.1.weight":
            assert self._first is not None
            load_weights([("layers.0.weight", tensor), ("layers.1.weight", self._first)])
        else:
            load_weights([(name, tensor)])


class AllAtOnce(FourMethodEngine):
    """Collects the whole model before it hands it over."""

    def receive_weights(self, update_info: FourMethodUpdateInfo, load_weights: Any) -> None:
        everything: list[tuple[str, torch.Tensor]] = []
        super().receive_weights(update_info, everything.extend)
        load_weights(everything)
