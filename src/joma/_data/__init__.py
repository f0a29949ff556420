"""Texts, tokens and pretrained models: read or made once, kept in a cache, the same for all who ask."""
