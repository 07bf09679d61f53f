"""What may be known of an entry: everything where a twin is called plainly, nothing where MLX only traces it."""

import mlx.core as mx


def known_true(flag: mx.array) -> bool:
    """Whether the flag () is true and may be looked at; a transformation of MLX, which traces it, has no entries yet."""
    try:
        return bool(flag.item())
    except ValueError:
        return False
