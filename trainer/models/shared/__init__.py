"""What the families share: CLIP and the VAE."""
