"""Captions, and the prompts that are taken from them."""
