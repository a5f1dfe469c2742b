"""An audit of storage formats: `scripts/audit.py`."""
