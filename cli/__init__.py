"""The command line: `attnspec`, built on click."""
