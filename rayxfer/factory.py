"""The registry of engines: a name, and how to get its class. Nothing is imported until it is used."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from dataclasses import dataclass
from typing import Any

from rayxfer.base import WeightTransferEngine
from rayxfer.config import ParallelConfig, WeightTransferConfig
from rayxfer.errors import ConfigError, UnknownBackend

__all__ = ["EngineEntry", "WeightTransferEngineFactory"]

ENTRY_POINT_GROUP = "rayxfer.engines"

EngineClass = type[WeightTransferEngine[Any, Any]]


@dataclass(frozen=True)
class EngineEntry:
    """One registration, in a form that can be shipped to a worker.

    Attributes:
        name: registry key.
        module: module of the class.
        class_name: its name there ("" for a class that only exists by value).
        by_value: the class itself, pickled by value, for where the module cannot be imported.
    """

    name: str
    module: str
    class_name: str
    by_value: bytes | None = None

    def load(self) -> EngineClass:
        """The class.

        Raises:
            UnknownBackend: neither the module nor the value gives it; the cause says why.
        """
        try:
            engine_cls = getattr(importlib.import_module(self.module), self.class_name)
        except (ImportError, AttributeError) as error:
            if self.by_value is None:
                raise UnknownBackend(
                    f"backend {self.name!r} is registered as {self.module}:{self.class_name}, which "
                    f"cannot be imported here: {error}",
                    cause=error,
                ) from error
            import cloudpickle

            try:
                engine_cls = cloudpickle.loads(self.by_value)
            except Exception as inner:
                raise UnknownBackend(
                    f"backend {self.name!r} was shipped by value, and its class cannot be rebuilt "
                    f"here: {type(inner).__name__}: {inner}",
                    cause=inner,
                ) from inner
        return _check_class(self.name, engine_cls)


class WeightTransferEngineFactory:
    """Registers engines by name, lazily or directly, and makes them.

    Registration is per process. `Controller` ships the entry of a backend to its workers, so a
    class that only the driver registered works everywhere.
    """

    built_in: tuple[str, ...] = ("nccl", "ipc", "gloo", "shm", "object_store")

    _lazy: dict[str, tuple[str, str]] = {}  # noqa: RUF012 - the registry is the class, as in vLLM
    _direct: dict[str, EngineClass] = {}  # noqa: RUF012

    @classmethod
    def register_engine(
        cls,
        name: str,
        module_path_or_cls: str | EngineClass,
        class_name: str | None = None,
    ) -> None:
        """Register `name` as ("module.path", "ClassName"), imported when first used, or as a class.

        Raises:
            ConfigError: (a ValueError) the name is taken or empty, the class name is missing, or
                what was given is no engine class.
        """
        if not isinstance(name, str) or not name or name == "auto":
            raise ConfigError(
                f"backend name {name!r}: expected a non-empty string other than 'auto'"
            )
        if name in cls._lazy or name in cls._direct:
            raise ConfigError(f"backend {name!r} is already registered: names are unique")
        if isinstance(module_path_or_cls, str):
            if not class_name:
                raise ConfigError(
                    f"backend {name!r}: class_name is required with the module path "
                    f"{module_path_or_cls!r}"
                )
            if not all(part.isidentifier() for part in module_path_or_cls.split(".")):
                raise ConfigError(
                    f"backend {name!r}: {module_path_or_cls!r} is no absolute module path"
                )
            cls._lazy[name] = (module_path_or_cls, class_name)
        else:
            cls._direct[name] = _check_class(name, module_path_or_cls)

    @classmethod
    def registered(cls) -> tuple[str, ...]:
        """Every name known to this process, entry points of the group `rayxfer.engines` included."""
        names = [*cls._lazy, *cls._direct]
        names += [point.name for point in _entry_points() if point.name not in names]
        return tuple(sorted(names))

    @classmethod
    def get_engine_class(cls, name: str) -> EngineClass:
        """The class behind a name; imports its module now.

        Raises:
            UnknownBackend: nothing of that name, listing what there is; or it cannot be imported.
        """
        if name in cls._direct:
            return cls._direct[name]
        if name not in cls._lazy:
            for point in _entry_points():
                if point.name == name:
                    cls._lazy[name] = (point.module, point.attr or "")
        if name not in cls._lazy:
            raise UnknownBackend(
                f"unknown backend {name!r}: registered are {', '.join(cls.registered())}"
            )
        return EngineEntry(name, *cls._lazy[name]).load()

    @classmethod
    def entry(cls, name: str) -> EngineEntry:
        """The registration of `name` in a form that a worker process can use.

        A class goes by reference, and by value as well (unless it is rayxfer's own): its module may
        be one that only this process's `sys.path` reaches.

        Raises:
            UnknownBackend: as `get_engine_class`.
            ConfigError: a class that can go by neither way; the cause says why.
        """
        engine_cls = cls.get_engine_class(name)
        if name in cls._lazy:
            return EngineEntry(name, *cls._lazy[name])
        module, qualname = engine_cls.__module__, engine_cls.__qualname__
        by_name = module != "__main__" and (
            getattr(sys.modules.get(module), qualname, None) is engine_cls
        )
        if by_name and module.partition(".")[0] == "rayxfer":
            return EngineEntry(name, module, qualname)
        try:
            value = _pickle(engine_cls)
        except Exception as error:  # whatever a user's module holds: the reference may still do
            if not by_name:
                raise ConfigError(
                    f"backend {name!r}: {module}.{qualname} can be sent to a worker neither by name "
                    f"nor by value: {type(error).__name__}: {error}",
                    cause=error,
                ) from error
            value = None
        if by_name:
            return EngineEntry(name, module, qualname, value)
        return EngineEntry(name, "<by value>", "", value)

    @classmethod
    def create_engine(
        cls,
        config: WeightTransferConfig,
        parallel_config: ParallelConfig | None = None,
    ) -> WeightTransferEngine[Any, Any]:
        """An engine for `config.backend` (one name, not "auto").

        Raises:
            UnknownBackend: the name is not registered, listing those that are.
        """
        if not isinstance(config.backend, str):
            raise ConfigError(f"backend={config.backend!r}: an engine is made from one name")
        return cls.get_engine_class(config.backend)(config, parallel_config)


def _check_class(name: str, engine_cls: object) -> EngineClass:
    if not isinstance(engine_cls, type) or not issubclass(engine_cls, WeightTransferEngine):
        raise ConfigError(
            f"backend {name!r}: {engine_cls!r} is no subclass of WeightTransferEngine"
        )
    return engine_cls


def _entry_points() -> tuple[importlib.metadata.EntryPoint, ...]:
    return tuple(importlib.metadata.entry_points(group=ENTRY_POINT_GROUP))


def _pickle(engine_cls: EngineClass) -> bytes:
    """The class by value. Raises whatever something that its module holds raises."""
    import cloudpickle

    module = sys.modules.get(engine_cls.__module__)
    # rayxfer itself is on every worker; anything else may be reachable from this process only
    ours = engine_cls.__module__.partition(".")[0] == __name__.partition(".")[0]
    by_reference = module is not None and engine_cls.__module__ != "__main__" and not ours
    already = engine_cls.__module__ in cloudpickle.list_registry_pickle_by_value()
    if by_reference and not already:
        cloudpickle.register_pickle_by_value(module)
    try:
        return bytes(cloudpickle.dumps(engine_cls))
    finally:
        if by_reference and not already:
            cloudpickle.unregister_pickle_by_value(module)


for _name, _class in zip(
    WeightTransferEngineFactory.built_in,
    ("NCCLEngine", "IPCEngine", "GlooEngine", "ShmEngine", "ObjectStoreEngine"),
    strict=True,
):
    WeightTransferEngineFactory.register_engine(_name, f"rayxfer.engines.{_name}", _class)
