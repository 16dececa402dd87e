"""The table of functions that do the work of each kind of Step."""

from __future__ import annotations

from collections.abc import Mapping

from batchgen.runtime.steps import attention, captured, deferred, head, hidden, kv, layer, weights
from batchgen.runtime.steps.context import Handler
from batchgen.schedule.step_graph import StepKind

HANDLERS: Mapping[StepKind, Handler] = {
    "read_weight": weights.read_weight,
    "read_dense": weights.read_dense,
    "read_experts": weights.read_experts,
    "load_weight": weights.load_weight,
    "expand_weight": weights.expand_weight,
    "read_head": weights.read_head,
    "load_head": weights.load_head,
    "choose_pages": kv.choose_pages,
    "read_cache": kv.read_cache,
    "load_cache": kv.load_cache,
    "store_cache": kv.store_cache,
    "write_cache": kv.write_cache,
    "swap_in": kv.swap_in,
    "swap_out": kv.swap_out,
    "embed": hidden.embed,
    "load_hidden": hidden.load_hidden,
    "store_hidden": hidden.store_hidden,
    "receive": hidden.receive,
    "send": hidden.send,
    "pre": layer.pre,
    "route": layer.route,
    "post": layer.post,
    "attention": attention.attention,
    "send_qkv": attention.send_qkv,
    "cpu_attention": attention.cpu_attention,
    "load_attention": attention.load_attention,
    "send_deferred": deferred.send_deferred,
    "attend_deferred": deferred.attend_deferred,
    "join_deferred": deferred.join_deferred,
    "head": head.head,
    "layers": captured.all_layers,
}
