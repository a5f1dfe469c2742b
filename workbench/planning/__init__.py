"""What a run will take of a device's memory and time, counted before it starts, and what would take less."""
