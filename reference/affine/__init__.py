from attnspec.reference.affine.affine_scaled import (
    AffineGradients,
    affine_alpha,
    affine_moving_average,
    affine_scaled_attention,
    affine_scaled_attention_backward,
    linear_clipping,
)
from attnspec.reference.affine.context_broadcasting import context_broadcasting
from attnspec.reference.affine.energy_gated import (
    convolution_energy,
    convolution_energy_gated_attention,
    energy_gate,
    energy_gated_attention,
    linear_energy,
    morlet_energy,
    morlet_energy_gated_attention,
)
from attnspec.reference.affine.gated import gated_attention

__all__ = [
    "AffineGradients",
    "affine_alpha",
    "affine_moving_average",
    "affine_scaled_attention",
    "affine_scaled_attention_backward",
    "context_broadcasting",
    "convolution_energy",
    "convolution_energy_gated_attention",
    "energy_gate",
    "energy_gated_attention",
    "gated_attention",
    "linear_clipping",
    "linear_energy",
    "morlet_energy",
    "morlet_energy_gated_attention",
]
