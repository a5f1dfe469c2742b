"""Models on the Hugging Face hub: listed, and downloaded into its cache."""
