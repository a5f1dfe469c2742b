"""What a run will do, in lines for people: its model, adapter, data and length, and what of them looks unintended."""
