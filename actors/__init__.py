"""Ready-made Ray actors on top of rayxfer: inference workers, a trainer, and where to put them."""

from actors.generation import Completion
from actors.inference import InferenceActor, InferenceWorker
from actors.placement import Placement
from actors.trainer import Trainer, TrainerActor
from actors.vllm import VLLMActor, VLLMWorker

__all__ = [
    "Completion",
    "InferenceActor",
    "InferenceWorker",
    "Placement",
    "Trainer",
    "TrainerActor",
    "VLLMActor",
    "VLLMWorker",
]
