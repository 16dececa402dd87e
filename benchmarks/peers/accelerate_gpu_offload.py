"""transformers' generate() with Accelerate's CPU offload beside a GPU.

The layers that fit stay on it, the others are copied there in every step. Weights are dummies. Runs in an environment
that has transformers and accelerate; nothing of batchgen is needed. Writes JSON, see `main`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import time
from pathlib import Path


def deadline(limit_s: float):
    """A stopping criterion for generate(): stops once the time is over; `times` is when each token was there."""
    import torch
    from transformers import StoppingCriteria

    class Deadline(StoppingCriteria):
        def __init__(self) -> None:
            self.times: list[float] = []
            self._until = time.perf_counter() + limit_s

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_) -> torch.Tensor:
            torch.cuda.synchronize()
            self.times.append(time.perf_counter())
            over = self.times[-1] > self._until and len(self.times) > 1
            return torch.full((len(input_ids),), over, device=input_ids.device)

    return Deadline()


def load(shape: str, gpu_bytes: int, host_bytes: int, dtype_name: str):
    """(model, device map). Raises SystemExit where the weights do not fit both memories."""
    import torch
    from accelerate import dispatch_model, infer_auto_device_map, init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    dtype = getattr(torch, dtype_name)
    config = AutoConfig.from_pretrained(shape)
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights()
    blocks = model._no_split_modules
    device_map = infer_auto_device_map(
        model, {0: gpu_bytes, "cpu": host_bytes}, no_split_module_classes=blocks, dtype=dtype
    )
    if "disk" in device_map.values():
        raise SystemExit("the weights do not fit GPU and host memory")
    pool = torch.randn(1 << 22, dtype=torch.float32).to(dtype) * 0.02
    model.to_empty(device="cpu")
    model.tie_weights()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            flat = tensor.view(-1)
            for start in range(0, len(flat), len(pool)):
                part = flat[start : start + len(pool)]
                part.copy_(pool[: len(part)])
    return dispatch_model(model, device_map, main_device=0).eval(), device_map


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", required=True, help="directory with a config.json")
    parser.add_argument("--gpu-memory-bytes", type=int, required=True, help="what torch may take of the card")
    parser.add_argument("--host-memory-bytes", type=int, required=True, help="what weights may take of the host")
    parser.add_argument("--weights-bytes", type=int, required=True, help="what weights may take of the card")
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--prompt-len", type=int, required=True)
    parser.add_argument("--gen-len", type=int, required=True)
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--limit-s", type=float, required=True, help="stop after this time, loading not counted")
    parser.add_argument("--output", type=Path, required=True)
    return parser.parse_args(argv)


def main() -> None:
    import torch
    from transformers import StoppingCriteriaList

    args = arguments()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, args.gpu_memory_bytes / total))
    started = time.perf_counter()
    model, device_map = load(args.shape, args.weights_bytes, args.host_memory_bytes, args.dtype)
    loaded = time.perf_counter()
    ids = torch.randint(4, 1000, (args.batch_size, args.prompt_len), device="cuda")
    until = deadline(args.limit_s)
    begun = time.perf_counter()
    with torch.inference_mode():
        model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=args.gen_len,
            max_new_tokens=args.gen_len, pad_token_id=1, stopping_criteria=StoppingCriteriaList([until]),
        )  # fmt: skip
    steps = [b - a for a, b in zip([begun, *until.times], until.times, strict=False)]
    made = len(steps)
    decode_s = sum(steps[1:]) / max(1, made - 1)
    whole_s = steps[0] + decode_s * (args.gen_len - 1)  # projected where time was over before
    args.output.write_text(
        json.dumps(
            {
                "limits": {
                    "gpu_bytes": min(total, args.gpu_memory_bytes),
                    "host_bytes": args.host_memory_bytes,
                    "dtype": args.dtype,
                },
                "block": args.batch_size,
                "load_s": loaded - started,
                "measured_tokens": made,
                "complete": made == args.gen_len,
                "prefill_s": steps[0],
                "decode_step_s": decode_s,
                "generation_s": whole_s,
                "generated_tokens_per_s": args.batch_size * args.gen_len / whole_s,
                "layers_on_gpu": sum(place == 0 for place in device_map.values()),
                "peak_gpu_bytes": torch.cuda.max_memory_allocated(),
                "batch_size": args.batch_size,
                "versions": {n: importlib.metadata.version(n) for n in ("accelerate", "transformers", "torch")},
            }
        )
    )


if __name__ == "__main__":
    main()
