"""Encoded photos and captions, kept from one epoch and one run to the next."""
