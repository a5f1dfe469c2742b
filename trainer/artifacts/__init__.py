"""What a run leaves for people: samples, adapter files, the model card, the pages."""
