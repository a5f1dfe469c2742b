"""Adapter files of all kinds, opened: for whoever starts from them, shows, converts, merges, compares or draws them."""
