"""lm-evaluation-harness on batchgen: the model `batchgen` for `lm_eval`, and a launcher that registers it.

    python -m batchgen.lmeval --model batchgen --model_args pretrained=demo,dtype=float32 --tasks arc_easy

`import batchgen` does not import this package, which needs the extra `lmeval`.
"""
