"""What this project's own verbs run where several rooms meet; their signatures and docstrings are the command line."""
