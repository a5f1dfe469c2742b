"""Text encoders, VAEs, attention and objectives that several families share."""
