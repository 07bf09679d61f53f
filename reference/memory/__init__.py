from attnspec.reference.memory.binary import (
    BinaryRetrieval,
    hopfield_binary,
    hopfield_binary_energy,
    hopfield_binary_update,
    hopfield_binary_weights,
)
from attnspec.reference.memory.dense import dense_associative_memory, dense_associative_memory_energy
from attnspec.reference.memory.hopfield import (
    HopfieldGradients,
    HopfieldRetrieval,
    hopfield_energy,
    hopfield_jacobian,
    hopfield_retrieve,
    hopfield_retrieve_backward,
    hopfield_update,
)
from attnspec.reference.memory.hopfield_bounds import (
    HopfieldCapacity,
    HopfieldStorage,
    hopfield_capacity,
    hopfield_metastable_size,
    hopfield_retrieval_bound,
    hopfield_separation,
    hopfield_storage_radius,
)
from attnspec.reference.memory.sdm import SDMStorage, sdm_read, sdm_update, sdm_write
from attnspec.reference.memory.sdm_attention import sdm_attention
from attnspec.reference.memory.sdm_beta import SDMBetaFit, sdm_fit_beta
from attnspec.reference.memory.sdm_cap import sdm_cap_intersection
from attnspec.reference.memory.sdm_circle import sdm_circle_intersection
from attnspec.reference.memory.sdm_radius import sdm_capacity, sdm_critical_distance, sdm_optimal_radius
from attnspec.reference.memory.universal import universal_hopfield, universal_hopfield_similarity

__all__ = [
    "BinaryRetrieval",
    "HopfieldCapacity",
    "HopfieldGradients",
    "HopfieldRetrieval",
    "HopfieldStorage",
    "SDMBetaFit",
    "SDMStorage",
    "dense_associative_memory",
    "dense_associative_memory_energy",
    "hopfield_binary",
    "hopfield_binary_energy",
    "hopfield_binary_update",
    "hopfield_binary_weights",
    "hopfield_capacity",
    "hopfield_energy",
    "hopfield_jacobian",
    "hopfield_metastable_size",
    "hopfield_retrieval_bound",
    "hopfield_retrieve",
    "hopfield_retrieve_backward",
    "hopfield_separation",
    "hopfield_storage_radius",
    "hopfield_update",
    "sdm_attention",
    "sdm_cap_intersection",
    "sdm_capacity",
    "sdm_circle_intersection",
    "sdm_critical_distance",
    "sdm_fit_beta",
    "sdm_optimal_radius",
    "sdm_read",
    "sdm_update",
    "sdm_write",
    "universal_hopfield",
    "universal_hopfield_similarity",
]
