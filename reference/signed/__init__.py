from attnspec.reference.signed.cog import cog_attention, cog_attention_backward, cog_weights

__all__ = ["cog_attention", "cog_attention_backward", "cog_weights"]
