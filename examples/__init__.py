"""Photos to try with, the pocket models, and their making (`pocket/`)."""
