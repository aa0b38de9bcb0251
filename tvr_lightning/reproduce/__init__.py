"""What the papers publish, runs of their tables, and the report that sets one beside the other."""
