"""What a config asks for, found out and checked before a weight is read."""
