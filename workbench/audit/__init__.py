"""What each storage format of a layer would cost and spare: `scripts/audit.py`."""
