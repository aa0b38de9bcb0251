"""Commands, their help, and their arguments, all without torch; `cli.py` runs the commands."""
