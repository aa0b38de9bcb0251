"""What verbs there are, their help, and how their options are read, all of it without torch; `cli.py` runs them."""
