from attnspec.reference.transport.dual import SinkhornPotentials, sinkhorn_dual_value, sinkhorn_potentials, sinkhorn_primal_value
from attnspec.reference.transport.flow import flow_attention, flow_attention_causal
from attnspec.reference.transport.goat import (
    AugmentedHeads,
    goat_attention,
    goat_augmented_qk,
    goat_head_attention,
    goat_key_prior,
    goat_log_prior,
)
from attnspec.reference.transport.prior import prior_attention
from attnspec.reference.transport.sinkhorn import (
    SinkhornPlan,
    sinkhorn_attention,
    sinkhorn_attention_backward,
    sinkhorn_plan,
    sinkhorn_plan_backward,
)
from attnspec.reference.transport.unbalanced import sinkhorn_unbalanced_plan

__all__ = [
    "AugmentedHeads",
    "SinkhornPlan",
    "SinkhornPotentials",
    "flow_attention",
    "flow_attention_causal",
    "goat_attention",
    "goat_augmented_qk",
    "goat_head_attention",
    "goat_key_prior",
    "goat_log_prior",
    "prior_attention",
    "sinkhorn_attention",
    "sinkhorn_attention_backward",
    "sinkhorn_dual_value",
    "sinkhorn_plan",
    "sinkhorn_plan_backward",
    "sinkhorn_potentials",
    "sinkhorn_primal_value",
    "sinkhorn_unbalanced_plan",
]
