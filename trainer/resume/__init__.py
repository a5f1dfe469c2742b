"""The start of a run, and checks of a resumed one."""
