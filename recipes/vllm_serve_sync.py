"""Push weights into a running `vllm serve`, and check that its answers changed.

    python -m recipes.vllm_serve_sync --url http://127.0.0.1:8000 --checkpoint PATH

PATH is a folder of safetensors files in the names of the served model's own checkpoint. Without `--url` a
small server is started here first, on a model made from a config, and gets another one's weights: the whole
thing on a CPU. A server of yours needs `VLLM_SERVER_DEV_MODE=1` in its environment, rayxfer installed
beside vLLM, and `--weight-transfer-config '{"backend": "rayxfer"}'`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ray
import requests

from rayxfer import Controller, WeightTransferConfig
from rayxfer.checkpoint import CheckpointSource
from rayxfer.vllm import VLLMServer

PROMPT = [1, 2, 3, 4, 5]
START_TIMEOUT_S = 300.0


def answer(url: str, token: str | None) -> list[float]:
    """Log-probabilities of a greedy completion: they tell one version of the weights from another."""
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    model = requests.get(f"{url}/v1/models", headers=headers, timeout=30).json()["data"][0]["id"]
    body = {"model": model, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "logprobs": 0}
    response = requests.post(f"{url}/v1/completions", json=body, headers=headers, timeout=120)
    response.raise_for_status()
    scores: list[float] = response.json()["choices"][0]["logprobs"]["token_logprobs"]
    return scores


def save_small_model(path: Path, seed: int) -> None:
    """A Llama of 0.3 M parameters with a tokenizer of one word per id."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=100,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        eos_token_id=None,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(100)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0").save_pretrained(path)


@contextlib.contextmanager
def small_server(model: Path, *, token: str | None = None) -> Iterator[str]:
    """vLLM's API server on a port of its own; its URL."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    root = str(Path(__file__).resolve().parent.parent)
    environment = {
        **os.environ,
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(model), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "bfloat16", "--max-model-len", "128", "--max-num-seqs", "8"]
    command += ["--enforce-eager", "--kv-cache-memory-bytes", str(64 << 20)]
    command += ["--weight-transfer-config", '{"backend": "rayxfer"}']
    # enough where rayxfer is importable but not installed, and harmless where it is
    command += ["--worker-extension-cls", "rayxfer.vllm.extension.WorkerExtension"]
    command += [] if token is None else ["--api-key", token]
    server = subprocess.Popen(command, env=environment, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            with contextlib.suppress(requests.RequestException):
                if requests.get(f"{url}/health", timeout=2).ok:
                    break
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("the server did not come up; see its output above")
            time.sleep(0.3)
        yield url
    finally:
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait(30)


def push(url: str, checkpoint: Path, backend: str, token: str | None) -> None:
    before = answer(url, token)
    controller = Controller([VLLMServer(url, token=token)], WeightTransferConfig(backend=backend))
    try:
        report = controller.sync_weights(CheckpointSource(checkpoint))
    finally:
        controller.shutdown()
    after = answer(url, token)
    print(report)
    for when, scores in (("before", before), ("after", after)):
        print(f"{when:>6}: log-probabilities {' '.join(f'{score:.4f}' for score in scores)}")
    if before == after:
        raise SystemExit("the answer did not change: were these the weights that it had?")
    print(f"{url} serves version {report.version}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Push weights into a running vllm serve.")
    parser.add_argument("--url", help="of the server; default: start a small one here")
    parser.add_argument("--checkpoint", type=Path, help="folder of safetensors files")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--token", help="the server's --api-key")
    args = parser.parse_args(argv)
    if args.url and not args.checkpoint:
        parser.error("--url needs --checkpoint: what shall it be given?")
    kwargs: dict[str, Any] = {} if ray.is_initialized() else {"include_dashboard": False}
    ray.init(ignore_reinit_error=True, log_to_driver=False, **kwargs)
    if args.url:
        push(args.url.rstrip("/"), args.checkpoint, args.backend, args.token)
        return
    with tempfile.TemporaryDirectory() as folder:
        old, new = Path(folder) / "served", Path(folder) / "trained"
        save_small_model(old, seed=0)
        save_small_model(new, seed=1)
        with small_server(old, token=args.token) as url:
            push(url, args.checkpoint or new, args.backend, args.token)


if __name__ == "__main__":
    main()
