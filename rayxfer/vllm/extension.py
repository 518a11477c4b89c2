"""For `worker_extension_cls="rayxfer.vllm.extension.WorkerExtension"`, where rayxfer is not installed.

vLLM resolves a worker extension before it makes its weight-transfer engine, so importing this module is
all that it takes.
"""

from __future__ import annotations

from rayxfer.vllm.plugin import register

__all__ = ["WorkerExtension"]


class WorkerExtension:
    """Empty: vLLM refuses an extension that has a method of its worker's, and the plugin adds one."""


register()
