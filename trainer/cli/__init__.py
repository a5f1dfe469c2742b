"""The command line: what a person writes becomes one of the things that the program does."""
