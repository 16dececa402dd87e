"""lm-evaluation-harness on batchgen: the model `batchgen` for `lm_eval`, and a launcher that knows of it.

    python -m batchgen.lmeval --model batchgen --model_args pretrained=demo,dtype=float32 --tasks arc_easy

Nothing here is imported with batchgen itself; it needs the extra `lmeval`.
"""
