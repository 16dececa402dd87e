"""Vectors of texts by sentence-transformers, OpenVINO and ONNX Runtime: export of a model, a sweep, and a job.

OpenVINO and ONNX Runtime get the model of transformers with its pooling in one graph, for any number and length of
texts. Texts are tokenized, sorted by length and padded in batches, as sentence-transformers does it. Each process reads
a job as JSON and writes a result as JSON; with "sweep" it is the rate of each setting on some of the texts.

    python run_embeddings.py ENGINE JOB RESULT      (ENGINE export-openvino or export-onnxruntime: writes the graph)
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

# Texts of a batch; OpenVINO: also one stream of all threads, or one for each.
_BATCH_SIZES = (4, 8, 16, 32, 64)
_HINTS = ("LATENCY", "THROUGHPUT")
Encode = Callable[[list[str], dict[str, Any]], np.ndarray]


def _threads() -> int:
    return len(os.sched_getaffinity(0))


def _limit(model: Path) -> int:
    """The most tokens of a text, by the model's files."""
    return int(json.loads((model / "sentence_bert_config.json").read_text())["max_seq_length"])


def _graph(job: dict[str, Any]) -> tuple[Any, Any]:
    """The model with pooling and normalisation as a module of torch in fp32, and inputs to trace it with."""
    import torch
    import torch.nn.functional as F
    from transformers import AutoModel

    stated = json.loads(Path(job["model"], "1_Pooling", "config.json").read_text())
    last = bool(stated.get("pooling_mode_lasttoken"))

    class Vectors(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = AutoModel.from_pretrained(job["model"], dtype=torch.float32, attn_implementation="sdpa")
            self.model.config.use_cache = False

        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            states = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
            if last:  # texts are padded on the left
                pooled = states[:, -1]
            else:
                weights = attention_mask.unsqueeze(-1).to(states.dtype)
                pooled = (states * weights).sum(1) / weights.sum(1)
            return F.normalize(pooled, dim=1)

    mask = torch.ones(2, 7, dtype=torch.int64)
    mask[1, :3] = 0
    return Vectors().eval(), (torch.randint(5, 1000, (2, 7)), mask)


def export_openvino(job: dict[str, Any]) -> dict[str, Any]:
    import openvino
    import torch

    module, (ids, mask) = _graph(job)
    with torch.inference_mode():
        example = {"input_ids": ids, "attention_mask": mask}
        inputs = [(name, [-1, -1], np.int64) for name in example]
        model = openvino.convert_model(module, example_input=example, input=inputs)
    openvino.save_model(model, job["graph"], compress_to_fp16=False)
    return {}


def export_onnxruntime(job: dict[str, Any]) -> dict[str, Any]:
    import torch

    module, inputs = _graph(job)
    axes = {0: "texts", 1: "tokens"}
    with torch.inference_mode():
        torch.onnx.export(
            module, inputs, job["graph"], dynamo=False, opset_version=17, input_names=["input_ids", "attention_mask"],
            output_names=["vectors"], dynamic_axes={"input_ids": axes, "attention_mask": axes, "vectors": {0: "texts"}},
        )  # fmt: skip
    return {}


def _batches(job: dict[str, Any], texts: list[str], size: int) -> Iterator[tuple[list[int], np.ndarray, np.ndarray]]:
    """Numbers of texts, their token ids and their mask, padded, the longest texts first."""
    from tokenizers import Tokenizer

    model = Path(job["model"])
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(_limit(model))
    ids = [encoding.ids for encoding in tokenizer.encode_batch(texts)]
    order = sorted(range(len(ids)), key=lambda i: -len(ids[i]))
    left = bool(json.loads((model / "1_Pooling" / "config.json").read_text()).get("pooling_mode_lasttoken"))
    for start in range(0, len(order), size):
        numbers = order[start : start + size]
        longest = max(len(ids[i]) for i in numbers)
        padded, mask = (np.zeros((len(numbers), longest), np.int64) for _ in range(2))
        for row, i in enumerate(numbers):
            place = slice(longest - len(ids[i]), None) if left else slice(len(ids[i]))
            padded[row, place], mask[row, place] = ids[i], 1
        yield numbers, padded, mask


def openvino_engine(job: dict[str, Any]) -> tuple[Encode, list[dict[str, Any]]]:
    import openvino

    core = openvino.Core()
    precision = {"bfloat16": "bf16", "float32": "f32"}[job["dtype"]]
    compiled: dict[str, Any] = {}

    def encode(texts: list[str], setting: dict[str, Any]) -> np.ndarray:
        hint = setting["hint"]
        if hint not in compiled:
            properties = {
                "INFERENCE_PRECISION_HINT": precision,
                "PERFORMANCE_HINT": hint,
                "INFERENCE_NUM_THREADS": _threads(),
            }
            compiled[hint] = core.compile_model(job["graph"], "CPU", properties)
        results: list[Any] = [None] * len(texts)
        # One after the other, as many at once as the hint wants: callbacks of its own queue may wait for one another.
        most = compiled[hint].get_property("OPTIMAL_NUMBER_OF_INFER_REQUESTS")
        free = [compiled[hint].create_infer_request() for _ in range(most)]
        running: deque[tuple[Any, list[int]]] = deque()

        def take_oldest() -> None:
            request, numbers = running.popleft()
            request.wait()
            for i, vector in zip(numbers, request.get_output_tensor(0).data.copy(), strict=True):
                results[i] = vector
            free.append(request)

        for numbers, ids, mask in _batches(job, texts, setting["batch"]):
            if not free:
                take_oldest()
            request = free.pop()
            request.start_async({"input_ids": ids, "attention_mask": mask})
            running.append((request, numbers))
        while running:
            take_oldest()
        return np.stack(results)

    return encode, [{"batch": size, "hint": hint} for hint in _HINTS for size in _BATCH_SIZES]


def onnxruntime_engine(job: dict[str, Any]) -> tuple[Encode, list[dict[str, Any]]]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = _threads()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    session = onnxruntime.InferenceSession(job["graph"], options, providers=["CPUExecutionProvider"])

    def encode(texts: list[str], setting: dict[str, Any]) -> np.ndarray:
        results: list[Any] = [None] * len(texts)
        for numbers, ids, mask in _batches(job, texts, setting["batch"]):
            for i, vector in zip(
                numbers, session.run(None, {"input_ids": ids, "attention_mask": mask})[0], strict=True
            ):
                results[i] = vector
        return np.stack(results)

    return encode, [{"batch": size} for size in _BATCH_SIZES]


def sentence_transformers_engine(job: dict[str, Any]) -> tuple[Encode, list[dict[str, Any]]]:
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(_threads())
    model = SentenceTransformer(job["model"], device="cpu", model_kwargs={"torch_dtype": getattr(torch, job["dtype"])})

    def encode(texts: list[str], setting: dict[str, Any]) -> np.ndarray:
        vectors = model.encode(texts, batch_size=setting["batch"], convert_to_tensor=True)
        return np.asarray(vectors.float().numpy())

    return encode, [{"batch": size} for size in _BATCH_SIZES]


ENGINES = {
    "sentence-transformers": (sentence_transformers_engine, ["sentence-transformers", "torch"]),
    "openvino": (openvino_engine, ["openvino"]),
    "onnxruntime": (onnxruntime_engine, ["onnxruntime"]),
}


def run(engine: str, job: dict[str, Any]) -> dict[str, Any]:
    """The result of a job: seconds, or with "sweep" those of each setting, the fastest first."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    load, packages = ENGINES[engine]
    table = pq.read_table(job["input"])
    encode, settings = load(job)
    said = {"versions": {name: importlib.metadata.version(name) for name in packages}}
    if job.get("sweep"):
        texts = table["text"].to_pylist()[: job["sweep"]]
        timed = []
        for setting in settings:
            encode(texts[:8], setting)
            started = time.perf_counter()
            encode(texts, setting)
            timed.append({"setting": setting, "seconds": time.perf_counter() - started})
        return {"swept": sorted(timed, key=lambda each: each["seconds"]), **said}
    started = time.perf_counter()
    vectors = encode(table["text"].to_pylist(), job["setting"])
    took = time.perf_counter() - started
    column = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1).astype(np.float32)), vectors.shape[1])
    pq.write_table(table.append_column("embedding", column), job["output"])
    return {"encode_s": took, **said}


def main() -> None:
    name, asked, said = sys.argv[1:]
    job = json.loads(Path(asked).read_text())
    exports = {"export-openvino": export_openvino, "export-onnxruntime": export_onnxruntime}
    result = exports[name](job) if name in exports else run(name, job)
    Path(said).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
